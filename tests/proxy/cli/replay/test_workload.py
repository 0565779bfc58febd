"""Recorded workloads become requests."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.cli.replay.workload import WorkloadError, read_workload, request_of, safe_name
from sandboxes.spec import EnvironmentSpec


def line(task: str = "t", rollout: str = "r", *commands: str, **more: Any) -> str:
    calls = [{"tool": "shell", "args": {"command": command}} for command in commands]
    return json.dumps({"task": task, "rollout": rollout, "calls": calls, **more})


def write(folder: Path, *lines: str) -> Path:
    file = folder / "workload.jsonl"
    file.write_text("\n".join(lines) + "\n")
    return file


def test_calls_keep_their_arguments() -> None:
    call = {"tool": "shell", "args": {"command": "ls", "timeout_s": 2, "session": "b"}}
    request = request_of(call, 4)
    assert (request.path, request.index, request.shown) == ("shell/exec", 4, "ls")
    assert request.arguments == {"command": "ls", "timeout_s": 2, "session": "b"}


def test_task_without_spec_has_the_default(tmp_path: Path) -> None:
    (task,) = read_workload([write(tmp_path, line("a/b", "r", "ls", "pwd"))]).tasks
    (rollout,) = task.rollouts
    assert (task.name, task.spec, rollout.name) == ("a/b", EnvironmentSpec(), "r")
    assert [request.shown for request in rollout.requests] == ["ls", "pwd"]


def test_rollouts_may_be_in_several_files(tmp_path: Path) -> None:
    """The rollouts of a task may be in several files."""
    (tmp_path / "b").mkdir()
    one, two = write(tmp_path, line("t", "r", "ls")), write(tmp_path / "b", line("t", "r", "pwd"), line("u", "r", "id"))
    workload = read_workload([one, two])
    assert [(task.name, [rollout.name for rollout in task.rollouts]) for task in workload.tasks] == [
        ("t", ["r", "r#2"]),
        ("u", ["r"]),
    ]


def test_selection_keeps_matching_tasks_and_first_rollouts(tmp_path: Path) -> None:
    workload = read_workload(
        [write(tmp_path, *(line(task, rollout, "ls") for task in ("a/1", "b/1", "a/2") for rollout in "xy"))]
    )
    chosen = workload.select(task="a/*", limit=3)
    assert [(task.name, len(task.rollouts)) for task in chosen.tasks] == [("a/1", 2), ("a/2", 1)]
    assert chosen.calls == 3


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ("{", "line 2: not JSON"),
        ('["a"]', "`task` is required and must be a JSON string"),
        (line(), None),
        ('{"task": "t", "rollout": "r", "calls": [{"tool": "shell"}]}', "`args` is required and must be a JSON object"),
        ('{"task": "t", "rollout": "r", "calls": [{"tool": "sql", "args": {}}]}', "`sql` is required"),
        ('{"task": "t", "rollout": "r", "calls": [{"tool": "book", "args": {}}]}', "call 0 uses the tool 'book'"),
        ('{"task": "t", "rollout": "r", "calls": [{"request": {"path": "s/x", "method": 1}}]}', "`method` must be"),
        (line("t", "r", "ls", spec={"bas": "host"}), "`spec` is not an environment spec"),
        (line("start", "r", "ls", spec={"workdir": "/x"}), "different environments"),
    ],
)
def test_malformed_workload_is_refused_with_its_line(tmp_path: Path, bad: str, said: str | None) -> None:
    file = write(tmp_path, line("start", "r0", "ls"), bad)
    if said is None:
        assert [len(task.rollouts) for task in read_workload([file]).tasks] == [1, 1]
        return
    with pytest.raises(WorkloadError, match=said.replace("{", r"\{")):
        read_workload([file])


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=r"nothing\.jsonl: cannot be read"):
        read_workload([tmp_path / "nothing.jsonl"])


names = (
    st.text(max_size=10)
    | st.integers(90, 120).map("x".__mul__)
    | st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]*", fullmatch=True)
)


@given(names, names)
def test_safe_names_stay_distinct(one: str, other: str) -> None:
    made = safe_name(one, "-1f")
    assert made[0].isascii()
    assert made[0].isalnum()
    assert all(sign.isascii() and (sign.isalnum() or sign in "._-") for sign in made)
    assert len(made) <= 103
    assert (made == safe_name(other, "-1f")) == (one == other)


def test_safe_name_is_unchanged() -> None:
    assert safe_name("fs1-1.a_b") == "fs1-1.a_b"
    assert shlex.quote(safe_name("a b")) == safe_name("a b")
