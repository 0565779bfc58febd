"""E2B's own SDKs, unmodified: three versions of the Python SDK, and the JavaScript SDK."""

import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.agents.clients import node_packages, packages, run
from tests.agents.serving import Proxy, real_proxy
from tests.machine import require_criu
from tests.sandboxes.image_archives import bash_image

GROUP = ["p1", "p2", "p3", "p4"]
KEY = "e2b_" + "0123456789abcdef" * 2
PYTHON_SDKS = ["2.63.0", "2.40.0", "2.10.2"]
JS_SDK = "2.51.0"
EXAMPLES = Path(__file__).parents[2] / "examples"


def sdk(version: str) -> Path:
    return packages(f"e2b=={version}")


def urls(proxy: Proxy, task: str, rollout: str = "") -> dict[str, str]:
    """Return the environment variables that point E2B's SDKs to a task, or to one of its rollouts."""
    base = f"{proxy.url}/t/{task}{f'/r/{rollout}' if rollout else ''}/e2b"
    return {"E2B_API_URL": base, "E2B_SANDBOX_URL": base, "E2B_API_KEY": KEY}


def plain(value: Any, part: str) -> Any:
    """Return answers without what differs between runs: random numbers, and the rollout's own part."""
    if isinstance(value, dict):
        return {name: plain(member, part) for name, member in value.items()}
    if isinstance(value, list):
        return [plain(item, part) for item in value]
    if isinstance(value, str):
        return re.sub(rf"\b{part}\b", "PART", re.sub(r"\b[0-9]{4,}\b", "DRAWN", value))
    return value


def steps_of(proxy: Proxy, task: str, rollout: str) -> list[dict[str, Any]]:
    """Return the steps of a rollout, in order."""
    return list(proxy.client.get(f"/api/v1/tasks/{task}/rollouts/{rollout}").json()["steps"]["items"])


def calls_before(proxy: Proxy, task: str, rollout: str, command: str) -> int:
    """Return how many calls a rollout made before the call that contains a command."""
    steps = steps_of(proxy, task, rollout)
    return next(
        position for position, step in enumerate(steps) if command in str(step["call"]["arguments"].get("argv"))
    )


def together(proxy: Proxy, packages_dir: Path, script: str, task: str) -> dict[str, Any]:
    """Run the group's first rollout alone, then the others at once; return the answers of each."""
    answers = {GROUP[0]: run(packages_dir, script, GROUP[0], env=urls(proxy, task, GROUP[0]))}
    with ThreadPoolExecutor(2) as pool:
        runs = {part: pool.submit(run, packages_dir, script, part, env=urls(proxy, task, part)) for part in GROUP[1:]}
        return answers | {part: running.result() for part, running in runs.items()}


def check_group(proxy: Proxy, packages_dir: Path, script: str, spec: dict[str, Any]) -> None:
    """Check that rollouts that share a prefix and then diverge see what each would see alone."""
    proxy.put("cached", **spec)
    proxy.put("alone", **spec, cache="never")
    shared, alone = run(packages_dir, script, "p0", env=urls(proxy, "alone", "p0"))
    answers = together(proxy, packages_dir, script, "cached")
    prefix = calls_before(proxy, "cached", GROUP[0], f"echo {GROUP[0]} >/work/part")
    assert prefix >= shared - 2
    for part in GROUP:
        assert plain(answers[part][1], part) == plain(alone, "p0")
        # All share the random numbers that the prefix and its processes drew, also after the fork.
        assert answers[part][1][:shared] == answers[GROUP[0]][1][:shared]
        drawn = answers[part][1][1]["stdout"]
        assert answers[part][1][shared]["stdout"] == f"{part}\n{drawn}"
        assert answers[part][1][shared + 1]["stdout"].split()[1] in str(answers[GROUP[0]][1][:shared])
    for part in GROUP[1:]:
        steps = steps_of(proxy, "cached", part)
        assert calls_before(proxy, "cached", part, f"echo {part} >/work/part") == prefix
        assert {step["outcome"] for step in steps[:prefix]} == {"hit"}
    # A copy that is not as it was taken is refused, and a replay takes its place: the answers above are right then too.
    assert proxy.client.get("/api/v1/stats").json()["failures"] in ({}, {"restore": 1})


@pytest.mark.parametrize("version", PYTHON_SDKS)
def test_python_sdk_group_matches_single_rollouts(version: str) -> None:
    """Four rollouts share a prefix and then diverge; each sees what a single uncached rollout would see."""
    require_criu()
    with real_proxy(checkpoints=True) as proxy:
        check_group(proxy, sdk(version), "e2b_client.py", {})


@pytest.mark.parametrize("root", ["host", "image"])
def test_javascript_sdk_group_matches_single_rollouts(root: str) -> None:
    """The same group with the JavaScript SDK, on the machine's own system and on an image."""
    require_criu()
    spec = {"image": bash_image()} if root == "image" else {}
    with real_proxy(checkpoints=True) as proxy:
        check_group(proxy, node_packages(f"e2b@{JS_SDK}"), "e2b_client.mjs", spec)


def without_messages(value: Any) -> Any:
    """Return answers with each exception reduced to its name."""
    if isinstance(value, dict):
        return value.get("raised", value)
    return [without_messages(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("version", PYTHON_SDKS)
def test_python_sdk_rare_features_work(version: str) -> None:
    """Terminals, watches, polls and timeouts behave as the SDK expects, for a first and for a second rollout."""
    require_criu()
    gone = "TimeoutException" if version != PYTHON_SDKS[0] else "SandboxNotRunningException"
    missing = (
        ["NotFoundException"] * 2
        if version == PYTHON_SDKS[2]
        else ["FileNotFoundException", "SandboxNotFoundException"]
    )
    expected = [
        True,
        [True, "same-same\n", True, "NotFoundException", "NotFoundException"],
        [True, [True], True, "SandboxException", True, "CommandExitException", False],
        [
            [["create", "new"], ["chmod", "new"], ["write", "new"], ["rename", "new"], ["create", "other"]],
            ["sub", "sub/notes", "other"], [], None, "InvalidArgumentException", missing[0],
        ],
        {"stdout": "shared\n", "stderr": "", "exit_code": 0},
        False, gone, gone, missing[1], missing[1], False,
    ]  # fmt: skip
    with real_proxy(checkpoints=True) as proxy:
        for _ in range(2):
            assert without_messages(run(sdk(version), "e2b_more.py", env=urls(proxy, "more"))) == expected


def test_asyncio_sdk_works() -> None:
    """The SDK for asyncio sees what a single uncached rollout sees."""
    require_criu()
    with real_proxy(checkpoints=True) as proxy:
        packages_dir = sdk(PYTHON_SDKS[0])
        proxy.put("alone", cache="never")
        shared, alone = run(packages_dir, "e2b_async.py", "p0", env=urls(proxy, "alone"))
        first, second = (run(packages_dir, "e2b_async.py", part, env=urls(proxy, "cached"))[1] for part in GROUP[:2])
    assert second[:shared] == first[:shared]
    assert plain(first, "p1") == plain(second, "p2") == plain(alone, "p0")
    assert second[shared]["stdout"] == f"p2\n{first[0]['stdout']}"


def test_javascript_sdk_rare_features_work() -> None:
    """Terminals, watches, polls and timeouts behave as the JavaScript SDK expects."""
    require_criu()
    expected = [
        True, True, "same-same\n", True, "NotFoundError",
        True, True, "SandboxError", True, "CommandExitError", False,
        ["create new", "chmod new", "write new"], ["create new", "chmod new", "write new", "remove new"],
        "FileNotFoundError", False, "SandboxNotFoundError", "TimeoutError", "SandboxNotFoundError",
        "SandboxNotFoundError", False,
    ]  # fmt: skip
    with real_proxy(checkpoints=True) as proxy:
        packages_dir = node_packages(f"e2b@{JS_SDK}")
        for _ in range(2):
            assert without_messages(run(packages_dir, "e2b_more.mjs", env=urls(proxy, "more"))) == expected


def test_example_agent_in_javascript_repeats_itself(tmp_path: Path) -> None:
    """Each run of `examples/e2b_agent.mjs` ends without an error, and all its rollouts see the first one's number."""
    packages_dir = node_packages(f"e2b@{JS_SDK}")
    (tmp_path / "node_modules").symlink_to(packages_dir / "node_modules")
    script = shutil.copy(EXAMPLES / "e2b_agent.mjs", tmp_path)
    numbers = set()
    with real_proxy() as proxy:
        for _ in range(3):
            done = subprocess.run(
                ["node", script, proxy.url], env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)},
                capture_output=True, text=True, check=False, timeout=300,
            )  # fmt: skip
            assert (done.returncode, done.stderr) == (0, "")
            for name, line in zip(("first", "second"), done.stdout.splitlines(), strict=True):
                number = line.partition("drawn ")[2].partition(",")[0]
                assert line == f"{name}: drawn {number}, read shared,{name},{number}"
                numbers.add(number)
    assert len(numbers) == 1
