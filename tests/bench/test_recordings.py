"""Recordings of other projects become workloads that a replay reads."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from bench.workloads.recordings import convert, plain_call, spec_of
from proxy.cli.replay.workload import WorkloadError, read_workload
from sandboxes.spec import EnvironmentSpec


def recorded(command: str, argv: list[str] | None) -> dict[str, Any]:
    return {"tool": "bash", "args": {"command": command}, "argv": argv}


def as_sent(command: str, argv: list[str] | None) -> str:
    return str(plain_call(recorded(command, argv))["args"]["command"])


def in_a_session(command: str) -> tuple[str, str, int, str, str]:
    """Run command in a bash as a session would; return stdout, stderr, exit code, cwd, and the variable it used."""
    after = '\ncode=$?; exec 9>&1; printf \'%s\\n\' "$code" "$PWD" "${forkpoint_cwd-nothing}" >&2'
    run = subprocess.run(["bash", "-c", command + after], capture_output=True, text=True, cwd="/", check=False)
    *stderr, code, cwd, left = run.stderr.splitlines()
    return run.stdout, "\n".join(stderr), int(code), cwd, left


def test_recorded_argv_becomes_a_command_line() -> None:
    assert as_sent("echo 'a b'", ["/bin/bash", "-c", "echo a b"]) == "/bin/bash -c 'echo a b'"


def test_unparsed_calls_are_skipped_and_counted(tmp_path: Path) -> None:
    calls = [recorded("ls", ["ls"]), recorded('echo "', None), recorded("pwd", ["pwd"])]
    (tmp_path / "recorded.jsonl").write_text(json.dumps({"task": "t", "rollout": "r", "calls": calls}))
    path, skipped = convert([tmp_path / "recorded.jsonl"], tmp_path)
    (rollout,) = read_workload([path]).tasks[0].rollouts
    assert [request.shown for request in rollout.requests] == ["ls", "pwd"]
    assert skipped == 1


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
    spec = EnvironmentSpec.model_validate(spec_of({"fixture": "fs.tar.gz"}, tmp_path))
    (archive,) = spec.archives
    assert (archive.source, archive.target) == (str(tmp_path / "fs.tar.gz"), "/")
    assert (spec.base, spec.workdir, spec.limits.timeout_s) == ("host", "/", 10.0)
    assert {**spec.env, "PATH": ""} == {"PATH": "", "HOME": "/root", "LANG": "C.UTF-8", "TERM": "dumb"}


@pytest.mark.parametrize("name", ["fixture", "db"])
def test_missing_files_are_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(WorkloadError, match=r"nowhere\.x does not exist"):
        spec_of({name: "nowhere.x"}, tmp_path)


def test_sqlite_gets_its_own_query() -> None:
    call = {"tool": "sql", "args": {"query": "SHOW TABLES"}, "sqlite_query": "SELECT 2"}
    assert plain_call(call) == {"tool": "sql", "args": {"sql": "SELECT 2"}}


def test_other_calls_stay_as_they_are() -> None:
    call = {"request": {"path": "shop/orders"}}
    assert plain_call(call) is call
