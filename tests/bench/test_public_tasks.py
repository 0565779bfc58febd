"""The tasks that the project brings along, played as `bench.public_tasks` does: some of them, and how they are read."""

from pathlib import Path

import pytest

from bench.plain_docker import docker_client
from bench.public_tasks import FOLDER, QUICK, play
from bench.task_folders import LOOKS, TaskFolder, read_tasks
from forkpoint.ephemeral_proxy import ephemeral_proxy
from sandboxes.spec import EnvironmentSpec
from tests.machine import require_sandboxes
from tests.sandboxes.docker import require_docker


def _tasks(*names: str) -> list[TaskFolder]:
    tasks = read_tasks(FOLDER, list(names))
    for task in tasks:
        if task.skipped:
            pytest.skip(f"{task.name}: {task.skipped}")
    return tasks


def test_oracle_solves_its_task_in_all_rollouts() -> None:
    """The second rollout hits with every call, the third from its own call on not, and each node can be left."""
    require_sandboxes()
    with ephemeral_proxy(settings={"drivers": ["local"]}) as proxy:
        for task in _tasks("c-build", "git-rebase", "sqlite-wal"):
            played = play(proxy.url, task, None, lambda _: None)
            assert played.is_right, played
            assert played.hits == played.calls
            assert 0 < played.shared[0] < 1
            assert (played.nodes[0] > 3, played.nodes[2]) == (True, 0)


def test_plain_container_has_the_same_verdict() -> None:
    """Its files are this machine's system, as those of the sandbox."""
    require_sandboxes()
    require_docker()
    [task] = _tasks("permissions")
    with ephemeral_proxy(settings={"drivers": ["local"]}) as proxy:
        played = play(proxy.url, task, docker_client(), lambda _: None)
    assert (played.is_right, sorted(played.verdicts)) == (True, ["again", "first", "look", "other", "plain"])


def test_every_task_is_whole() -> None:
    tasks = read_tasks(FOLDER, [])
    assert len(tasks) >= 12
    assert {task.name for task in tasks} >= set(QUICK)
    for task in tasks:
        assert (FOLDER / task.name / "instruction.md").read_text().strip()
        assert len(task.calls) > len(LOOKS)
        if not task.skipped:
            assert EnvironmentSpec.model_validate(task.spec).directory == task.workdir == "/work"


def test_solution_is_a_call_for_each_paragraph(tmp_path: Path) -> None:
    """Here-documents with empty lines stay whole, and a program that is missing is a reason to skip."""
    folder = tmp_path / "one"
    for name, text in {
        "task.toml": '[metadata]\nneeds = ["no-such-program"]\n', "tests/test.sh": "true\n",
        "solution/solve.sh": "#!/bin/bash\ncat >f <<'END'\n1\n\n2\nEND\nls\n\n\ntrue\n",
    }.items():  # fmt: skip
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    [task] = read_tasks(tmp_path, [])
    assert task.calls[len(LOOKS) :] == ("cat >f <<'END'\n1\n\n2\nEND\nls", "true")
    assert task.skipped == "no-such-program is not installed"
