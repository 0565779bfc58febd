"""Launch of a process in a container: it is born inside, with streams that the keeper holds.

The anchor starts a shell whose script becomes the process. Two FIFOs synchronize the start, `dump` and `start`; the two
steps are in `Launch._await_open` and `Launch._start`.
"""

import fcntl
import os
import select
import socket
import struct
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from sandboxes.container.boot_scripts import BOX, SHELL_FIFOS, SHELL_TEXTS
from sandboxes.container.keeper.anchor import ANSWER_S, ContainerAnchor
from sandboxes.container.keeper.background import remove
from sandboxes.container.keeper.cgroup_processes import ContainerProcesses
from sandboxes.container.keeper.file_kit import RIGHTS
from sandboxes.guest.anchors.anchor import ShellStartError
from sandboxes.guest.exec_script import terminal_text, text
from sandboxes.guest.process_io import Running, death_of, due_of, open_terminal
from sandboxes.ipc.messages import RunProcess
from sandboxes.linux.descriptors import close_all

_START = "start"
"""The FIFO on which the keeper lets the process start."""

_TIOCGPTPEER = 0x5441
"""Opens the other end of a terminal (ioctl_tty(2)); Python 3.11 has no name for it."""

_SHUT = "[ -z \"$BASH_VERSION\" ] || eval 'exec 29<&- 30<&- 31<&- 32<&- 33>&-'"
"""Closes the descriptors of a session's loop, which bash has and a process must not inherit."""


class Launch:
    """The launch of one process: its directory with FIFOs, and the descriptors that the keeper holds until it runs.

    Attributes:
        folder: Its directory in the box.
        inner: The process, as the container numbers it.
        keeps_folder: Whether the process goes on with its FIFOs after `end`.
    """

    def __init__(self, anchor: ContainerAnchor, members: ContainerProcesses, uid: int) -> None:
        """Choose a directory; nothing is made yet.

        Args:
            anchor: What starts the process.
            members: The container's processes.
            uid: The user of the container's own processes.
        """
        self._anchor, self._members, self._uid = anchor, members, uid
        self.folder = anchor.new_folder()
        # By file name; `end` closes what is still in it, so a launch that fails halfway leaks no descriptor.
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
        self._make_fifos()
        try:
            if arguments.get("tty"):
                ends[1], terminal = self._terminal(arguments.get("size"))
            else:
                # Opened while `_held` has both ends, so that a write end does not fail with ENXIO (fifo(7)).
                ends = self._ends(stdin=bool(stdin or keeps_in))
            redirections = self._redirections(terminal, stdin=bool(stdin or keeps_in))
            script = text(
                arguments,
                request.environment,
                uid=self._uid,
                redirections=redirections,
                ready=self._ready,
                terminal=terminal,
            )
            death = self._start(script)
            return Running(ends, stdin, death, to, keeps_in=keeps_in, due=due_of(arguments))
        except BaseException:
            close_all(ends.values())
            raise

    def begin_terminal(self, shell: Callable[[str], Sequence[str]], session: bytes, *, rows: int, columns: int) -> int:
        """Start a shell on a terminal of the container. Its directory stays, because it reads its session there.

        Args:
            shell: Returns the shell's arguments, given the path of the script that makes it a session.
            session: That script.
            rows: The height of the terminal.
            columns: The width of the terminal.

        Returns:
            The keeper's end of the terminal.

        Raises:
            ShellStartError: The anchor is gone.
            OSError: The machine refuses a terminal or a FIFO.
        """
        self._make_fifos()
        master, terminal = self._terminal((rows, columns))
        try:
            script = terminal_text(
                shell(f"{BOX}/{self.folder.name}/command"),
                terminal,
                redirections=self._redirections(terminal, stdin=False),
                ready=self._ready,
            )
            # The end of a terminal is seen at its master, which returns EIO, so this process needs no descriptor.
            os.close(self._start(script, session))
        except BaseException:
            os.close(master)
            raise
        self.keeps_folder = True
        return master

    def _start(self, script: bytes, command: bytes = b"") -> int:
        """Have the anchor start a shell, and let it run once it has opened its streams.

        Args:
            script: What the shell runs.
            command: The content of its file `command`.

        Returns:
            A descriptor that is readable once the process has ended.
        """
        self._write({"restore": script, "command": command})
        # The anchor may have been killed since the last call. Another one reads the same FIFOs.
        self._anchor.look_after()
        self._pid, self.inner = self._anchor.start(self.folder.name)
        # The process cannot have ended without the keeper's knowledge: it waits for its start line (step 2).
        death = death_of(self._pid)
        self._await_open(death)
        # Step 2. The shell waits for a line on `start`, which comes once the keeper holds its descriptor. So the
        # process cannot end before the keeper can notice it.
        os.write(self._held[_START], b"\n")
        return death

    def end(self) -> None:
        """Close the held descriptors, and remove the directory unless the process keeps it."""
        # A FIFO loses its unread data when its last descriptor closes (pipe(7)), and the shell has opened `start`
        # perhaps not yet.
        self._await_start()
        close_all(self._held.values())
        if not self.keeps_folder:
            remove(self.folder)

    def _await_start(self) -> None:
        """Wait until the process has read its start line, which would be lost with the keeper's end of the FIFO."""
        deadline = time.monotonic() + ANSWER_S
        while self._pid and time.monotonic() < deadline and Path(f"/proc/{self._pid}").exists():
            # FIONREAD counts the unread bytes of a pipe (pipe(7)). There is no event for "the reader took it", so this
            # is polled.
            unread = struct.unpack("i", fcntl.ioctl(self._held[_START], termios.FIONREAD, bytes(4)))[0]
            if not unread:
                return
            time.sleep(0.0005)

    def _make_fifos(self) -> None:
        """Make the directory and its FIFOs, open at both ends, so that the shell's opens do not block."""
        self.folder.mkdir(mode=0o755)
        for name in (*SHELL_FIFOS, _START):
            os.mkfifo(self.folder / name)
            # The process may become any user of the image, and the umask does not apply to chmod.
            (self.folder / name).chmod(0o666)
            self._held[name] = os.open(self.folder / name, RIGHTS)

    def _ends(self, *, stdin: bool) -> dict[int, int]:
        """Open the keeper's ends of the streams; return them by stream number."""
        reads = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
        ends = {number: os.open(self.folder / name, reads) for number, name in ((1, "out"), (2, "err"))}
        if stdin:
            writes = os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
            ends[0] = os.open(self.folder / "go", writes)
        return ends

    def _terminal(self, size: object) -> tuple[int, str]:
        """Return the keeper's end of a new terminal of the container, and its path in the container."""
        # The container has a devpts instance of its own. A terminal of the host's would be visible to the container
        # only as a broken path.
        master, path = open_terminal(f"/proc/{self._members.pid}/root/dev/pts/ptmx", size)
        if self._uid:
            # A terminal belongs to the user that opened it, which is root here.
            # The ioctl opens the other end by the master. A path could lead to what an agent put there.
            other = fcntl.ioctl(master, _TIOCGPTPEER, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
            os.fchown(other, self._uid, -1)
            os.close(other)
        return master, path

    def _redirections(self, terminal: str, *, stdin: bool) -> str:
        """Return the shell redirections that open the process's streams."""
        if terminal:
            # A session leader that opens a terminal without O_NOCTTY gets it as its controlling terminal (open(2)).
            return f"0<>{terminal} 1>&0 2>&0"
        here = f"{BOX}/{self.folder.name}"
        return f"0<{f'{here}/go' if stdin else '/dev/null'} 1>{here}/out 2>{here}/err"

    @property
    def _ready(self) -> str:
        """The shell commands of the two steps of the start."""
        here = f"{BOX}/{self.folder.name}"
        return f"{_SHUT}\necho >{here}/dump\nread -r fp_start <{here}/{_START}"

    def _write(self, texts: Mapping[str, bytes]) -> None:
        for name in SHELL_TEXTS:
            path = self.folder / name
            path.write_bytes(texts.get(name, b""))
            path.chmod(0o644)

    def _await_open(self, death: int) -> None:
        """Wait until the process has opened its streams; then close the keeper's second ends of them."""
        deadline = time.monotonic() + ANSWER_S
        dump = self._held["dump"]
        while time.monotonic() < deadline:
            # Step 1. The shell opens its streams, then writes a line to `dump`. Whichever comes first ends the wait:
            # this line, the shell's death, or the container's end.
            readable, _, _ = select.select([dump, death, self._members.init], [], [], ANSWER_S)
            if dump in readable:
                break
            if readable:
                os.close(death)
                raise ShellStartError("no process can be started in this sandbox: it ended at once")
        for name in SHELL_FIFOS:
            # Now the keeper's second ends close. With them open, reading would never see the end of a stream, because
            # this process would count as a writer.
            os.close(self._held.pop(name))
