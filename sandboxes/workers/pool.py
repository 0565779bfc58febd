"""The driver's side of the worker processes: a few shared readers, and a dedicated worker for each sandbox that writes.

Theory of operation:

1. One zygote per driver forks all workers (`sandboxes.workers.zygote`). If it is killed, its workers die with it, and
   the next fork starts another zygote.
2. A call that only reads borrows a *reader* (`WorkerPool.reader`), which holds no state of a rollout. There are as many
   as cores, and more while long calls occupy them all.
3. A sandbox that writes owns a *dedicated* worker (`WorkerPool.dedicated`), which holds its open database and its
   session. A reader can become one (`WorkerPool.dedicate`): it already has the right state open.
4. *Spares* are forked and warmed up in the background, so that a dedicated worker costs no fork.
5. A worker is used by one caller at a time. If its caller times out or is cancelled, the worker is killed: nothing
   else stops a statement reliably. The pool asks the zygote how each worker ended, and `WorkerLostError.cause` says
   whether the statement is to blame.
"""

import asyncio
import contextlib
import os
import signal
import socket
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

from sandboxes.errors import SandboxError
from sandboxes.ipc.channel import Channel, ChannelClosedError, PeerFailedError
from sandboxes.ipc.codec import AnswerT, Envelope, IpcRequest
from sandboxes.ipc.fork_server import START_S, ForkServer
from sandboxes.task_owner import TaskOwner
from sandboxes.workers.messages import EndWorker, ForkWorker, SetLimits, WarmUp, WorkerEnded
from sandboxes.workers.worker import OUT_OF_MEMORY

GRACE_S = 1.0
"""How long a request may overrun its time limit before its worker is killed. Engines stop most statements in time."""
MAX_READERS = 16
"""Limit of shared workers; further reading calls wait. Each holds some 5 MB, and page caches of a few databases."""
SPARES = 2
"""Workers forked ahead of use. Without a spare, a call waits for a worker to start."""
RESTOCK_S = 0.1
"""Delay before spares are replaced, so that forking does not compete with the call that took the last one."""
PATIENCE_S = 0.05
"""How long a call waits for a busy reader before the pool forks another one."""

WorkerLossCause = Literal["memory", "killed", "crashed", "defect"]


class WorkerLostError(RuntimeError):
    """A worker ended while it served a request.

    "memory": the request needed more than its limit. "killed": SIGKILL, from a person or from the kernel when memory
    ran out. "crashed": another signal or exit code. "defect": the engine raised an exception.
    """

    def __init__(self, cause: WorkerLossCause, message: str) -> None:
        super().__init__(message)
        self.cause = cause


class WorkerStuckError(RuntimeError):
    """A worker did not answer in time and was killed."""


class PooledWorker:
    """One worker process, used by one caller at a time."""

    def __init__(self, pid: int, channel: Channel, pool: "WorkerPool") -> None:
        self.pid = pid
        self._channel, self._pool = channel, pool
        self._closed = False
        self._limits: SetLimits | None = None

    @property
    def alive(self) -> bool:
        """False once the worker is known to have ended."""
        return not self._closed and self._channel.lost is None

    async def ask(
        self, request: IpcRequest[AnswerT], body: bytes = b"", *, limits: SetLimits | None = None, timeout_s: float
    ) -> Envelope[AnswerT]:
        """Send a request and return its answer. The worker is gone after an error or a cancellation.

        `limits` hold from now on; None leaves them as they are. Raises WorkerLostError if the worker ended, and
        WorkerStuckError if the time limit passed; the worker is killed `GRACE_S` later.
        """
        try:
            async with asyncio.timeout(timeout_s + GRACE_S):
                if limits is not None and limits != self._limits:
                    self._limits = limits
                    await self._channel.post(limits)
                return await self._channel.ask(request, body)
        except TimeoutError:
            await self.close()
            raise WorkerStuckError(f"no answer after {timeout_s + GRACE_S:g} s") from None
        except ChannelClosedError:
            raise await self._lost() from None
        except PeerFailedError as error:
            await self.close()
            raise WorkerLostError("defect", str(error)) from None
        except BaseException:
            # The caller was cancelled. The statement would keep running, and its answer would meet the next caller.
            await self.close()
            raise

    async def close(self) -> WorkerEnded:
        """Kill the process. Idempotent, and completes even if its caller is cancelled."""
        if self._closed:
            return WorkerEnded()
        self._closed = True
        self._channel.close()
        return await self._pool.end(self)

    async def _lost(self) -> WorkerLostError:
        ended = await self.close()
        if ended.code == OUT_OF_MEMORY:
            return WorkerLostError("memory", "the query needed more memory than its limit")
        if ended == WorkerEnded():
            # The zygote is gone and took the worker along. The request is not to blame.
            return WorkerLostError("killed", f"worker {self.pid} ended with the zygote")
        # The zygote also sends SIGKILL, but only to a worker that still runs; this one had closed its socket before.
        if ended.signal == signal.SIGKILL:
            return WorkerLostError("killed", f"worker {self.pid} was killed")
        how = f"by signal {ended.signal}" if ended.signal else f"with code {ended.code}"
        return WorkerLostError("crashed", f"worker {self.pid} ended {how}")


class WorkerPool:
    """All workers of one driver. None outlives `aclose`, or the driver's process."""

    def __init__(self, engine: str, data_dir: Path, *, network: bool = False) -> None:
        """Create a pool; `open` starts it. Workers with a `network` are not confined to files below `data_dir`."""
        self.confined = False  # Whether files outside `data_dir` are out of the workers' reach.
        self._zygote = ForkServer(
            "the zygote of workers",
            "sandboxes.workers.zygote",
            [engine, str(data_dir), "network" if network else "alone"],
            site_packages=True,
            # Answers must not depend on the environment that the proxy was started with.
            environment={"LANG": "C.UTF-8", "TZ": "UTC0", "SQLITE_TMPDIR": str(data_dir / "tmp")},
        )
        self._max_idle = max(2, os.cpu_count() or 2)
        self._readers = self._waiting = 0
        self._dedicated: set[PooledWorker] = set()
        self._spares: deque[PooledWorker] = deque()
        self.workers: set[PooledWorker] = set()  # Workers in use or idle, without the spares.
        self.started = 0  # Workers that were ever put to use.
        self._idle: asyncio.LifoQueue[PooledWorker] = asyncio.LifoQueue()
        self._free = asyncio.Semaphore(MAX_READERS)
        self._restocks, self._endings = TaskOwner(), TaskOwner()
        self._starting = asyncio.Lock()

    async def open(self) -> None:
        """Start the zygote, which forks workers as they are needed. Without this call, the first worker starts it."""
        self.confined = (await self._zygote.start()).confined

    async def trial(self) -> None:
        """Have a worker use every code path of its engine once; `SandboxError` if it cannot."""
        worker = await self.dedicated()
        try:
            await worker.ask(WarmUp(), timeout_s=START_S)
        except (WorkerLostError, WorkerStuckError) as error:
            raise SandboxError(f"a worker cannot run: {error}") from error
        finally:
            await worker.close()

    async def aclose(self) -> None:
        """End every worker and the zygote. Idempotent."""
        await self._restocks.end()
        while self._spares:
            await self._spares.popleft().close()
        await self.renew()
        await self._endings.wait()
        await self._zygote.close()

    async def renew(self) -> None:
        """End the idle readers, which may hold deleted files open."""
        while not self._idle.empty():
            await self._dismiss(self._idle.get_nowait())

    @asynccontextmanager
    async def reader(self) -> AsyncIterator[PooledWorker]:
        """Lend a shared worker for one call. If it is lost meanwhile, the pool replaces it for later calls."""
        async with self._free:
            worker = await self._borrow()
            try:
                yield worker
            finally:
                if worker in self._dedicated:
                    self._dedicated.remove(worker)
                    self._readers -= 1
                elif worker.alive and (self._waiting > self._idle.qsize() or self._readers <= self._max_idle):
                    # Last in, first out: the worker used last has the most in its caches.
                    self._idle.put_nowait(worker)
                else:
                    await self._dismiss(worker)

    def dedicate(self, worker: PooledWorker) -> None:
        """Give a borrowed reader to its caller for good; the caller closes it."""
        self._dedicated.add(worker)

    async def dedicated(self) -> PooledWorker:
        """Return a worker that its caller owns and closes: a spare, or a new one."""
        worker = None
        while self._spares and worker is None:
            spare = self._spares.popleft()
            worker = spare if spare.alive else None
        if worker is None:
            worker = await self._fork()
        self.workers.add(worker)
        self.started += 1
        if not self._restocks:
            self._restocks.spawn("restock workers", self._restock())
        return worker

    async def end(self, worker: PooledWorker) -> WorkerEnded:
        """Kill a worker and return how it ended; nothing of it if the zygote is gone, and the worker with it."""
        self.workers.discard(worker)
        # A task of its own: the worker must be reaped even if the caller is cancelled.
        return await asyncio.shield(self._endings.spawn("end worker", self._end(worker.pid), awaited=True))

    async def _borrow(self) -> PooledWorker:
        while (worker := await self._idle_reader()) is not None:
            if worker.alive:
                return worker
            await self._dismiss(worker)
        self._readers += 1
        try:
            return await self.dedicated()
        except BaseException:
            self._readers -= 1
            raise

    async def _idle_reader(self) -> PooledWorker | None:
        """Return an idle reader, or None if the pool should start another one."""
        if not self._idle.empty():
            return self._idle.get_nowait()
        if self._readers < self._max_idle:
            return None
        self._waiting += 1
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await self._idle.get()
        except TimeoutError:
            # A reader may have come in the same moment. Left there, it would be one too many.
            return None if self._idle.empty() else self._idle.get_nowait()
        finally:
            self._waiting -= 1

    async def _dismiss(self, worker: PooledWorker) -> None:
        self._readers -= 1
        await worker.close()

    async def _restock(self) -> None:
        await asyncio.sleep(RESTOCK_S)
        with contextlib.suppress(SandboxError, WorkerLostError, WorkerStuckError):
            while len(self._spares) < SPARES:
                spare = await self._fork()
                self._spares.append(spare)
                # The kernel copies each page at its first write after a fork; let the warm-up pay for that.
                await spare.ask(WarmUp(), timeout_s=START_S)

    # -- the zygote --------------------------------------------------------------------------------------------------

    async def _fork(self) -> PooledWorker:
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                async with self._starting:
                    if not self._zygote.is_open:
                        await self.open()
                await self._zygote.ensure_running()
                forked = (await self._zygote.ask(ForkWorker(), [theirs.fileno()])).message
        except BaseException:
            ours.close()
            raise
        return PooledWorker(forked.pid, Channel(ours), self)

    async def _end(self, pid: int) -> WorkerEnded:
        try:
            return (await self._zygote.ask(EndWorker(pid))).message
        except SandboxError:
            return WorkerEnded()
