"""What the anchor of a container starts a shell with: FIFOs and texts in a directory of the box."""

# Theory of operation.
#
# The next shell gets the FIFOs and texts of the one before, as in `guest.anchors.shell_kit`: making and removing seven
# files takes a quarter of a call's CPU, and far more where the file system passes over files that were removed lately.
#
# The container sees its box read-only, so no command can change a mode or an owner, or remove a file. A command can
# change how much a FIFO holds, and leave something in it. So a kit is used again only while it is as it was made, and
# only when no process of the agent is left, which could have its files open. The shell before it is dead by then: the
# anchor collects it first, and no line for the next shell is written until that one has begun.

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from sandboxes.container.boot_scripts import SHELL_FIFOS, SHELL_TEXTS
from sandboxes.guest.anchors.shell_kit import changeable
from sandboxes.guest.bash import session as sessions
from sandboxes.linux.descriptors import close_all, overwrite, write_out

RIGHTS = os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
"""How the keeper opens a FIFO: at both ends, so that neither its open nor the shell's waits for the other."""

ENDS = {1: "out", 2: "err", sessions.COMMAND_FD: "command", sessions.GO_FD: "go", sessions.DUMP_FD: "dump"}
"""The files that the keeper uses of a live shell, by the shell's own descriptor numbers."""

NO_COMMAND = b"\n"
"""The text of a command that has not come. It is not empty: ext4 writes a file that was truncated to nothing to the
disk when one of its descriptors is closed, and the end of each shell would wait for that (ext4(5), auto_da_alloc)."""

_MAKES = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
"""How the keeper makes a text."""


class FileKit:
    """The FIFOs and texts of one shell.

    Attributes:
        folder: Their directory, by whose name the anchor knows the shell.
        fds: The keeper's ends, by file name.
    """

    def __init__(self, folder: Path, texts: Mapping[str, bytes]) -> None:
        """Make them; see `make_files`."""
        self.folder, self.fds = folder, make_files(folder, texts)
        self._texts = dict(texts)
        self._made = self._changeable()

    def is_as_made(self) -> bool:
        """Return whether the FIFOs are empty and as they were made. 0.02 ms."""
        return self._changeable() == self._made

    def serve_next(self, folder: Path, texts: Mapping[str, bytes]) -> None:
        """Get another directory and other texts, for the next shell. 0.05 ms.

        Args:
            folder: The directory, which does not exist.
            texts: The content of all its texts; none is empty.
        """
        os.rename(self.folder, folder)  # noqa: PTH104 - putting a `Path` together takes 5 us
        self.folder = folder
        for name, text in texts.items():
            # The last command is not the one that was written here, and the same loop serves every bash.
            if name == "command" or text != self._texts[name]:
                overwrite(self.fds[name], text)
        self._texts = dict(texts)

    def close(self) -> None:
        """Close the keeper's ends, and remove the directory."""
        close_all(self.fds.values())
        self.fds.clear()
        for name in (*SHELL_FIFOS, *SHELL_TEXTS):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{self.folder}/{name}")  # noqa: PTH108
        with contextlib.suppress(OSError):
            self.folder.rmdir()

    def _changeable(self) -> list[tuple[int, ...]]:
        return changeable({number: self.fds[name] for number, name in ENDS.items()})


def make_files(folder: Path, texts: Mapping[str, bytes]) -> dict[str, int]:
    """Make the directory from which the anchor starts a shell. 0.2 ms.

    Returns:
        The keeper's ends of its files, by name.
    """
    folder.mkdir(mode=0o755)
    fds = {}
    # The modes below are meant as they are.
    mask = os.umask(0)
    try:
        for name in SHELL_FIFOS:
            # A command that becomes another user may open /dev/stdout, which is this FIFO, again.
            os.mkfifo(f"{folder}/{name}", 0o666)
            # The shell opens all of them, and its opens must not block.
            fds[name] = os.open(f"{folder}/{name}", RIGHTS)
        for name, text in texts.items():
            fds[name] = os.open(f"{folder}/{name}", _MAKES, 0o644)
            # The shell opens the file itself, so where this descriptor stands does not matter.
            write_out(fds[name], text)
    finally:
        os.umask(mask)
    return fds
