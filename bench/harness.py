"""Unmodified agents inside their sandbox: a rollout, its repetition, and branches: `python -m bench.harness codex`.

The model's words are written before, and so what each tool must print is known: a branch is wrong if its model was ever
shown anything else. Agents come from npm and PyPI, with these versions, and are kept in `--packages`.
"""

import json
import re
import shutil
import subprocess
import sys
import time
from argparse import ArgumentParser
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from bench.machine import console, median, table
from forkpoint.ephemeral_proxy import ephemeral_proxy
from tests.scripted_model import ScriptedModel, scripted_model

_CODEX = (
    "exec $(ls /h/vendor/*/bin/codex) exec --dangerously-bypass-approvals-and-sandbox --skip-git-repo-check "
    "-c model_provider=s -c model_providers.s.name=s -c model_providers.s.base_url=$MODEL/v1 "
    "-c model_providers.s.wire_api=responses -m scripted 'do the task'"
)


@dataclass(frozen=True, slots=True)
class Agent:
    """An agent: its package, the one with its program, its command, its variables, and with which command it ends."""

    package: str
    program: str
    command: str
    env: dict[str, str]
    end: str | None = None


_OPENCODE = {
    "provider": {
        "s": {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": "{model}/v1", "apiKey": "inside"},
            "models": {"scripted": {}},
        }
    }
}
_OPENHANDS = """
import os
from openhands.sdk import LLM, Agent, Conversation, Tool
from openhands.tools.terminal import TerminalTool
llm = LLM(model="openai/scripted", base_url=os.environ["OPENAI_BASE_URL"], api_key="inside")
agent = Agent(llm=llm, tools=[Tool(name=TerminalTool.name)])
conversation = Conversation(agent=agent, workspace=os.getcwd())
conversation.send_message("do the task")
conversation.run()
"""

AGENTS = {
    "claude": Agent(
        "@anthropic-ai/claude-code@2.1.197", "@anthropic-ai/claude-code-linux-x64",
        "exec /h/claude -p 'do the task' --dangerously-skip-permissions --output-format json",
        {"ANTHROPIC_BASE_URL": "{model}", "ANTHROPIC_API_KEY": "inside", "IS_SANDBOX": "1", "HOME": "/hh"},
    ),
    "codex": Agent(
        "@openai/codex@0.171.0", "@openai/codex-linux-x64", _CODEX,
        {"MODEL": "{model}", "OPENAI_API_KEY": "inside", "HOME": "/hh"},
    ),
    "gemini": Agent(
        "@google/gemini-cli@0.61.0", "@google/gemini-cli",
        "mkdir -p ~/.gemini; echo '{\"security\": {\"auth\": {\"selectedType\": \"gemini-api-key\"}}}' > "
        "~/.gemini/settings.json; exec node /h/bundle/gemini.js -m gemini-2.5-pro --yolo --skip-trust -p 'do the task'",
        {"GOOGLE_GEMINI_BASE_URL": "{model}", "GEMINI_API_KEY": "inside", "HOME": "/hh"},
    ),
    "qwen": Agent(
        "@qwen-code/qwen-code@0.15.10", "@qwen-code/qwen-code",
        "exec node /h/cli.js --auth-type openai --yolo -p 'do the task'",
        {"OPENAI_BASE_URL": "{model}/v1", "OPENAI_API_KEY": "inside", "OPENAI_MODEL": "scripted", "HOME": "/hh"},
    ),
    "opencode": Agent(
        "opencode-ai@1.18.33", "opencode-linux-x64", "exec /h/bin/opencode run -m s/scripted 'do the task'",
        {"OPENCODE_CONFIG_CONTENT": json.dumps(_OPENCODE), "OPENCODE_DISABLE_AUTOUPDATE": "1", "HOME": "/hh"},
    ),
    "mini": Agent(
        "mini-swe-agent==2.4.6", "mini-swe-agent",
        "exec $PYTHON -m minisweagent.run.mini -m openai/scripted -t 'do the task' --yolo --exit-immediately",
        {
            "OPENAI_BASE_URL": "{model}/v1", "OPENAI_API_KEY": "inside", "MSWEA_CONFIGURED": "true", "HOME": "/hh",
            "MSWEA_COST_TRACKING": "ignore_errors", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "PYTHONPATH": "/h",
            "PYTHON": "python3",
        },
        "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT",
    ),
    "openhands": Agent(
        "openhands-sdk==1.58.2 openhands-tools==1.58.2", "openhands", f"exec $PYTHON -c '{_OPENHANDS}'",
        {
            "OPENAI_BASE_URL": "{model}/v1", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "PYTHONPATH": "/h",
            "HOME": "/hh", "LANG": "C.UTF-8", "PYTHON": "python3",
        },
    ),
}  # fmt: skip


class Script:
    """What the model says in each turn, and what the tool then prints."""

    def __init__(self, turns: int, end: str | None = None) -> None:
        self._turns, self._end = turns, end

    def say(self, number: int, who: str) -> str | None:
        if number >= self._turns:
            return self._end if number == self._turns else None
        begin = "(setsid sleep 900 >/dev/null 2>&1 &); until pgrep sleep >/dev/null; do :; done; "
        sleeper = begin if number == 1 else ""
        return f"{sleeper}echo {who or 'all'}{number} >> /repo/log; cat /repo/log; pgrep -c sleep; true"

    def printed(self, who: str, turn: int) -> list[str]:
        words = [f"{who if number == turn else 'all'}{number}" for number in range(self._turns)]
        return ["\n".join(words[: n + 1]) + f"\n{int(n > 0)}" for n in range(self._turns)]


def main(arguments: list[str]) -> int:
    parser = ArgumentParser(prog="bench.harness", description=__doc__)
    parser.add_argument("agent", choices=AGENTS)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--at", type=int, nargs="*", default=[2, 6, 10, 14, 18], help="The turns that are left.")
    parser.add_argument("--branches", type=int, default=8, help="How many branches leave each of them.")
    parser.add_argument("--packages", type=Path, default=Path("/var/tmp/forkpoint-agents"))  # noqa: S108
    parser.add_argument("--python", type=Path, help="A directory with bin/python3, if the sandbox's is too old.")
    parser.add_argument("--quick", action="store_true", help="6 turns, 2 branches at one turn.")
    options = parser.parse_args(arguments)
    if options.quick:
        options.turns, options.at, options.branches = 6, [3], 2
    agent, script = AGENTS[options.agent], Script(options.turns, AGENTS[options.agent].end)
    folder = _installed(agent, options.packages, options.python)
    archives, env = [{"source": str(folder), "target": "/h"}], agent.env
    if options.python:
        archives.append({"source": str(options.python), "target": "/python"})
        env = {**env, "PYTHON": "/python/bin/python3", "LD_LIBRARY_PATH": "/python/lib"}
    spec = {
        "archives": archives, "setup": ["mkdir -p /repo /hh"], "workdir": "/repo",
        "limits": {"memory_mb": 6144, "pids": 1000, "disk_mb": 8192, "timeout_s": 240},
        "harness": {"command": agent.command, "env": env},
    }  # fmt: skip
    with (
        scripted_model(script.say) as model,
        ephemeral_proxy() as proxy,
        httpx.Client(base_url=proxy.url, timeout=900) as client,
    ):
        client.put("/api/v1/tasks/t", json=spec).raise_for_status()
        first_s, first = _ran(client, "first", model.url())
        assert first[-1].get("exit") == 0, first[-1]
        again_s, again = _ran(client, "again", model.url())
        wrong, seconds = 0, []
        for turn in options.at:
            for number in range(options.branches):
                who = f"b{turn}x{number}"
                began = len(model.asked)
                took_s, events = _ran(client, who, model.url(who, turn), parent="first", turn=turn)
                seconds.append(took_s)
                good = events[-1].get("exit") == 0 and _is_right(model, began, script.printed(who, turn))
                wrong += not good
                if not good:
                    (options.packages / f"wrong-{who}.json").write_text(json.dumps(model.asked[began:]))
                console.print(f"branch {who}: {'right' if good else f'WRONG {events[-1]}'} in {took_s:.1f} s")
        evicted = client.get("/api/v1/stats").json()["evictions"]
        states = client.get("/api/v1/snapshots", params={"kind": "processes", "limit": 1000}).json()["items"]
        sizes = [state["size_bytes"] / 1e6 for state in states]
    turns = len(first) - 1
    shown = table(f"{options.agent}, {turns} turns, {len(seconds)} branches", "figure", "value")
    for name, value in (
        ("first rollout", f"{first_s:.1f} s"),
        ("turns without the model, median", f"{median([event['seconds'] for event in first[:-1]]):.2f} s"),
        ("states that could not be kept", str(sum("not_kept" in event for event in first))),
        ("the same again", f"{again_s:.2f} s, {again_s / turns * 1000:.0f} ms a turn"),
        ("its turns that ran", str(sum(event["outcome"] != "hit" for event in again[:-1]))),
        ("branches, median", f"{median(seconds):.1f} s"),
        ("branches that were wrong or lost", f"{wrong} of {len(seconds)}"),
        (
            "kept for a turn",
            f"median {median(sizes):.0f}, mean {sum(sizes) / len(sizes):.0f}, most {max(sizes):.0f} MB",
        ),
        ("states that are kept; given up", f"{len(sizes)}; {evicted}"),
    ):
        shown.add_row(name, value)
    console.print(shown)
    return 1 if wrong else 0


def _installed(agent: Agent, packages: Path, python: Path | None) -> Path:
    """Return the directory of an agent's program, which npm or pip fetches once."""
    if "==" in agent.package:
        folder = packages / agent.program
        # Without `--python`, the sandbox's `python3` must have the version of this one.
        command = [str(python / "bin" / "python3") if python else sys.executable, "-m", "pip", "install"]
        command += ["--target", str(folder), *agent.package.split()]
    else:
        folder, npm = packages / "node_modules" / agent.program, shutil.which("npm")
        assert npm, "npm is missing (Debian: apt-get install npm)"
        command = [
            npm,
            "install",
            "--no-audit",
            "--no-fund",
            "--ignore-scripts",
            "--prefix",
            str(packages),
            agent.package,
        ]
    if not folder.exists():
        packages.mkdir(parents=True, exist_ok=True)
        subprocess.run(command, check=True, capture_output=True)
    return folder


def _ran(client: httpx.Client, name: str, url: str, **more: Any) -> tuple[float, list[dict[str, Any]]]:
    began = time.perf_counter()
    answer = client.post(f"/t/t/r/{name}/harness", json={"upstream": url, **more})
    answer.raise_for_status()
    return time.perf_counter() - began, [json.loads(line) for line in answer.text.splitlines()]


def _is_right(model: ScriptedModel, began: int, printed: list[str]) -> bool:
    """Return whether the model's last request shows all that the tools must have printed, in this order."""
    if len(model.asked) == began:
        return False
    # Some agents ask for a title beside their turns, with no tool.
    text, at = json.dumps([body for _, body in model.asked[began:] if body.get("tools")][-1]), 0
    # Some wrap what a tool printed into JSON once more.
    text = re.sub(r"\\+n", "\n", text)
    for part in printed:
        at = text.find(part, at)
        if at < 0:
            return False
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
