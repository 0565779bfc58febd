"""E2B's own SDKs, unmodified, against the proxy: three generations of the one in Python, and the one in JavaScript."""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.agents.clients import node_packages, packages, run
from tests.agents.serving import Proxy, real_proxy
from tests.machine import require_criu
from tests.sandboxes.docker import BASH_IMAGE, require_docker

GROUP = [f"p{n}" for n in range(1, 7)]
KEY = "e2b_" + "0123456789abcdef" * 2
PYTHON_SDKS = ["2.63.0", "2.40.0", "2.10.2"]
JS_SDK = "2.51.0"


def sdk(version: str) -> Path:
    return packages(f"e2b=={version}")


def urls(proxy: Proxy, task: str, rollout: str = "") -> dict[str, str]:
    """Return the variables that lead E2B's SDKs to a task, or to one of its rollouts."""
    base = f"{proxy.url}/t/{task}{f'/r/{rollout}' if rollout else ''}/e2b"
    return {"E2B_API_URL": base, "E2B_SANDBOX_URL": base, "E2B_API_KEY": KEY}


def plain(value: Any, part: str) -> Any:
    """Return answers without what differs from run to run: luck, and how a rollout parts."""
    if isinstance(value, dict):
        return {name: plain(member, part) for name, member in value.items()}
    if isinstance(value, list):
        return [plain(item, part) for item in value]
    if isinstance(value, str):
        return re.sub(rf"\b{part}\b", "PART", re.sub(r"\b[0-9]{4,}\b", "DRAWN", value))
    return value


def steps_of(proxy: Proxy, task: str, rollout: str) -> list[dict[str, Any]]:
    """Return the calls of a rollout, and how each was answered, in order."""
    return list(proxy.client.get(f"/api/v1/tasks/{task}/rollouts/{rollout}").json()["steps"])


def calls_before(proxy: Proxy, task: str, rollout: str, command: str) -> int:
    """Return how many calls a rollout made before the one whose command begins so."""
    steps = steps_of(proxy, task, rollout)
    return next(at for at, step in enumerate(steps) if command in str(step["call"]["arguments"].get("argv")))


def together(proxy: Proxy, place: Path, script: str, task: str) -> dict[str, Any]:
    """Run the group's first rollout alone, and then the others at once; return what each was told."""
    told = {GROUP[0]: run(place, script, GROUP[0], env=urls(proxy, task, GROUP[0]))}
    with ThreadPoolExecutor(2) as pool:
        runs = {part: pool.submit(run, place, script, part, env=urls(proxy, task, part)) for part in GROUP[1:]}
        return told | {part: running.result() for part, running in runs.items()}


def check_group(proxy: Proxy, place: Path, script: str, spec: dict[str, Any]) -> None:
    """Hold a group of six that shares a prefix, and then parts, to what each would be told alone."""
    proxy.put("cached", **spec)
    proxy.put("alone", **spec, cache="never")
    shared, alone = run(place, script, "p0", env=urls(proxy, "alone", "p0"))
    told = together(proxy, place, script, "cached")
    prefix = calls_before(proxy, "cached", GROUP[0], f"echo {GROUP[0]} >/work/part")
    assert prefix >= shared - 2
    for part in GROUP:
        assert plain(told[part][1], part) == plain(alone, "p0")
        # The same luck for all: what the prefix drew, and what a process drew, is read back after the fork.
        assert told[part][1][:shared] == told[GROUP[0]][1][:shared]
        drawn = told[part][1][1]["stdout"]
        assert told[part][1][shared]["stdout"] == f"{part}\n{drawn}"
        assert told[part][1][shared + 1]["stdout"].split()[1] in str(told[GROUP[0]][1][:shared])
    for part in GROUP[1:]:
        steps = steps_of(proxy, "cached", part)
        assert calls_before(proxy, "cached", part, f"echo {part} >/work/part") == prefix
        assert {step["outcome"] for step in steps[:prefix]} == {"hit"}
    assert proxy.client.get("/api/v1/stats").json()["failures"] == {}


@pytest.mark.parametrize("version", PYTHON_SDKS)
def test_a_group_of_the_python_sdk_parts_and_each_is_told_what_it_would_be_alone(version: str) -> None:
    require_criu()
    with real_proxy(checkpoints=True) as proxy:
        check_group(proxy, sdk(version), "e2b_client.py", {})


@pytest.mark.parametrize("driver", ["local", "container"])
def test_a_group_of_the_javascript_sdk_does_too(driver: str) -> None:
    require_criu()
    if driver == "container":
        require_docker()
    spec = {"driver": driver, **({"image": BASH_IMAGE} if driver == "container" else {})}
    with real_proxy(checkpoints=True, containers=driver == "container") as proxy:
        check_group(proxy, node_packages(f"e2b@{JS_SDK}"), "e2b_client.mjs", spec)


def without_messages(value: Any) -> Any:
    """Return answers with what was raised by its name alone."""
    if isinstance(value, dict):
        return value.get("raised", value)
    return [without_messages(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("version", PYTHON_SDKS)
def test_terminals_watches_polls_and_ends_of_time_are_what_the_sdk_expects_for_each_rollout(version: str) -> None:
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


def test_the_sdk_for_asyncio_is_served_as_the_other_is() -> None:
    require_criu()
    with real_proxy(checkpoints=True) as proxy:
        place = sdk(PYTHON_SDKS[0])
        proxy.put("alone", cache="never")
        shared, alone = run(place, "e2b_async.py", "p0", env=urls(proxy, "alone"))
        first, second = (run(place, "e2b_async.py", part, env=urls(proxy, "cached"))[1] for part in GROUP[:2])
    assert second[:shared] == first[:shared]
    assert plain(first, "p1") == plain(second, "p2") == plain(alone, "p0")
    assert second[shared]["stdout"] == f"p2\n{first[0]['stdout']}"


def test_the_sdk_for_javascript_has_terminals_watches_polls_and_ends_of_time_too() -> None:
    require_criu()
    expected = [
        True, True, "same-same\n", True, "NotFoundError",
        True, True, "SandboxError", True, "CommandExitError", False,
        ["create new", "chmod new", "write new"], ["create new", "chmod new", "write new", "remove new"],
        "FileNotFoundError", False, "SandboxNotFoundError", "TimeoutError", "SandboxNotFoundError",
        "SandboxNotFoundError", False,
    ]  # fmt: skip
    with real_proxy(checkpoints=True) as proxy:
        place = node_packages(f"e2b@{JS_SDK}")
        for _ in range(2):
            assert without_messages(run(place, "e2b_more.mjs", env=urls(proxy, "more"))) == expected
