"""The FIFOs and texts of a container's shell, which the next shell gets."""

import fcntl
import os
from pathlib import Path

import pytest

from sandboxes.container.boot_scripts import SHELL_FIFOS, SHELL_TEXTS
from sandboxes.container.keeper.file_kit import NO_COMMAND, FileKit

TEXTS = {"restore": b"export A=1\n", "loop": b"loop\n", "command": NO_COMMAND}


@pytest.fixture
def kit(tmp_path: Path) -> FileKit:
    return FileKit(tmp_path / "1", TEXTS)


def texts(kit: FileKit) -> dict[str, bytes]:
    """Return what a shell would read."""
    return {name: (kit.folder / name).read_bytes() for name in SHELL_TEXTS}


def test_the_next_shell_finds_the_same_fifos_and_its_own_texts(kit: FileKit, tmp_path: Path) -> None:
    before = {name: (kit.folder / name).stat().st_ino for name in (*SHELL_FIFOS, *SHELL_TEXTS)}
    # As `Shell.run` writes a command.
    os.pwrite(kit.fds["command"], b"echo a secret\n", 0)
    os.write(kit.fds["out"], b"read")
    os.read(kit.fds["out"], 4)
    assert kit.is_as_made()
    # The script is shorter than the last one, and must not end with its tail.
    kit.serve_next(tmp_path / "2", TEXTS | {"restore": b"cd /\n"})
    assert texts(kit) == TEXTS | {"restore": b"cd /\n"}
    assert [path.name for path in tmp_path.iterdir()] == ["2"]
    assert {name: (tmp_path / "2" / name).stat().st_ino for name in before} == before
    # Longer again.
    kit.serve_next(tmp_path / "3", TEXTS | {"loop": b"another loop\n"})
    assert texts(kit) == TEXTS | {"loop": b"another loop\n"}


@pytest.mark.parametrize("name", SHELL_FIFOS)
def test_what_is_left_in_a_fifo_is_seen(kit: FileKit, name: str) -> None:
    """The next shell, or its reader, would take it for its own."""
    os.write(kit.fds[name], b"x")
    assert not kit.is_as_made()


@pytest.mark.parametrize("name", SHELL_FIFOS)
def test_a_fifo_that_holds_another_number_of_bytes_is_seen(kit: FileKit, name: str) -> None:
    """A program stops at another point of its output then."""
    fd = os.open(kit.folder / name, os.O_RDWR | os.O_NONBLOCK)
    fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, 4096)
    os.close(fd)
    assert not kit.is_as_made()


def test_a_file_with_another_mode_is_seen(kit: FileKit) -> None:
    (kit.folder / "out").chmod(0o600)
    assert not kit.is_as_made()


def test_a_closed_kit_leaves_nothing(kit: FileKit, tmp_path: Path) -> None:
    fds = [*kit.fds.values()]
    kit.close()
    assert not [*tmp_path.iterdir()]
    for fd in fds:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
