"""The driver's side of the worker processes: a few shared readers, and one worker for each sandbox that writes."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

from sandboxes import IMPORT_ROOT
from sandboxes.errors import SandboxError
from sandboxes.ipc.channel import Channel, ChannelClosedError
from sandboxes.ipc.frames import Message
from sandboxes.workers.worker import OUT_OF_MEMORY

START_S = 30.0
STOP_S = 10.0
GRACE_S = 1.0
"""How long after its time a query may run on before its worker is killed: engines end most queries in time."""

MAX_READERS = 16
SPARES = 2
"""Workers forked before anybody needs them, 5 MB each: a new one takes 5 ms to be there, and 5 more to be fast."""
RESTOCK_S = 0.1
PATIENCE_S = 0.05
"""How long a call waits for one of the shared workers before it gets a new one."""

WorkerLossCause = Literal["memory", "killed", "crashed", "defect"]


class WorkerLostError(RuntimeError):
    """A worker ended in the middle of a request.

    cause: "memory" (the query needed more than its limit), "killed" (by somebody, or by the kernel for want of memory),
    "crashed" (a signal of its own making), or "defect" (the engine raised).
    """

    def __init__(self, cause: WorkerLossCause, told: str) -> None:
        super().__init__(told)
        self.cause = cause


class WorkerStuckError(RuntimeError):
    """A worker did not answer in time, and was killed."""


class Worker:
    """One worker process, used by one caller at a time."""

    def __init__(self, pid: int, channel: Channel, crew: "Crew") -> None:
        self.pid = pid
        self._channel, self._crew = channel, crew
        self._closed = False

    @property
    def alive(self) -> bool:
        """False once it is known to have ended."""
        return not self._closed and self._channel.lost is None

    async def ask(self, fields: dict[str, Any], body: bytes = b"", *, timeout_s: float) -> Message:
        """Send a request (`op`: open, run or close) and return its answer. After an error the worker is gone.

        A request that is cancelled takes its worker with it.

        Raises:
            WorkerLost: the worker ended.
            WorkerStuck: no answer within timeout_s and `GRACE_S`; it was killed.
        """
        try:
            async with asyncio.timeout(timeout_s + GRACE_S):
                answer = await self._channel.request(fields, body)
        except TimeoutError:
            await self.close()
            raise WorkerStuckError(f"no answer after {timeout_s + GRACE_S:g} s") from None
        except ChannelClosedError:
            raise await self._lost() from None
        except BaseException:
            await self.close()
            raise
        if "defect" in answer.fields:
            await self.close()
            raise WorkerLostError("defect", str(answer.fields["defect"]))
        return answer

    async def close(self) -> dict[str, Any]:
        """Kill the process; return how it ended. Idempotent, and runs to its end even when cancelled."""
        if self._closed:
            return {}
        self._closed = True
        self._channel.close()
        return await self._crew.end(self)

    async def _lost(self) -> WorkerLostError:
        ended = await self.close()
        if ended.get("code") == OUT_OF_MEMORY:
            return WorkerLostError("memory", "the query needed more memory than its limit")
        number = ended.get("signal")
        if number == signal.SIGKILL:
            return WorkerLostError("killed", f"worker {self.pid} was killed")
        how = f"by signal {number}" if number else f"with code {ended.get('code')}"
        return WorkerLostError("crashed", f"worker {self.pid} ended {how}")


class Crew:
    """All workers of one driver. Nothing of them is left after `aclose`, nor after the driver's process was killed.

    workers: those that live, without the spare ones. started: how many were.

    engine: "sqlite", "postgres", or the module of another. room: the directory below which workers may touch files.
    network: whether they may use it; such workers are not confined to the room.
    """

    def __init__(self, engine: str, room: Path, *, network: bool = False) -> None:
        self._engine, self._room, self._network = engine, room, network
        self.confined = False
        self._zygote: Channel | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._keep = max(2, os.cpu_count() or 2)
        self._readers = self._waiting = 0
        self._taken: set[Worker] = set()
        self._spares: deque[Worker] = deque()
        self._restocking: asyncio.Task[None] | None = None
        self.workers: set[Worker] = set()
        self.started = 0
        self._idle: asyncio.LifoQueue[Worker] = asyncio.LifoQueue()
        self._free = asyncio.Semaphore(MAX_READERS)
        self._mending = asyncio.Lock()
        self._ending: set[asyncio.Task[dict[str, Any]]] = set()

    async def open(self) -> None:
        """Start the zygote; workers are forked from it as they are needed.

        Raises:
            SandboxError: it does not start.
        """
        ours, theirs = socket.socketpair()
        program = f"import sys; sys.path.insert(0, {IMPORT_ROOT!r}); from sandboxes.workers.zygote import main; main()"
        arguments = [str(theirs.fileno()), self._engine, str(self._room), "network" if self._network else "alone"]
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-B", "-c", program, *arguments, pass_fds=[theirs.fileno()], cwd="/",
                # One time zone and one place for temporary files, whatever the proxy was started with.
                env={"LANG": "C.UTF-8", "TZ": "UTC0", "SQLITE_TMPDIR": str(self._room / "tmp")},
                stdin=asyncio.subprocess.DEVNULL,
            )  # fmt: skip
        finally:
            theirs.close()
        self._zygote = Channel(ours)
        try:
            async with asyncio.timeout(START_S):
                ready = (await self._zygote.receive()).fields
        except (ChannelClosedError, TimeoutError) as error:
            raise SandboxError(f"query workers cannot be started: {error}") from error
        if "error" in ready:
            raise SandboxError(f"query workers cannot be started: {ready['error']}")
        self.confined = bool(ready["confined"])

    async def aclose(self) -> None:
        """End every worker and the zygote. Idempotent."""
        if self._restocking is not None:
            self._restocking.cancel()
            await asyncio.wait([self._restocking])
            self._restocking = None
        while self._spares:
            await self._spares.popleft().close()
        await self.renew()
        await self._end_zygote()

    async def renew(self) -> None:
        """End the shared workers that are idle: they may hold files open that are gone."""
        while not self._idle.empty():
            await self._dismiss(self._idle.get_nowait())

    @asynccontextmanager
    async def reader(self) -> AsyncIterator[Worker]:
        """Lend a shared worker for one call. One that is lost meanwhile is nobody else's loss.

        There are as many as cores; only where calls run long are there more, for a while, up to `MAX_READERS`.
        """
        async with self._free:
            worker = await self._reader()
            try:
                yield worker
            finally:
                if worker in self._taken:
                    self._taken.remove(worker)
                    self._readers -= 1
                elif worker.alive and (self._waiting or self._readers <= self._keep):
                    # The one used last is lent first: it has the most in its caches.
                    self._idle.put_nowait(worker)
                else:
                    await self._dismiss(worker)

    def take(self, worker: Worker) -> None:
        """Make a shared worker that the caller has just now its own, to be closed by it."""
        self._taken.add(worker)

    async def _reader(self) -> Worker:
        while (worker := await self._idle_one()) is not None:
            if worker.alive:
                return worker
            await self._dismiss(worker)
        self._readers += 1
        try:
            return await self.own()
        except BaseException:
            self._readers -= 1
            raise

    async def _idle_one(self) -> Worker | None:
        """Return a shared worker, None where there is to be another one."""
        if not self._idle.empty():
            return self._idle.get_nowait()
        if self._readers < self._keep:
            return None
        self._waiting += 1
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await self._idle.get()
        except TimeoutError:
            return None
        finally:
            self._waiting -= 1

    async def _dismiss(self, worker: Worker) -> None:
        self._readers -= 1
        await worker.close()

    async def own(self) -> Worker:
        """Return a worker of the caller's own, to be closed by it: a spare one, or, in 5 ms, a new one.

        Raises:
            SandboxError: the machine has no room for another process.
        """
        worker = None
        while self._spares and worker is None:
            spare = self._spares.popleft()
            worker = spare if spare.alive else None
        if worker is None:
            worker = await self._fork()
        self.workers.add(worker)
        self.started += 1
        if self._restocking is None or self._restocking.done():
            self._restocking = asyncio.create_task(self._restock())
        return worker

    async def _restock(self) -> None:
        """Make the next spares, while nobody waits for them."""
        await asyncio.sleep(RESTOCK_S)
        with contextlib.suppress(SandboxError, WorkerLostError, WorkerStuckError):
            while len(self._spares) < SPARES:
                spare = await self._fork()
                self._spares.append(spare)
                # What a process touches for the first time after the fork takes the kernel a while.
                await spare.ask({"op": "warm"}, timeout_s=START_S)

    async def _fork(self) -> Worker:
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                told = (await self._ask_zygote({"op": "fork"}, theirs)).fields
        except BaseException:
            ours.close()
            raise
        if "error" in told:
            ours.close()
            raise SandboxError(f"a query worker cannot be started: {told['error']}")
        return Worker(int(told["pid"]), Channel(ours), self)

    async def end(self, worker: Worker) -> dict[str, Any]:
        """Kill a worker and return its `signal` or `code`; empty where the zygote is gone, and with it the worker."""
        self.workers.discard(worker)
        ending = asyncio.ensure_future(self._end(worker.pid))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)
        return await asyncio.shield(ending)

    async def _end(self, pid: int) -> dict[str, Any]:
        if self._zygote is None:
            return {}
        try:
            return (await self._zygote.request({"op": "end", "pid": pid})).fields
        except ChannelClosedError:
            return {}

    async def _ask_zygote(self, fields: dict[str, Any], end: socket.socket) -> Message:
        """Ask the zygote; one that somebody killed is started again, once."""
        async with self._mending:
            if self._zygote is None or self._zygote.lost is not None:
                await self._end_zygote()
                await self.open()
            zygote = self._zygote
            assert zygote is not None
        try:
            async with asyncio.timeout(START_S):
                return await zygote.request(fields, fds=[end.fileno()])
        except (ChannelClosedError, TimeoutError) as error:
            raise SandboxError(f"a query worker cannot be started: {error}") from error

    async def _end_zygote(self) -> None:
        while self._ending:
            await asyncio.wait(self._ending)
        zygote, self._zygote = self._zygote, None
        if zygote is not None:
            zygote.close()
        process, self._process = self._process, None
        if process is None:
            return
        try:
            async with asyncio.timeout(STOP_S):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
