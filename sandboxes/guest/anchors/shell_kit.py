"""The descriptors of a shell: its pipes, and the texts that it reads. An anchor is born with a set of them, its kit."""

# Theory of operation.
#
# Bash can receive no descriptors from another process. So pid 1 makes one set of pipes and texts before it starts the
# anchor, and the anchor has the far ends open from birth. One shell at a time is started on them, without any process
# in between that holds descriptors for it.
#
# The next shell gets the same pipes. A command may have changed them: their mode, what is in them. So they are used
# again only while they are as they were made, and when no process of the agent is left that could have them open.
# Otherwise the kit is closed, and another way is taken.

import contextlib
import fcntl
import os
from collections.abc import Iterable, Mapping

from sandboxes.guest.bash import session as session_texts
from sandboxes.linux.descriptors import close_all, output_pipe, overwrite, unread_bytes

TEXTS = (session_texts.RESTORE_FD, session_texts.LOOP_FD, session_texts.COMMAND_FD)
"""The shell's descriptors of texts."""
EXPORTS = -1
"""Stands for the text that exports the variables which the shell is born with. The shell itself does not open it."""
PIPES = (1, 2, session_texts.DUMP_FD, session_texts.GO_FD)
"""The shell's descriptors of pipes."""
TEMPLATE_REQUESTS, TEMPLATE_REPLIES = session_texts.OURS + 5, session_texts.OURS + 6
"""A template's descriptors of the two pipes to it (`linux/anchor.c`). No shell has them."""
PLACES = {
    number: 40 + index
    for index, number in enumerate(
        (1, 2, session_texts.DUMP_FD, session_texts.GO_FD, session_texts.RESTORE_FD, session_texts.LOOP_FD,
         session_texts.COMMAND_FD, EXPORTS, TEMPLATE_REQUESTS, TEMPLATE_REPLIES)
    )
}  # fmt: skip
"""The anchor's descriptors of the kit, by the shell's own descriptor numbers."""


PAGE = os.sysconf("SC_PAGESIZE")
_WIDE = 16 * PAGE
"""The capacity of a new pipe (pipe(7))."""


def sign(number: int) -> str:
    """Return how bash opens a descriptor of a shell: a pipe that is opened through /proc needs the right direction."""
    return ">" if number in {1, 2, session_texts.DUMP_FD} else "<"


OPENED = {0: "/dev/null"} | {
    number: f"/proc/self/fd/{place}" for number, place in sorted(PLACES.items()) if number in {*PIPES, *TEXTS}
}
"""What a shell on the kit opens, by its own descriptor numbers."""


def new_pipes() -> tuple[dict[int, int], dict[int, int]]:
    """Return our ends and a shell's ends of its pipes, by the shell's own descriptor numbers."""
    ours, theirs = {}, {}
    for number in (1, 2, session_texts.DUMP_FD):
        ours[number], theirs[number] = output_pipe()
    # Blocking at our end is harmless: a line is far shorter than the pipe, and the shell has read the last one.
    theirs[session_texts.GO_FD], ours[session_texts.GO_FD] = os.pipe2(os.O_CLOEXEC)
    # A fork of a template opens it again, as the user that the image names.
    os.fchmod(theirs[session_texts.GO_FD], 0o666)
    narrow([ours[number] for number in PIPES])
    return ours, theirs


def narrow(pipes: Iterable[int], size: int = PAGE) -> None:
    """Give idle pipes a small capacity: the kernel counts all of a user (pipe(7), pipe-user-pages-soft)."""
    # Pipes as they are born would be enough for 110 sandboxes. One that has more in it stays as it is.
    _resize(pipes, size)


def widen(pipes: Iterable[int]) -> None:
    """Give pipes the capacity that programs find everywhere, as far as the user may have it."""
    _resize(pipes, _WIDE)


def _resize(pipes: Iterable[int], size: int) -> None:
    # If one cannot be changed, the others cannot either, or the kit is not used again.
    with contextlib.suppress(OSError):
        for pipe in pipes:
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, size)


def write_texts(fds: Mapping[int, int], script: bytes) -> None:
    """Write the script by which a shell becomes its session into its texts, and empty the text of its command."""
    texts = {session_texts.RESTORE_FD: script, session_texts.LOOP_FD: _LOOP, session_texts.COMMAND_FD: b""}
    for number, text in texts.items():
        overwrite(fds[number], text)


def new_text() -> int:
    """Return a descriptor of an empty text in anonymous memory, which no delta and no snapshot shows."""
    return os.memfd_create("text", os.MFD_CLOEXEC)


_LOOP = session_texts.LOOP.encode()
"""The text of the loop that each shell runs."""


class ShellKit:
    """Both ends of one shell's pipes, and its texts, by the shell's descriptor numbers; `lent` while a shell has it."""

    def __init__(self) -> None:
        self.ours, self.theirs = new_pipes()
        for number in (*TEXTS, EXPORTS):
            self.theirs[number] = new_text()
        self.lent = False
        # Without the pipes of templates, which no process of the agent can open.
        self._reachable = dict(self.theirs)
        self._made = changeable(self._reachable)
        self.theirs[TEMPLATE_REQUESTS], self.ours[TEMPLATE_REQUESTS] = os.pipe2(os.O_CLOEXEC)
        self.ours[TEMPLATE_REPLIES], self.theirs[TEMPLATE_REPLIES] = os.pipe2(os.O_CLOEXEC)
        # A request has a path in it.
        narrow([self.ours[TEMPLATE_REQUESTS]], 2 * PAGE)
        narrow([self.ours[TEMPLATE_REPLIES]])

    def is_as_made(self) -> bool:
        """Return whether it is open, and its pipes are empty and as they were made."""
        if not self.theirs:
            return False
        return changeable(self._reachable) == self._made

    def write_exports(self, exports: bytes) -> None:
        """Write the lines of bash that export the variables which the next shell is born with."""
        overwrite(self.theirs[EXPORTS], exports)

    def lend(self, script: bytes) -> dict[int, int]:
        """Write the texts for the next shell; return new descriptors of our ends and of the command's text."""
        self.lent = True
        write_texts(self.theirs, script)
        ends = {number: self.ours[number] for number in PIPES}
        ends[session_texts.COMMAND_FD] = self.theirs[session_texts.COMMAND_FD]
        return {number: os.dup(fd) for number, fd in ends.items()}

    def close(self) -> None:
        """Close all."""
        close_all((*self.ours.values(), *self.theirs.values()))
        self.ours, self.theirs = {}, {}


def changeable(fds: Mapping[int, int]) -> list[tuple[int, ...]]:
    """Return what commands can change of pipes and texts: modes, owners, capacities, and what is unread."""
    facts: list[tuple[int, ...]] = []
    for number, fd in fds.items():
        status = os.fstat(fd)
        facts.append((status.st_mode, status.st_uid, status.st_gid))
        if number in PIPES:
            facts.append((fcntl.fcntl(fd, fcntl.F_GETPIPE_SZ), unread_bytes(fd)))
    return facts
