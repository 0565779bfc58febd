"""Inspect AI, unmodified, evaluates samples whose sandboxes are rollouts, and its own checks of a provider pass."""

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.agents.clients import packages, run
from tests.agents.serving import real_proxy
from tests.machine import require_criu, require_sandboxes
from tests.proxy.compat.harness import scripted_agent_text
from tests.scripted_model import scripted_model

AS_ROOT = [
    "test_read_file_not_allowed",
    "test_write_binary_file_without_permissions",
    "test_write_text_file_without_permissions",
]
"""Root may read and write every file, so these checks fail in any sandbox whose user is root."""
SLOW = ["test_exec_timeout_kills_process", "test_exec_timeout_kills_child_processes"]
"""They sleep for five seconds each. Both passed when the provider was written."""


def test_inspect_group_shares_its_prefix() -> None:
    """Three samples with files and a setup script: the second hits, and the third diverges at its last command."""
    require_sandboxes()
    place = packages("inspect-ai==0.3.285")
    path = f"{place}{os.pathsep}{Path(__file__).parents[2]}"
    draw = "echo $RANDOM$RANDOM > drawn; cat drawn seed.txt ready.txt"
    group = [[draw, "echo 1 > mine"], [draw, "echo 1 > mine"], [draw, "cat drawn; ls"]]
    with real_proxy() as proxy:
        # The Python of the tests: in its metadata, Inspect finds the provider.
        result = run(
            place, "inspect_client.py", proxy.url, json.dumps(group), *AS_ROOT, *SLOW, python=sys.executable,
            env={"PYTHONDONTWRITEBYTECODE": "", "PYTHONPATH": path, "INSPECT_DISPLAY": "none"},
        )  # fmt: skip
        [task] = [each["task"] for each in proxy.client.get("/api/v1/tasks").json()["items"] if each["rollouts"] == 3]
        spec = proxy.client.get(f"/api/v1/tasks/{task}").json()["spec"]
        rollouts: list[Any] = proxy.client.get(f"/api/v1/tasks/{task}/rollouts").json()["items"]
        outcomes = [proxy.outcomes(task, each["rollout"]) for each in rollouts]
    assert (result["checks"], result["failed"]) == (39, {})
    [[first, first_files], [second, second_files], [third, third_files]] = result["samples"]
    assert first == second
    assert first[0].endswith("seed\nready\n")
    assert third == [first[0], first[0].split()[0] + "\ndrawn\nready.txt\nseed.txt\n"]
    assert (first_files, second_files, third_files) == (4, 4, 3)
    assert set(outcomes[0]) == {"miss"}
    assert set(outcomes[1]) == {"hit"}
    # The last command, and the scorer at the state that only this sample has reached.
    assert outcomes[2][-2:] == ["miss", "miss"]
    assert set(outcomes[2][:-2]) == {"hit"}
    assert all(each["finished"] for each in rollouts)
    assert spec["limits"]["output_bytes"] == 10 << 20


def test_an_agent_that_a_sample_starts_in_its_sandbox_is_a_harness() -> None:
    """Nothing runs for the second sample, whose model says the same."""
    require_criu()
    place = packages("inspect-ai==0.3.285")
    path = f"{place}{os.pathsep}{Path(__file__).parents[2]}"
    spec = {"files": {"/agent.py": scripted_agent_text()}}
    with (
        scripted_model(lambda number, _: "date +%N" if number < 2 else None) as model,
        real_proxy(checkpoints=True, sources=(model.root,)) as proxy,
    ):
        samples = run(
            place, "inspect_harness_client.py", proxy.url, json.dumps(spec), json.dumps([model.url(), model.url()]),
            python=sys.executable, env={"PYTHONDONTWRITEBYTECODE": "", "PYTHONPATH": path, "INSPECT_DISPLAY": "none"},
        )  # fmt: skip
        [task] = proxy.client.get("/api/v1/tasks").json()["items"]
        rollouts = proxy.client.get(f"/api/v1/tasks/{task['task']}/rollouts").json()["items"]
        outcomes = [proxy.outcomes(task["task"], each["rollout"]) for each in rollouts]
    assert samples[0] == samples[1]
    assert set(outcomes[1]) == {"hit"}
    assert len(outcomes[0]) == len(outcomes[1])
    assert set(model.keys) == {"secret"}
