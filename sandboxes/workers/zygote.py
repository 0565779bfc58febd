"""The process that workers are forked from: a fork of a process that has loaded everything takes a millisecond.

It ends when the driver's end of its socket closes or the driver dies, and with it, by their death signal, all workers.
"""

import contextlib
import gc
import os
import resource
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from sandboxes.ipc.frames import Inbox, Message, pack, receive
from sandboxes.linux import confine, landlock
from sandboxes.linux import syscalls as kernel
from sandboxes.workers import worker
from sandboxes.workers.engine import module_of

CAP_DAC_OVERRIDE = 1


class Zygote:
    """Forks workers, and tells how they ended."""

    def __init__(self, driver: socket.socket, engine: str) -> None:
        self.driver, self.engine = driver, engine
        self._workers: set[int] = set()

    def serve(self) -> None:
        """Answer requests until the driver is gone; then end the workers."""
        inbox = Inbox()
        while True:
            data, fds = receive(self.driver)
            if not data:
                break
            inbox.feed(data, fds)
            while (message := inbox.take()) is not None:
                self.driver.sendall(pack(self._answer(message)))
        for pid in self._workers:
            os.kill(pid, signal.SIGKILL)

    def _answer(self, message: Message) -> dict[str, Any]:
        if message.fields["op"] == "fork":
            try:
                return {"pid": self._fork(message.fds[0])}
            except OSError as error:
                return {"error": str(error)}
            finally:
                os.close(message.fds[0])
        return self._end(int(message.fields["pid"]))

    def _fork(self, fd: int) -> int:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self.driver.close()
            worker.become_worker(socket.socket(fileno=fd), parent, self.engine)
        self._workers.add(pid)
        return pid

    def _end(self, pid: int) -> dict[str, Any]:
        """Kill a worker, unless it has ended already, and say how it ended."""
        if pid not in self._workers:
            return {}
        self._workers.remove(pid)
        os.kill(pid, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return {"signal": -status} if status < 0 else {"code": status}


def give_up(room: Path, *, network: bool) -> bool:
    """Give up, for this process and its workers, what queries have no use for; say whether files outside room, too.

    Without Landlock (a kernel that has it switched off) the workers' rules on files are those of the engine alone.
    """
    privileged = os.geteuid() == 0
    if privileged and not network:
        kernel.unshare(kernel.CLONE_NEWNET)
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    if privileged:
        for capability in range(confine.LAST_CAPABILITY + 1):
            with contextlib.suppress(OSError):
                kernel.prctl(kernel.PR_CAPBSET_DROP, capability)
        # The room may lie below a directory of another user.
        kernel.capset(1 << CAP_DAC_OVERRIDE)
    if network:
        # It talks to a server, through files that its library looks for in many places.
        return False
    kernel.seccomp(confine.program(kernel.MACHINE))
    try:
        landlock.restrict_to(room)
    except OSError:
        return False
    return True


def main() -> None:
    """Serve on the descriptor that argv names, with its engine, room and whether it needs the network."""
    driver = socket.socket(fileno=int(sys.argv[1]))
    driver.set_inheritable(False)
    engine, room, network = sys.argv[2], Path(sys.argv[3]), sys.argv[4] == "network"
    os.closerange(3, driver.fileno())
    os.closerange(driver.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    # The terminal's Ctrl-C is for the driver, who ends the workers in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (worker.MAX_DESCRIPTORS, worker.MAX_DESCRIPTORS))
    try:
        module = module_of(engine)
        getattr(module, "prepare", lambda: None)()
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        os.environ["FORKPOINT_WORKER_BYTES"] = str(pages * os.sysconf("SC_PAGE_SIZE"))
        confined = give_up(room, network=network)
    except (OSError, ImportError) as error:
        driver.sendall(pack({"error": str(error)}))
        return
    # Forked memory stays shared as long as nobody writes to it; the collector would.
    gc.collect()
    gc.freeze()
    driver.sendall(pack({"ready": True, "confined": confined}))
    Zygote(driver, engine).serve()


if __name__ == "__main__":
    main()
