"""How a shell's dump is read."""

import os
from collections.abc import Iterator

import pytest

from sandboxes.guest import shell as shells
from sandboxes.guest.bash.session import COMMAND_FD, DUMP_FD, END, GO_FD
from sandboxes.guest.shell import Shell


@pytest.fixture
def shell() -> Iterator[Shell]:
    ends = {number: os.open("/dev/null", os.O_RDWR) for number in (1, 2, DUMP_FD, GO_FD, COMMAND_FD)}
    made = Shell("main", None, 0, ends)
    yield made
    made.close()


def test_dump_is_read_in_pieces(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bash writes each part by itself. What comes a moment later is awaited here, and what comes later elsewhere."""
    pieces = [b"0\0", b"declare -- a=1\n", None, b"more", END]
    monkeypatch.setattr(shells, "read_available", lambda _: pieces.pop(0))
    assert not shell.read_dump()
    assert len(pieces) == 2
    assert shell.read_dump()


def test_dump_without_end_does_not_hold_its_reader(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command writes to the pipe again and again; its time and its disk are watched all the same."""
    monkeypatch.setattr(shells, "read_available", lambda _: b"x")
    assert not shell.read_dump()
