"""Recorded workloads become requests."""

import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.workloads.format import parse_rollout, read_workload, safe_name
from proxy.workloads.requests import WorkloadError, request_of
from sandboxes.spec import EnvironmentSpec


def line(task: str = "t", rollout: str = "r", *commands: str, **more: Any) -> str:
    calls = [{"tool": "shell", "args": {"command": command}} for command in commands]
    return json.dumps({"task": task, "rollout": rollout, "calls": calls, **more})


def recorded(command: str, argv: list[str] | None) -> dict[str, Any]:
    return {"tool": "bash", "args": {"command": command}, "argv": argv}


def write(folder: Path, *lines: str) -> Path:
    file = folder / "workload.jsonl"
    file.write_text("\n".join(lines) + "\n")
    return file


def as_sent(command: str, argv: list[str] | None) -> str:
    request = request_of(recorded(command, argv), 0)
    assert request is not None
    return str(request.arguments["command"])


def in_a_session(command: str) -> tuple[str, str, int, str, str]:
    """Run command in a bash as a session would; return stdout, stderr, exit code, cwd, and the variable it used."""
    after = '\ncode=$?; exec 9>&1; printf \'%s\\n\' "$code" "$PWD" "${forkpoint_cwd-nothing}" >&2'
    run = subprocess.run(["bash", "-c", command + after], capture_output=True, text=True, cwd="/", check=False)
    *stderr, code, cwd, left = run.stderr.splitlines()
    return run.stdout, "\n".join(stderr), int(code), cwd, left


def test_calls_keep_their_arguments() -> None:
    call = {"tool": "shell", "args": {"command": "ls", "timeout_s": 2, "session": "b"}}
    request = request_of(call, 4)
    assert request is not None
    assert (request.path, request.index, request.shown) == ("shell/exec", 4, "ls")
    assert request.arguments == {"command": "ls", "timeout_s": 2, "session": "b"}


def test_task_without_spec_has_the_default() -> None:
    task, spec, rollout = parse_rollout(line("a/b", "r", "ls", "pwd"), folder=Path("/"))
    assert (task, spec, rollout.name) == ("a/b", EnvironmentSpec(), "r")
    assert [request.shown for request in rollout.requests] == ["ls", "pwd"]


def test_recorded_argv_becomes_a_command_line() -> None:
    assert as_sent("echo 'a b'", ["/bin/bash", "-c", "echo a b"]) == "/bin/bash -c 'echo a b'"


def test_unparsed_calls_are_skipped_and_counted(tmp_path: Path) -> None:
    calls = [recorded("ls", ["ls"]), recorded('echo "', None), recorded("pwd", ["pwd"])]
    file = write(tmp_path, json.dumps({"task": "t", "rollout": "r", "calls": calls}))
    workload = read_workload([file])
    (rollout,) = workload.tasks[0].rollouts
    assert [request.index for request in rollout.requests] == [0, 2]
    assert (workload.calls, workload.skipped) == (2, 1)


@pytest.mark.parametrize(
    ("script", "cwd", "code"),
    [("cd /usr && echo out && echo err >&2", "/usr", 0), ("cd $(echo /etc)", "/etc", 0), ("cd /usr; exit 3", "/", 3)],
)
def test_successful_cd_moves_the_session(script: str, cwd: str, code: int) -> None:
    alone = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    stdout, stderr, exit_code, where, left = in_a_session(as_sent("cd x", ["/bin/bash", "-c", script]))
    assert (stdout, stderr, exit_code) == (alone.stdout, alone.stderr.rstrip("\n"), code)
    assert (where, left) == (cwd, "nothing")


def test_failed_cd_does_not_move_the_session() -> None:
    sent = as_sent('cd "$(ls -1 /)"', ["/bin/bash", "-c", "cd /$(ls", "-1", "/)"])
    _, stderr, code, where, left = in_a_session(sent)
    assert "unexpected EOF" in stderr
    assert (code, where, left) == (2, "/", "nothing")


def test_fixture_is_unpacked_at_the_root(tmp_path: Path) -> None:
    (tmp_path / "fs.tar.gz").touch()
    _, spec, _ = parse_rollout(line("t", "r", "ls", fixture="fs.tar.gz"), folder=tmp_path)
    (archive,) = spec.archives
    assert (archive.source, archive.target) == (str(tmp_path / "fs.tar.gz"), "/")
    assert (spec.base, spec.workdir, spec.limits.timeout_s) == ("host", "/", 10.0)
    assert {**spec.env, "PATH": ""} == {"PATH": "", "HOME": "/root", "LANG": "C.UTF-8", "TERM": "dumb"}


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
    assert chosen.rollouts == chosen.calls == 3


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ("{", "line 2: not JSON"),
        ('["a"]', "`task` is required and must be a JSON string"),
        (line(), None),
        ('{"task": "t", "rollout": "r", "calls": [{"tool": "shell"}]}', "`args` is required and must be a JSON object"),
        ('{"task": "t", "rollout": "r", "calls": [{"tool": "sql", "args": {}}]}', "`query` is required"),
        ('{"task": "t", "rollout": "r", "calls": [{"tool": "book", "args": {}}]}', "call 0 uses the tool 'book'"),
        ('{"task": "t", "rollout": "r", "calls": [{"request": {"path": "s/x", "method": 1}}]}', "`method` must be"),
        (line("t", "r", "ls", spec={"bas": "host"}), "`spec` is not an environment spec"),
        (line("t", "r", "ls", fixture="nowhere.tar"), "nowhere.tar does not exist"),
        (line("t", "r", "ls", db="nowhere.sqlite"), "nowhere.sqlite does not exist"),
        (line("start", "r", "ls", spec={"workdir": "/x"}), "different environments"),
    ],
)
def test_malformed_workload_is_refused_with_its_line(tmp_path: Path, bad: str, said: str | None) -> None:
    file = write(tmp_path, line("start", "r0", "ls"), bad)
    if said is None:
        assert read_workload([file]).rollouts == 2
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
