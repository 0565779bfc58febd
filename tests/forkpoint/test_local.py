"""`forkpoint.local` and the fixtures of `forkpoint.pytest` run a proxy for a script and for tests."""

import subprocess
import sys
from pathlib import Path

import pytest

import forkpoint
from tests.machine import require_sandboxes

TESTS = """
import pytest

pytest_plugins = ["forkpoint.pytest"]


@pytest.fixture(scope="session")
def forkpoint_settings():
    return {"max_sandboxes": 3}


@pytest.mark.parametrize("name", ["one", "two/é"])
def test_each_test_has_a_task_of_its_own(forkpoint_rollout, forkpoint_client, name):
    assert forkpoint_client.stats().raw["sandboxes_budget"] == 3
    assert forkpoint_rollout.exec("cat f; echo x > f").outcome == "miss"
"""


def test_local_proxy_keeps_its_trees(tmp_path: Path) -> None:
    """A second block with the same data answers from the tree. The settings reach the proxy."""
    require_sandboxes()
    outcomes = []
    for _ in range(2):
        with forkpoint.local(tmp_path / "data", max_sandboxes=5, drivers=["local"]) as client:
            assert client.stats().raw["sandboxes_budget"] == 5
            with client.task("t").rollout() as rollout:
                outcomes.append(rollout.exec("echo $RANDOM").outcome)
    assert outcomes == ["miss", "hit"]
    with forkpoint.Client(client.url, trust_env=False) as other, pytest.raises(forkpoint.UnreachableError):
        other.stats()


def test_fixtures_start_one_proxy(tmp_path: Path) -> None:
    require_sandboxes()
    (tmp_path / "conftest.py").write_text("")
    (tmp_path / "test_it.py").write_text(TESTS)
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", tmp_path, "."],
        cwd=tmp_path, check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert "2 passed" in run.stdout, run.stdout + run.stderr
