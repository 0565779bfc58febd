"""The parent of the workers: it starts them, starts those that die again, and ends all of them together.

It holds the listening socket, so that connections wait while no worker accepts them. Workers are forks of it: they
share the memory of what is loaded already. It has no event loop and no threads, and signals are only taken where it
waits. If it is killed, the kernel sends the workers SIGTERM (`PR_SET_PDEATHSIG`), and their sandboxes end with them.
"""

import mmap
import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import structlog

from sandboxes.linux import syscalls as kernel

log = structlog.get_logger()

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 10.0
"""Pause before a dead worker is started again: doubled with each death, up to the longest."""
LASTING_S = 30.0
"""A worker that lived for this long is started again after the first pause."""
_LOOK_S = 0.05
"""Interval at which is looked whether all workers serve, and whether all have ended."""
_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD}

Work = Callable[[int, Callable[[], None]], None]


class WorkerFailedError(RuntimeError):
    """A worker could not start. Its log says why."""


@dataclass(slots=True)
class _Worker:
    number: int
    pid: int = 0
    began: float = 0.0
    pause_s: float = FIRST_PAUSE_S
    due: float = 0.0


def supervise(count: int, work: Work, all_ready: Callable[[], None]) -> None:
    """Run workers until SIGTERM or SIGINT, and return when all of them have ended. Raises WorkerFailedError."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    workers, is_ready = [_Worker(number) for number in range(count)], False
    # Memory that all share: each worker notes in its byte that it has served.
    served = mmap.mmap(-1, count)
    try:
        while True:
            for worker in workers:
                if not worker.pid and worker.due <= time.monotonic():
                    _start(worker, served, work, before)
            if _await_signal(workers, is_ready=is_ready) in (signal.SIGTERM, signal.SIGINT):
                return
            for worker in _reaped(workers):
                if not served[worker.number]:
                    raise WorkerFailedError(f"worker {worker.number} did not start; its log says why")
                log.error("a worker died, and is started again", worker=worker.number, pause_s=worker.pause_s)
            if not is_ready and all(served[:]):
                is_ready = True
                all_ready()
    finally:
        _end(workers)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start(worker: _Worker, served: mmap.mmap, work: Work, mask: Iterable[int]) -> None:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        worker.pid, worker.began = pid, time.monotonic()
        return
    status = 1
    try:
        # Of its own session, because Ctrl-C reaches a whole group: the parent ends the workers.
        os.setsid()
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            return
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        # A shell that starts a command in the background has it ignore SIGINT, which must end a worker: see `_end`.
        signal.signal(signal.SIGINT, signal.default_int_handler)

        def is_serving() -> None:
            served[worker.number] = 1

        work(worker.number, is_serving)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except KeyboardInterrupt:
        # The second signal, see `_end`.
        pass
    except BaseException:
        log.exception("a worker failed", worker=worker.number)
    finally:
        os._exit(status)


def _await_signal(workers: Iterable[_Worker], *, is_ready: bool) -> int | None:
    """Wait for a signal, or until a worker has to be started or looked at."""
    dues = [worker.due - time.monotonic() for worker in workers if not worker.pid]
    within_s = min([*dues, 3600.0 if is_ready else _LOOK_S])
    received = signal.sigtimedwait(_SIGNALS, max(0.0, within_s))
    return None if received is None else received.si_signo


def _reaped(workers: Iterable[_Worker]) -> list[_Worker]:
    """Return the workers that have ended, and note when to start them again."""
    ended = []
    for worker in workers:
        if not worker.pid or os.waitpid(worker.pid, os.WNOHANG)[0] != worker.pid:
            continue
        now = time.monotonic()
        lasted = now - worker.began > LASTING_S
        worker.pause_s = FIRST_PAUSE_S if lasted else min(worker.pause_s * 2, LONGEST_PAUSE_S)
        worker.pid, worker.due = 0, now + worker.pause_s
        ended.append(worker)
    return ended


def _end(workers: list[_Worker]) -> None:
    """End all workers, and wait for them. A second signal ends them without waiting for calls."""
    for worker in workers:
        if worker.pid:
            os.kill(worker.pid, signal.SIGTERM)
    while any(worker.pid for worker in workers):
        received = signal.sigtimedwait(_SIGNALS, _LOOK_S)
        if received is not None and received.si_signo != signal.SIGCHLD:
            for worker in workers:
                if worker.pid:
                    os.kill(worker.pid, signal.SIGINT)
        _reaped(workers)
