"""Operations on files, and what the supervisor makes of a child that did not end well."""

import os
from pathlib import Path

from sandboxes.guest.files import operations


def written_by_child(path: Path) -> bytes:
    """Return what a child writes to its result pipe when it reads a file."""
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        operations.run_apart("get", {"path": str(path), "limit_bytes": 1 << 20}, b"", writing, None)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        data = pipe.read()
    os.waitpid(pid, 0)
    return data


def test_answer_of_a_killed_child_is_not_taken_for_a_whole_one(tmp_path: Path) -> None:
    """Out of memory, or killed by the agent, it closes the pipe too; a part of a file must not be recorded."""
    (tmp_path / "file").write_bytes(b"line\n" * 100)
    data = written_by_child(tmp_path / "file")
    outcome, answer = operations.parse_result(data, whole=True)
    assert (outcome.status, answer) == (200, b"line\n" * 100)
    for cut in (data[:-1], data[: len(data) // 2], data[: data.index(b"\n") + 1], data[:5], b"", data + b"x"):
        assert operations.parse_result(cut, whole=True)[0].status == 507
