"""Inspect AI evaluates samples with Forkpoint's provider and its own scripted model; then its own checks of a provider.

argv: the proxy's URL, the models' commands for each sample as a JSON list, and the names of checks to leave out. Prints
the texts that each model is shown, the scores' values, and for each check that fails its error.
"""

# mypy: disable-error-code="import-not-found, unused-ignore, misc, no-any-return, untyped-decorator"

import asyncio
import json
import sys
import tempfile
from typing import Any

from inspect_ai import Task
from inspect_ai import eval as evaluate
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessageTool, ModelOutput, ModelUsage, get_model
from inspect_ai.scorer import Score, mean, scorer
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import bash
from inspect_ai.util import SandboxEnvironmentSpec, sandbox
from inspect_ai.util._sandbox import self_check
from inspect_ai.util._sandbox.registry import registry_find_sandboxenv

from forkpoint.inspect import ForkpointConfig, ForkpointSandbox


@scorer(metrics=[mean()])
def files() -> Any:
    async def score(*_: Any) -> Score:
        result = await sandbox().exec(["sh", "-c", "ls | wc -l"])
        return Score(value=int(result.stdout))

    return score


def sample(config: ForkpointConfig, commands: list[str]) -> tuple[list[str], float]:
    # With a usage, the model does not count tokens, which would need an encoding from the network.
    calls = [ModelOutput.for_tool_call("mockllm", "bash", {"command": command}) for command in commands]
    task = Task(
        dataset=[Sample("do it", files={"seed.txt": "seed\n"}, setup="echo ready > ready.txt")],
        solver=[use_tools(bash(timeout=30)), generate()], scorer=files(), name="group",
        sandbox=SandboxEnvironmentSpec("forkpoint", config),
    )  # fmt: skip
    outputs = [*calls, ModelOutput.from_content("mockllm", "done")]
    for output in outputs:
        output.usage = ModelUsage(input_tokens=1, output_tokens=1, total_tokens=2)
    model = get_model("mockllm/model", custom_outputs=outputs)
    with tempfile.TemporaryDirectory() as logs:
        log = evaluate(task, model=model, log_dir=logs, display="none")[0]
        assert log.status == "success", log.error
        assert log.samples
        [one] = log.samples
        shown = [message.text for message in one.messages if isinstance(message, ChatMessageTool)]
        return shown, next(iter(one.scores.values())).value


async def checks(config: ForkpointConfig, left_out: list[str]) -> dict[str, str]:
    """Run Inspect's checks of a provider at once, each in a sandbox of its own; return their errors."""
    await ForkpointSandbox.task_init("checks", config)

    async def check(name: str) -> str:
        [(_, environment)] = (await ForkpointSandbox.sample_init("checks", config, {})).items()
        try:
            await getattr(self_check, name)(environment)
        except Exception as error:  # noqa: BLE001 - it is the result
            return f"{type(error).__name__}: {error}"[:300]
        finally:
            await ForkpointSandbox.sample_cleanup("checks", config, {"default": environment}, False)
        return ""

    names = [name for name in self_check.__all__ if name not in left_out]
    return dict(zip(names, await asyncio.gather(*map(check, names)), strict=True))


if __name__ == "__main__":
    chosen = ForkpointConfig(url=sys.argv[1], spec={"limits": {"output_bytes": 10 << 20}})
    assert registry_find_sandboxenv("forkpoint") is ForkpointSandbox
    samples = [sample(chosen, commands) for commands in json.loads(sys.argv[2])]
    results = asyncio.run(checks(chosen, sys.argv[3:]))
    failed = {name: error for name, error in results.items() if error}
    print(json.dumps({"samples": samples, "checks": len(results), "failed": failed}))
