"""The anchor: the shell inside a container that starts all other shells, seen from the keeper.

Every process of a container must be born inside it, in its control groups and with its rights. So the keeper starts
none itself: it asks the anchor, which runs inside (`boot_scripts`). They talk over three FIFOs in the box:

    orders  keeper -> anchor    `start N`: start the shell in directory N. `wait PID`: how did it end?
    news    anchor -> keeper    `ready KIND PID PARENT`, `started N PID`, `ended PID STATUS`
    again   keeper -> pid 1     start another anchor

Any process in the container may write to the FIFOs, too. A forged line can start a shell or report a wrong status, and
both harm only the agent's own sandbox. The keeper checks each line's form, and a pid by the container's control group.
An agent may also kill the anchor. Pid 1 then starts another; processes of the dead one have no parent any more.
"""

import contextlib
import itertools
import os
import select
import time
from pathlib import Path
from typing import Any

from sandboxes.container.boot_scripts import FIFOS
from sandboxes.container.keeper.cgroup_processes import ContainerProcesses, inner_of, kill
from sandboxes.guest.anchors.anchor import ShellStartError
from sandboxes.guest.bash.session import number
from sandboxes.guest.process_io import death_of

ANSWER_S = 10.0
"""Longest wait for the anchor's response, which takes milliseconds. The value is an estimate."""

NO_SHELL_S = 0.5
"""The same wait in a container whose /bin/sh is gone: most likely no anchor can start any more.

The value is an estimate.
"""

PROTECTED_OOM_SCORE = "-900"
"""The OOM score of pid 1 and anchor: when memory is short, the kernel should kill a command, not what starts them."""


class ContainerAnchor:
    """The anchor of one container.

    Attributes:
        pid: The anchor, as this machine numbers it; 0 before `ready`.
        pids: The anchor, and its init if there is one.
        bash: Whether it starts bash; otherwise it starts /bin/sh.
    """

    def __init__(self, box: Path, members: ContainerProcesses) -> None:
        """Open the FIFOs, at both ends: then no open and no write blocks, and none fails when the other end dies.

        Args:
            box: The container's box.
            members: The container's processes.
        """
        self.box, self.members = box, members
        self.pids: set[int] = set()
        self.pid = 0
        self.bash = False
        # Numbers of directories rise and are not used twice by this keeper, so a late reply for an earlier shell
        # matches no later one.
        self._numbers = itertools.count(1)
        # A descriptor that is readable once the anchor has ended, or while there is none.
        self._death = death_of(0)
        self._news = b""
        # Linux opens a FIFO for reading and writing without waiting for the other end (fifo(7)). As this process is a
        # reader of its own, a write never meets EPIPE while pid 1 starts another anchor.
        self._orders_fd, self._news_fd, self._again_fd = (
            os.open(box / name, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW) for name in FIFOS
        )

    def ready(self, within_s: float) -> bool:
        """Wait until the anchor runs; return whether the image has bash.

        Raises:
            ShellStartError: No anchor responds in time.
        """
        _, kind, inner, parent = self._hear("ready", within_s)
        # The anchor prints its own numbers and those of its parent, which are inner ones. Only pids of the control
        # group are accepted, so a forged line cannot point at a process of the host.
        pids = [self.members.find(int(pid)) for pid in (inner, parent)]
        self.bash = kind == "bash"
        self.pids = {pid for pid in pids if pid is not None}
        self._watch(pids[0], int(inner))
        # Children inherit this score, so each shell sets its own back to 0 first (`posix_session.restore_script`). A
        # process may raise its own score without a right.
        for pid in (self.members.pid, *self.pids):
            with contextlib.suppress(OSError):
                Path(f"/proc/{pid}/oom_score_adj").write_text(PROTECTED_OOM_SCORE)
        return self.bash

    def remember(self) -> dict[str, Any]:
        """Return what a checkpoint stores about the anchor; its pids are inner ones, which a restore keeps."""
        return {"inner": inner_of(self.pid), "pids": [inner_of(pid) for pid in self.pids], "bash": self.bash}

    def adopt(self, stored: dict[str, Any]) -> None:
        """Use the anchor that a checkpoint restored, instead of the one that was here."""
        self.pids = {pid for inner in stored["pids"] if (pid := self.members.find(inner)) is not None}
        self.bash = stored["bash"]
        self._watch(self.members.find(stored["inner"]), stored["inner"])

    def _watch(self, pid: int | None, inner: int) -> None:
        """Note which process the anchor is, and watch for its end."""
        os.close(self._death)
        self.pid = pid or 0
        self._death = death_of(self.pid)
        # From here on the descriptor names this process, unless the pid was another one's by then.
        if self.pid and inner_of(self.pid) != inner:
            os.close(self._death)
            self._death = death_of(0)

    @property
    def _has_ended(self) -> bool:
        return bool(select.select([self._death], [], [], 0)[0])

    def look_after(self) -> None:
        """Have another anchor started if the agent has killed this one. Background processes then have no parent.

        Raises:
            ShellStartError: No anchor responds.
        """
        # This runs before each start and each list of processes, so its usual case is one system call.
        if not self._has_ended:
            return
        # The init goes too, with whatever it has left, so that pid 1 reads `again`.
        for pid in self.pids - {self.members.pid}:
            kill(pid)
        # Before `again`: lines of the dead anchor must not be taken for the reply of the next one.
        self._drop_news()
        os.write(self._again_fd, b"\n")
        # An image whose /bin/sh was deleted starts no anchor. The next order raises ShellStartError, which the call
        # reports.
        with contextlib.suppress(ShellStartError):
            self.ready(ANSWER_S if self.has_shell() else NO_SHELL_S)

    def has_shell(self) -> bool:
        """Return whether the image's /bin/sh is there."""
        # Only the existence is of interest. The link is not followed, because its target would be looked up on the host
        # if it is absolute.
        return os.path.lexists(f"/proc/{self.members.pid}/root/bin/sh")

    def new_folder(self) -> Path:
        """Return a directory in the box that does not exist yet. Restored shells bring directories of other numbers."""
        # The box is read-only in the container, so no process of the agent can make a directory of this name first.
        return next(path for number in self._numbers if not (path := self.box / str(number)).exists())

    def start(self, name: str) -> tuple[int, int]:
        """Start the shell whose files are in a directory of the box.

        Returns:
            Its pid on this machine, and its inner pid.

        Raises:
            ShellStartError: It ended at once, or the anchor is dead.
        """
        self._order(f"start {name}")
        while True:
            _, started, inner = self._hear("started", ANSWER_S)
            # Replies to an earlier start whose deadline has passed, and forged lines, name another directory.
            if started == name:
                break
        # The reply is translated through the control group: a shell that has ended already, or a forged number, is not
        # in it.
        pid = self.members.find(int(inner)) if inner else None
        if pid is None:
            raise ShellStartError("no shell can be started in this sandbox: the process ended at once")
        return pid, int(inner)

    def collect(self, inner: int) -> None:
        """Have a shell that ends collected before the next one starts."""
        # A new anchor has no dead one's children to collect.
        with contextlib.suppress(ShellStartError):
            self._order(f"wait {inner}")

    def status(self, inner: int, *, otherwise: int) -> int:
        """Return the exit status of a shell that ends; `otherwise` if the anchor does not know it."""
        try:
            # Only the parent can wait for a process (wait(2)), and the parent of every shell is the anchor.
            self._order(f"wait {inner}")
            while True:
                _, pid, code = self._hear("ended", ANSWER_S)
                if pid == str(inner):
                    return int(code)
        except (ShellStartError, ValueError):
            return otherwise

    def _order(self, line: str) -> None:
        if self._has_ended:
            raise ShellStartError("no shell can be started in this sandbox: its anchor has been killed")
        # A line is shorter than PIPE_BUF, so the kernel writes it in one piece, and lines of several writers do not mix
        # (pipe(7)).
        os.write(self._orders_fd, f"{line}\n".encode())

    def _hear(self, kind: str, within_s: float) -> list[str]:
        """Return the fields of the next line of news of a kind; other lines are dropped.

        Raises:
            ShellStartError: None comes in time, or the anchor or the container ends.
        """
        # The deadline is for the reply as a whole: forged lines of other kinds arrive in between, but they do not
        # extend it.
        deadline = time.monotonic() + within_s
        expected = {"ready": 4, "started": 3, "ended": 3}[kind]
        while (remaining_s := deadline - time.monotonic()) > 0:
            while b"\n" in self._news:
                line, _, self._news = self._news.partition(b"\n")
                fields = line.decode("latin-1").split()
                # A process of the agent's may have written the line, so its form is checked.
                if fields[:1] == [kind] and len(fields) == expected and all(number(f) is not None for f in fields[-2:]):
                    return fields
            # The descriptor of a process becomes readable when it ends (pidfd_open(2)).
            ends = [self.members.init] if kind == "ready" else [self.members.init, self._death]
            readable, _, _ = select.select([self._news_fd, *ends], [], [], remaining_s)
            if self._news_fd in readable:
                self._news += os.read(self._news_fd, 1 << 16)
            elif readable:
                # The container's pid 1 has ended, or the anchor that should respond.
                break
        raise ShellStartError("no shell can be started in this sandbox: its anchor does not respond")

    def _drop_news(self) -> None:
        """Empty the FIFOs: what is in them was for, or from, an anchor that is dead."""
        self._news = b""
        with contextlib.suppress(BlockingIOError):
            while os.read(self._news_fd, 1 << 16):
                pass
        with contextlib.suppress(BlockingIOError):
            # An order that the dead anchor did not read must not start a shell in the next one: its caller has given
            # up.
            while os.read(self._orders_fd, 1 << 16):
                pass
