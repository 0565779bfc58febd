"""A process of its own in a container, held from outside: its streams are FIFOs in a directory of the box."""

import fcntl
import os
import select
import socket
import struct
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from sandboxes.container.anchor import ANSWER_S, ContainerAnchor
from sandboxes.container.background import remove
from sandboxes.container.boot_scripts import BOX, SHELL_FIFOS, SHELL_TEXTS
from sandboxes.container.cgroup_processes import Household
from sandboxes.container.shell import RIGHTS
from sandboxes.guest.anchor import ShellStartError
from sandboxes.guest.exec_script import terminal_text, text
from sandboxes.guest.process_io import Running, death_of, due_of, open_terminal
from sandboxes.ipc.messages import RunProcess

_START = "start"
"""A FIFO on which the process hears that it is known here, and may become what it is to be."""
_OTHER_END = 0x5441
"""TIOCGPTPEER, which Python 3.11 has no name for."""
_SHUT = "[ -z \"$BASH_VERSION\" ] || eval 'exec 29<&- 30<&- 31<&- 32<&- 33>&-'"


class Launch:
    """One process on its way: its directory with FIFOs, and the descriptors that are held until it has opened them.

    Attributes:
        folder: Its directory in the box.
        inner: The process, as the container numbers it.
        keeps_folder: Whether the process goes on with its FIFOs after `end`.
    """

    def __init__(self, anchor: ContainerAnchor, house: Household, uid: int) -> None:
        self._anchor, self._house, self._uid = anchor, house, uid
        self.folder = anchor.new_folder()
        self._held: dict[str, int] = {}
        self._pid = self.inner = 0
        self.keeps_folder = False

    def begin(self, request: RunProcess, stdin: bytes, to: socket.socket) -> Running:
        """Start a process; its output goes to a socket.

        Raises:
            ShellStartError: The container's shell is gone.
            OSError: The machine refuses a terminal or a FIFO.
        """
        arguments, ends, terminal = request.arguments, {}, ""
        keeps_in = bool(arguments.get("stdin"))
        self._furnish()
        try:
            if arguments.get("tty"):
                ends[1], terminal = self._terminal(arguments.get("size"))
            else:
                ends = self._ends(stdin=bool(stdin or keeps_in))
            places = self._places(terminal, stdin=bool(stdin or keeps_in))
            script = text(
                arguments, request.environment, uid=self._uid, redirections=places, ready=self._ready, terminal=terminal
            )
            death = self._start(script)
            return Running(ends, stdin, death, to, keeps_in=keeps_in, due=due_of(arguments))
        except BaseException:
            for fd in ends.values():
                os.close(fd)
            raise

    def begin_terminal(self, shell: Callable[[str], Sequence[str]], session: bytes, *, rows: int, columns: int) -> int:
        """Start a shell on a terminal of the container's; return our end. Its directory stays, for it reads there.

        shell: returns its words, given the path of the text that makes it session.

        Raises:
            CannotStart: the container's shell is gone. OSError: the machine refuses a terminal or a FIFO.
        """
        self._furnish()
        master, terminal = self._terminal((rows, columns))
        try:
            script = terminal_text(
                shell(f"{BOX}/{self.folder.name}/command"),
                terminal,
                redirections=self._places(terminal, stdin=False),
                ready=self._ready,
            )
            os.close(self._start(script, session))
        except BaseException:
            os.close(master)
            raise
        self.keeps_folder = True
        return master

    def _start(self, script: bytes, beside: bytes = b"") -> int:
        """Have the anchor start a shell that runs script; return its death when it has its streams. beside: a text."""
        self._write({"restore": script, "command": beside})
        self._anchor.look_after()
        self._pid, self.inner = self._anchor.start(self.folder.name)
        death = death_of(self._pid)
        self._await_open(death)
        os.write(self._held[_START], b"\n")
        return death

    def end(self) -> None:
        """Let go of what was made for it, and remove it unless it was left running, and keeps it."""
        self._await_start()
        for fd in self._held.values():
            os.close(fd)
        if not self.keeps_folder:
            remove(self.folder)

    def _await_start(self) -> None:
        """Wait until the process has heard that it may go on: left at once, it could find nobody to tell it so."""
        deadline = time.monotonic() + ANSWER_S
        while self._pid and time.monotonic() < deadline and Path(f"/proc/{self._pid}").exists():
            unread = struct.unpack("i", fcntl.ioctl(self._held[_START], termios.FIONREAD, bytes(4)))[0]
            if not unread:
                return
            time.sleep(0.0005)

    def _furnish(self) -> None:
        self.folder.mkdir(mode=0o755)
        for name in (*SHELL_FIFOS, _START):
            os.mkfifo(self.folder / name)
            (self.folder / name).chmod(0o666)
            # Open at both ends, until the process has opened them: nobody waits for another.
            self._held[name] = os.open(self.folder / name, RIGHTS)

    def _ends(self, *, stdin: bool) -> dict[int, int]:
        reads = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
        ends = {place: os.open(self.folder / name, reads) for place, name in ((1, "out"), (2, "err"))}
        if stdin:
            writes = os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
            ends[0] = os.open(self.folder / "go", writes)
        return ends

    def _terminal(self, size: object) -> tuple[int, str]:
        """Return our end of a new terminal of the container's, and its path there."""
        master, path = open_terminal(f"/proc/{self._house.pid}/root/dev/pts/ptmx", size)
        if self._uid:
            # It is its opener's, and that is root here.
            other = fcntl.ioctl(master, _OTHER_END, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
            os.fchown(other, self._uid, -1)
            os.close(other)
        return master, path

    def _places(self, terminal: str, *, stdin: bool) -> str:
        if terminal:
            return f"0<>{terminal} 1>&0 2>&0"
        here = f"{BOX}/{self.folder.name}"
        return f"0<{f'{here}/go' if stdin else '/dev/null'} 1>{here}/out 2>{here}/err"

    @property
    def _ready(self) -> str:
        here = f"{BOX}/{self.folder.name}"
        return f"{_SHUT}\necho >{here}/dump\nread -r fp_start <{here}/{_START}"

    def _write(self, texts: Mapping[str, bytes]) -> None:
        for name in SHELL_TEXTS:
            path = self.folder / name
            path.write_bytes(texts.get(name, b""))
            path.chmod(0o644)

    def _await_open(self, death: int) -> None:
        """Wait until the process has its streams; then let go of our other ends, so that they end when it does."""
        deadline = time.monotonic() + ANSWER_S
        dump = self._held["dump"]
        while time.monotonic() < deadline:
            readable, _, _ = select.select([dump, death, self._house.init], [], [], ANSWER_S)
            if dump in readable:
                break
            if readable:
                os.close(death)
                raise ShellStartError("no process can be started in this sandbox: it ended at once")
        for name in SHELL_FIFOS:
            os.close(self._held.pop(name))
