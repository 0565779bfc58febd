"""The shell inside a container that starts all others, seen from the keeper. See `texts` for its side."""

import contextlib
import itertools
import os
import select
import time
from pathlib import Path
from typing import Any

from sandboxes.container.boot_scripts import FIFOS
from sandboxes.container.cgroup_processes import Household, inner_of, kill, start_time
from sandboxes.guest.anchor import ShellStartError

ANSWER_S = 10.0
SHELTERED = "-900"


class ContainerAnchor:
    """`pids`: those on this machine of the anchor and, where there is one, its init. `bash`: what shells it starts."""

    def __init__(self, box: Path, house: Household) -> None:
        self.box, self.house = box, house
        self.pids: set[int] = set()
        self.pid = 0
        self.bash = False
        self._numbers = itertools.count(1)
        self._started: int | None = None
        self._news = b""
        self._orders_fd, self._news_fd, self._again_fd = (
            os.open(box / name, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW) for name in FIFOS
        )

    def ready(self, within_s: float) -> bool:
        """Wait until the anchor stands; return whether the image has bash.

        Raises:
            CannotStart: it gives no sign.
        """
        _, kind, inner, parent = self._hear("ready", within_s)
        found = [self.house.find(int(pid)) for pid in (inner, parent)]
        self.bash = kind == "bash"
        self.pids = {pid for pid in found if pid is not None}
        self.pid = found[0] or 0
        self._started = start_time(self.pid)
        for pid in (self.house.pid, *self.pids):
            # Memory is short when a command takes too much: it should go, not what starts the next one.
            with contextlib.suppress(OSError):
                Path(f"/proc/{pid}/oom_score_adj").write_text(SHELTERED)
        return self.bash

    def remember(self) -> dict[str, Any]:
        """Return what a checkpoint has to keep of it: what the container calls its processes."""
        return {"inner": inner_of(self.pid), "pids": [inner_of(pid) for pid in self.pids], "bash": self.bash}

    def adopt(self, told: dict[str, Any]) -> None:
        """Take over an anchor that was restored with its processes, in the place of the one that was here."""
        self.pid = self.house.find(told["inner"]) or 0
        self.pids = {pid for inner in told["pids"] if (pid := self.house.find(inner)) is not None}
        self.bash = told["bash"]
        self._started = start_time(self.pid)

    def look_after(self) -> None:
        """Have a new anchor started where the agent has killed this one; then what it had left is orphaned.

        Raises:
            CannotStart: no new one comes up.
        """
        if start_time(self.pid) == self._started and self._started is not None:
            return
        for pid in self.pids - {self.house.pid}:
            kill(pid)
        self._drop_news()
        os.write(self._again_fd, b"\n")
        with contextlib.suppress(ShellStartError):
            self.ready(ANSWER_S if self._shell_is_there() else 0.5)

    def _shell_is_there(self) -> bool:
        return os.path.lexists(f"/proc/{self.house.pid}/root/bin/sh")

    def new_folder(self) -> Path:
        """Return a name in the box that no shell has had."""
        # Those of shells that were restored bring their own.
        return next(path for number in self._numbers if not (path := self.box / str(number)).exists())

    def start(self, name: str) -> tuple[int, int]:
        """Start the shell in directory name; return its pid on this machine and its own.

        Raises:
            CannotStart: it ended at once, or the anchor is dead.
        """
        self._order(f"start {name}")
        while True:
            _, started, inner = self._hear("started", ANSWER_S)
            if started == name:
                break
        pid = self.house.find(int(inner)) if inner else None
        if pid is None:
            raise ShellStartError("no shell can be started in this sandbox: the process ended at once")
        return pid, int(inner)

    def status(self, inner: int, *, otherwise: int) -> int:
        """Return how a shell ended, which it has or is about to; otherwise, where the anchor cannot say."""
        try:
            self._order(f"wait {inner}")
            while True:
                _, pid, code = self._hear("ended", ANSWER_S)
                if pid == str(inner):
                    return int(code)
        except (ShellStartError, ValueError):
            return otherwise

    def _order(self, line: str) -> None:
        if self._started is None or start_time(self.pid) != self._started:
            raise ShellStartError("no shell can be started in this sandbox: what starts them has been killed")
        os.write(self._orders_fd, f"{line}\n".encode())

    def _hear(self, kind: str, within_s: float) -> list[str]:
        """Return the words of the next line of news that is of this kind."""
        deadline = time.monotonic() + within_s
        expected = {"ready": 4, "started": 3, "ended": 3}[kind]
        while (left := deadline - time.monotonic()) > 0:
            while b"\n" in self._news:
                line, _, self._news = self._news.partition(b"\n")
                words = line.decode("latin-1").split()
                if words[:1] == [kind] and len(words) == expected and all(w.isdigit() for w in words[-2:]):
                    return words
            readable, _, _ = select.select([self._news_fd, self.house.init], [], [], min(left, 0.2))
            if self._news_fd in readable:
                self._news += os.read(self._news_fd, 1 << 16)
            elif self.house.init in readable or (kind != "ready" and start_time(self.pid) != self._started):
                break
        raise ShellStartError("no shell can be started in this sandbox: what starts them gives no answer")

    def _drop_news(self) -> None:
        self._news = b""
        with contextlib.suppress(BlockingIOError):
            while os.read(self._news_fd, 1 << 16):
                pass
        with contextlib.suppress(BlockingIOError):
            while os.read(self._orders_fd, 1 << 16):
                pass
