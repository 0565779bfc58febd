"""Inspect AI evaluates samples whose sandboxes are a main container and a service; then its own checks in the service.

argv: a directory with the `compose.yaml` of the Inspect task, for each sample the tool and the command of each of the
model's calls as a JSON list, and the names of checks to leave out. FORKPOINT_URL names the proxy. Prints the texts that
each model is shown, what the scorer has found, and for each check that fails its error.
"""

# mypy: disable-error-code="import-not-found, unused-ignore, misc, no-any-return, untyped-decorator"

import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from inspect_ai import Task
from inspect_ai import eval as evaluate
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessageTool, ModelOutput, ModelUsage, get_model
from inspect_ai.scorer import Score, mean, scorer
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import bash, tool_with
from inspect_ai.util import sandbox
from inspect_ai.util._sandbox import self_check

from forkpoint.inspect import ForkpointSandbox

BINARY = bytes(range(256)) * 300
"""More than one argument of a program can hold, and no UTF-8."""


@scorer(metrics=[mean()])
def found() -> Any:
    async def score(*_: Any) -> Score:
        store = sandbox("store")
        try:
            await sandbox().connection()
            terminal = ""
        except NotImplementedError as error:
            terminal = str(error)
        await store.write_file("new/binary", BINARY)
        await store.exec(["ln", "-s", "/opt/log", "link"])
        copied = await store.exec(["sh", "-c", "cat >new/copy; wc -c <new/copy"], input=BINARY)
        facts = {
            "log": await store.read_file("link"), "same": await store.read_file("/opt/new/copy", text=False) == BINARY,
            "bytes": copied.stdout.strip(), "main": (await sandbox().exec(["sh", "-c", "ls; ls /opt 2>&1"])).stdout,
            "terminal": terminal, "one": sandbox().as_type(ForkpointSandbox).rollout.name
            == store.as_type(ForkpointSandbox).rollout.name,
        }  # fmt: skip
        return Score(value=1, explanation=json.dumps(facts))

    return score


def sample(calls: list[list[str]]) -> list[Any]:
    # The file `compose.yaml` is found in the current directory, which is that of the Inspect task.
    outputs = [ModelOutput.for_tool_call("mockllm", tool, {"command": command}) for tool, command in calls]
    files = {"seed.txt": "seed\n", "store:extra.txt": "extra\n"}
    task = Task(
        dataset=[Sample("do it", files=files, setup="echo ok >ready.txt")],
        solver=[use_tools(bash(timeout=30), tool_with(bash(timeout=30, sandbox="store"), name="in_store")), generate()],
        scorer=found(), name="services", sandbox="forkpoint",
    )  # fmt: skip
    outputs.append(ModelOutput.from_content("mockllm", "done"))
    for output in outputs:
        # With a usage, the model does not count tokens, which would need an encoding from the network.
        output.usage = ModelUsage(input_tokens=1, output_tokens=1, total_tokens=2)
    with tempfile.TemporaryDirectory() as logs:
        log = evaluate(task, model=get_model("mockllm/model", custom_outputs=outputs), log_dir=logs, display="none")[0]
        assert log.status == "success", log.error
        # Samples are read from the log when they are first looked at.
        assert log.samples
        [one] = log.samples
        shown = [message.text for message in one.messages if isinstance(message, ChatMessageTool)]
        return [shown, json.loads(next(iter(one.scores.values())).explanation)]


async def checks(left_out: list[str]) -> dict[str, str]:
    """Run Inspect's checks of a provider in one service, one after the other; return their errors."""
    await ForkpointSandbox.task_init("checks", "compose.yaml")
    environments = await ForkpointSandbox.sample_init("checks", "compose.yaml", {})
    errors = {}
    for name in self_check.__all__:
        if name in left_out:
            continue
        try:
            await getattr(self_check, name)(environments["store"])
            errors[name] = ""
        except Exception as error:  # noqa: BLE001 - it is the result
            errors[name] = f"{type(error).__name__}: {error}"[:300]
    await ForkpointSandbox.sample_cleanup("checks", "compose.yaml", environments, False)
    return errors


async def refusals(folder: Path) -> list[str]:
    """Return the errors of configurations that no sandbox can be."""
    texts = {
        "build/compose.yaml": "services: {default: {image: a}, web: {build: ./none}}",
        "host/compose.yaml": "services: {default: {image: a, pid: host}}",
        "Dockerfile": "FROM scratch",
    }
    errors = []
    # Nothing here builds images.
    os.environ["PATH"] = ""
    for name, text in texts.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
        try:
            await ForkpointSandbox.task_init("refused", str(folder / name))
        except ValueError as error:
            errors.append(str(error))
    return errors


if __name__ == "__main__":
    os.chdir(sys.argv[1])
    samples = [sample(calls) for calls in json.loads(sys.argv[2])]
    results = asyncio.run(checks(sys.argv[3:]))
    failed = {name: error for name, error in results.items() if error}
    refused = asyncio.run(refusals(Path(sys.argv[1])))
    print(json.dumps({"samples": samples, "checks": len(results), "failed": failed, "refused": refused}))
