"""The zygote: the process that workers are forked from.

Theory of operation. The zygote imports the engine once and lets it prepare, and then drops its privileges for good,
before the first request exists: no code of a worker ever runs with more. It is single-threaded and never runs an
engine, so no statement can touch it. Only a parent can reap its children, so the driver asks the zygote to end a worker
and to say how it ended. The zygote exits when its socket closes, and the kernel kills it, and so its workers, if the
driver dies (`PR_SET_PDEATHSIG`).
"""

import contextlib
import os
import resource
import signal
import socket
import sys
from pathlib import Path

from sandboxes.ipc.codec import Envelope, IpcMessage, decode, pack_message, prepare
from sandboxes.ipc.fork_child import connect, freeze_heap, requests
from sandboxes.ipc.launch_messages import ForkServerReady
from sandboxes.ipc.messages import Failed
from sandboxes.linux import confine, landlock, oom_score
from sandboxes.linux import syscalls as kernel
from sandboxes.shell_text import AGENT_SCORE
from sandboxes.workers import worker
from sandboxes.workers.engine import module_of
from sandboxes.workers.messages import EndWorker, ForkWorker, WorkerEnded, WorkerForked


class Zygote:
    """Forks workers and reports how they ended."""

    def __init__(self, driver: socket.socket, engine: str) -> None:
        self.driver, self.engine = driver, engine
        self._workers: set[int] = set()

    def serve(self) -> None:
        """Answer requests until the driver closes its end, then kill the workers."""
        for frame in requests(self.driver):
            answer = pack_message(self._answer(decode(frame)))
            # A driver that is gone reads no answer; the next read says so.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self.driver.sendall(answer)
        for pid in self._workers:
            os.kill(pid, signal.SIGKILL)

    def _answer(self, envelope: Envelope[IpcMessage]) -> IpcMessage:
        match envelope.message:
            case ForkWorker():
                try:
                    return WorkerForked(self._fork(envelope.fds[0]))
                except OSError as error:
                    return Failed(str(error))
                finally:
                    os.close(envelope.fds[0])
            case EndWorker(pid):
                return self._end(pid)
        raise AssertionError(f"{envelope.message.op} is not for the zygote")

    def _fork(self, fd: int) -> int:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            # An open copy of this socket in a worker would keep the zygote's end from ever reading "closed".
            self.driver.close()
            worker.become_worker(socket.socket(fileno=fd), parent, self.engine)
        self._workers.add(pid)
        return pid

    def _end(self, pid: int) -> WorkerEnded:
        if pid not in self._workers:
            return WorkerEnded()
        self._workers.remove(pid)
        # A worker that has already exited is a zombie until the wait below, so the number cannot be another process's.
        os.kill(pid, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return WorkerEnded(signal=-status) if status < 0 else WorkerEnded(code=status)


def drop_privileges(data_dir: Path, *, network: bool) -> bool:
    """Drop for good what requests do not need; return whether files are confined to `data_dir`. It takes no right."""
    if not network:
        # A second fence, where it can be had, behind the filter below.
        with contextlib.suppress(OSError):
            kernel.unshare(kernel.CLONE_NEWNET)
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    for capability in range(confine.LAST_CAPABILITY + 1):
        # Older kernels have fewer capabilities and refuse the higher numbers. Without CAP_SETPCAP all are refused; then
        # no_new_privs keeps a program that is executed from getting one.
        with contextlib.suppress(OSError):
            kernel.prctl(kernel.PR_CAPBSET_DROP, capability)
    # The one that they keep, if they have it, bypasses permission checks on files.
    # The data directory may lie below a directory that only another user may search.
    kernel.capset(1 << kernel.CAP_DAC_OVERRIDE & kernel.permitted())
    if network:
        # A client library reads certificates, password files and resolver settings from many directories.
        return False
    # Workers make no sockets; theirs come with the request to fork them.
    kernel.seccomp(confine.program(kernel.MACHINE, sockets=False))
    try:
        landlock.restrict_to(data_dir)
    except OSError:
        return False
    return True


def main() -> None:
    """Serve the driver: argv is its descriptor, the engine, the data directory, and "network" or "alone"."""
    driver = connect()
    # The workers hold what an agent's calls take, and inherit the score.
    oom_score.write(AGENT_SCORE)
    engine, data_dir, network = sys.argv[2], Path(sys.argv[3]), sys.argv[4] == "network"
    try:
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_NOFILE, (worker.MAX_DESCRIPTORS, worker.MAX_DESCRIPTORS))
        module = module_of(engine)
        getattr(module, "prepare", lambda: None)()
        prepare()
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        os.environ["FORKPOINT_WORKER_BYTES"] = str(pages * os.sysconf("SC_PAGE_SIZE"))
        confined = drop_privileges(data_dir, network=network)
    except (OSError, ImportError) as error:
        driver.sendall(pack_message(Failed(str(error))))
        return
    freeze_heap()
    driver.sendall(pack_message(ForkServerReady(confined)))
    Zygote(driver, engine).serve()


if __name__ == "__main__":
    main()
