"""Starts commands of `forkpoint` as forks of a process that has imported the server: two seconds of CPU less for each.

A fork runs the same module as `python -m` would, in a session of its own, with its own environment, directory and log.
`Proxy` and `Node` of the tests start by it; benchmarks, and tests of the command line itself, execute Python anew.
"""

import atexit
import gc
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from tests import known_machine

PRELOADED = (
    "proxy.app", "proxy.server", "proxy.cli.main", "proxy.cli.doctor", "proxy.compat.docker.endpoint",
    "proxy.compat.e2b.endpoint", "proxy.compat.harness.endpoint", "sandboxes.local.driver", "sandboxes.postgres.driver",
    "sandboxes.sqlite.driver", "sandboxes.upstream.driver", "sandboxes.video.driver", "snapshots.criu.checkpoints",
)  # fmt: skip
"""What `serve` with the default settings imports."""
_MESSAGE_BYTES = 1 << 20


@dataclass
class Forked:
    """A process that was forked, as `subprocess.Popen` shows one. The server of forks collects it."""

    pid: int
    server: "_Server"
    returncode: int | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._pidfd = os.pidfd_open(self.pid)

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal; None while the process runs."""
        return self._ended(0)

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status as soon as there is one. Raises subprocess.TimeoutExpired."""
        status = self._ended(timeout)
        if status is None:
            raise subprocess.TimeoutExpired(f"fork {self.pid}", timeout or 0.0)
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        """Send SIGKILL, unless the process has ended."""
        self.send_signal(signal.SIGKILL)

    def _ended(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._pidfd], [], [], timeout)[0]:
            self.returncode = self.server.status_of(self.pid)
            os.close(self._pidfd)
        return self.returncode


class _Server:
    """The process that forks, as its user in the tests sees it. It ends with them."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.forks", str(theirs.fileno())], cwd=Path(__file__).parents[1],
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
            )  # fmt: skip
        atexit.register(self._end)

    def fork(self, command: Sequence[str], folder: Path, environment: Mapping[str, str], log: Path) -> Forked:
        """Run what `python -m` would run with these words."""
        return Forked(self._ask([*command], str(folder), dict(environment), str(log)), self)

    def status_of(self, pid: int) -> int:
        """Collect a process that has ended; return its exit status."""
        return self._ask(pid)

    def _end(self) -> None:
        self._socket.close()
        self._process.wait()

    def _ask(self, *request: object) -> int:
        self._socket.sendall(json.dumps(request).encode())
        answer = self._socket.recv(_MESSAGE_BYTES)
        assert answer, "the server of forks has ended"
        return int(json.loads(answer))


@cache
def server() -> _Server:
    """Return the server of this process's forks."""
    return _Server()


def _serve(asking: socket.socket) -> None:
    while request := asking.recv(_MESSAGE_BYTES):
        match json.loads(request):
            case [int(pid)]:
                answer = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            case [words, folder, environment, log]:
                answer = os.fork()
                if not answer:
                    asking.close()
                    _become(words, folder, environment, log)
                    return
        asking.sendall(json.dumps(answer).encode())


def _become(words: list[str], folder: str, environment: dict[str, str], log: str) -> None:
    """Be a process that runs a module with arguments."""
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    written = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    for number in (1, 2):
        os.dup2(written, number)
    os.close(written)
    random.seed()
    # Python reads it at its start, which was that of the server of forks.
    sys.path[1:1] = [each for each in environment.get("PYTHONPATH", "").split(os.pathsep) if each]
    sys.argv = words
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    for name in PRELOADED:
        __import__(name)
    known_machine.remember()
    known_machine.look()
    gc.freeze()
    with socket.socket(fileno=int(sys.argv[1])) as _asking:
        _serve(_asking)
