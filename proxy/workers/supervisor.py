"""The parent of the workers: it starts them, starts those that die again, and ends all of them together.

It holds the listening socket, so that connections wait while no worker accepts them. Workers are forks of it: they
share the memory of what is loaded already. It has no event loop and no threads, and signals are only taken where it
waits. If it is killed, the kernel sends the workers SIGTERM (`PR_SET_PDEATHSIG`), and their sandboxes end with them.
"""

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
"""Interval at which workers that start are looked at."""
_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD}

Work = Callable[[int, Callable[[], None]], None]


class WorkerFailedError(RuntimeError):
    """A worker could not start. Its log says why."""


@dataclass(slots=True)
class _Worker:
    number: int
    pid: int = 0
    ready: int = -1
    began: float = 0.0
    pause_s: float = FIRST_PAUSE_S
    due: float = 0.0
    has_served: bool = False


def supervise(count: int, work: Work, all_ready: Callable[[], None]) -> None:
    """Run workers until SIGTERM or SIGINT, and return when all of them have ended. Raises WorkerFailedError."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    workers = [_Worker(number) for number in range(count)]
    is_ready = False
    try:
        while True:
            for worker in workers:
                if not worker.pid and worker.due <= time.monotonic():
                    _start(worker, workers, work, before)
            if _await_signal(workers) in (signal.SIGTERM, signal.SIGINT):
                return
            for worker in _reaped(workers):
                if not worker.has_served:
                    raise WorkerFailedError(f"worker {worker.number} did not start; its log says why")
                log.error("a worker died, and is started again", worker=worker.number, pause_s=worker.pause_s)
            for worker in workers:
                _look(worker)
            if not is_ready and all(worker.has_served for worker in workers):
                is_ready = True
                all_ready()
    finally:
        _end(workers)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start(worker: _Worker, workers: Iterable[_Worker], work: Work, mask: Iterable[int]) -> None:
    parent, (ready, serving) = os.getpid(), os.pipe()
    pid = os.fork()
    if pid:
        os.close(serving)
        worker.pid, worker.ready, worker.began = pid, ready, time.monotonic()
        return
    status = 1
    try:
        # Of its own session, because Ctrl-C reaches a whole group: the parent ends the workers.
        os.setsid()
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            return
        for each in (ready, *(other.ready for other in workers if other.ready >= 0)):
            os.close(each)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        # A shell that starts a command in the background has it ignore SIGINT, which must end a worker: see `_end`.
        signal.signal(signal.SIGINT, signal.default_int_handler)

        def is_serving() -> None:
            os.write(serving, b"1")

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


def _await_signal(workers: Iterable[_Worker]) -> int | None:
    """Wait for a signal, or until a worker has to be started or looked at."""
    dues = [worker.due - time.monotonic() for worker in workers if not worker.pid]
    looks = [_LOOK_S for worker in workers if worker.pid and worker.ready >= 0]
    within_s = min([*dues, *looks], default=3600.0)
    received = signal.sigtimedwait(_SIGNALS, max(0.0, within_s))
    return None if received is None else received.si_signo


def _reaped(workers: Iterable[_Worker]) -> list[_Worker]:
    """Return the workers that have ended, and note when to start them again."""
    ended = []
    for worker in workers:
        if not worker.pid or os.waitpid(worker.pid, os.WNOHANG)[0] != worker.pid:
            continue
        # What it has written to the pipe is read before its end counts.
        _look(worker)
        now = time.monotonic()
        lasted = now - worker.began > LASTING_S
        worker.pause_s = FIRST_PAUSE_S if lasted else min(worker.pause_s * 2, LONGEST_PAUSE_S)
        worker.pid, worker.due = 0, now + worker.pause_s
        ended.append(worker)
    return ended


def _look(worker: _Worker) -> None:
    if worker.ready < 0:
        return
    os.set_blocking(worker.ready, False)
    try:
        written = os.read(worker.ready, 1)
    except BlockingIOError:
        return
    worker.has_served = worker.has_served or bool(written)
    os.close(worker.ready)
    worker.ready = -1


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
