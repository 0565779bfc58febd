"""What all sandboxes of one driver share: the launcher, control groups, layers, and a stock of spare sandboxes."""

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import sys
from collections import deque
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sandboxes import IMPORT_ROOT
from sandboxes.checkpointing import Checkpointer
from sandboxes.errors import SandboxError
from sandboxes.ipc.channel import Channel, ChannelClosedError
from sandboxes.ipc.frames import Message
from sandboxes.linux.cgroups import Cgroups
from sandboxes.local.layers import Layers

START_S = 30.0
STOP_S = 10.0
SPARES = 2
"""Sandboxes made before anybody asks: joining a control group waits up to 15 ms for the kernel. 3 MB each."""


@dataclass(frozen=True, slots=True)
class Spare:
    """A sandbox in the making, with its namespaces and control groups but without a root."""

    id: str
    channel: Channel
    process: int


class Machine:
    """Open for as long as its driver is. host_view: where the launcher, and nobody else, sees the host's root."""

    def __init__(self, data_dir: Path, host_view: Path, checkpointer: Checkpointer) -> None:
        self.data_dir = data_dir
        self.host_view = host_view
        self.layers = Layers(data_dir)
        self.cgroups = Cgroups(f"forkpoint-{secrets.token_hex(6)}")
        self.checkpointer = checkpointer
        # By definition of an MCP server: the tools that it says change nothing.
        self.read_only: dict[str, frozenset[str]] = {}
        self._launcher: Channel | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._spares: deque[Spare] = deque()
        self._mending = asyncio.Lock()
        self._restocking: asyncio.Task[None] | None = None
        self._background: set[asyncio.Task[None]] = set()
        self._held: list[tuple[str, ...]] = []

    async def open(self) -> None:
        """Start the launcher, and the first spares.

        Raises:
            SandboxError: this machine cannot run sandboxes.
        """
        await self._start_launcher()
        await self._fill_stock()

    async def _start_launcher(self) -> None:
        ours, theirs = socket.socketpair()
        program = f"import sys; sys.path.insert(0, {IMPORT_ROOT!r}); from sandboxes.local.launcher import main; main()"
        try:
            # -I -S: nothing from the user's site and environment; -B: nothing is written next to the sources.
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", "-B", "-c", program, str(theirs.fileno()), str(self.host_view),
                pass_fds=[theirs.fileno()], env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}, cwd="/",
                stdin=asyncio.subprocess.DEVNULL,
            )  # fmt: skip
        finally:
            theirs.close()
        self._launcher = Channel(ours)
        try:
            async with asyncio.timeout(START_S):
                ready = await self._launcher.receive()
        except (ChannelClosedError, TimeoutError) as error:
            raise SandboxError(f"sandboxes cannot be started here: {error}. `forkpoint doctor` says why.") from error
        if "error" in ready.fields:
            raise SandboxError(f"sandboxes cannot be started here: {ready.fields['error']}. Run `forkpoint doctor`.")

    async def close(self) -> None:
        """End the launcher and the spares, and wait for all that still runs. Idempotent."""
        launcher, self._launcher = self._launcher, None
        if launcher is not None:
            launcher.close()
        await asyncio.gather(*(self._throw_away(spare) for spare in self._spares))
        self._spares.clear()
        if self._process is not None:
            try:
                async with asyncio.timeout(STOP_S):
                    await self._process.wait()
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()
            self._process = None
        await self.idle()
        await asyncio.to_thread(self.cgroups.close)

    async def idle(self) -> None:
        """Wait until nothing runs in the background."""
        while self._background:
            await asyncio.wait(self._background)

    def later(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine that nobody waits for, until close does."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    @contextlib.contextmanager
    def holding(self, layers: tuple[str, ...]) -> Iterator[None]:
        """Keep layers from being collected while no sandbox stands for them yet."""
        self._held.append(layers)
        try:
            yield
        finally:
            self._held.remove(layers)

    @property
    def held(self) -> set[str]:
        return {layer for layers in self._held for layer in layers}

    @property
    def fallen(self) -> bool:
        """Whether the launcher is gone, and with it all that it started; the next sandbox starts another."""
        return self._launcher is not None and self._launcher.lost is not None

    async def spare(self) -> Spare:
        """Return a sandbox without a spec: one in stock, or a new one."""
        while self._spares:
            spare = self._spares.popleft()
            if spare.channel.lost is None:
                return spare
            self.later(self._throw_away(spare))
        return await self._new_spare()

    async def _new_spare(self) -> Spare:
        async with self._mending:
            if self.fallen and self._process is not None:
                # It took its sandboxes with it; those to come need not suffer for it.
                await self._process.wait()
                await self._start_launcher()
        name = secrets.token_hex(6)
        ours, theirs = socket.socketpair()
        channel = Channel(ours)
        try:
            forked = await self.ask({"op": "fork", "cgroups": self.cgroups.create(name)}, [theirs.fileno()])
        except BaseException:
            channel.close()
            raise
        finally:
            theirs.close()
        spare = Spare(name, channel, forked.fds[0])
        try:
            ready = await channel.receive()
        except BaseException:
            self.later(self._throw_away(spare))
            raise
        if "error" in ready.fields:
            self.later(self._throw_away(spare))
            raise SandboxError(f"a sandbox could not be set up: {ready.fields['error']}. `forkpoint doctor` says more.")
        return spare

    def restock(self) -> None:
        """Have new spares made, while nobody waits."""
        if self._restocking is None or self._restocking.done():
            self._restocking = self.later(self._fill_stock())

    async def _fill_stock(self) -> None:
        with contextlib.suppress(SandboxError, ChannelClosedError, OSError):
            while len(self._spares) < SPARES and self._launcher is not None:
                self._spares.append(await self._new_spare())

    async def _throw_away(self, spare: Spare) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(spare.process, signal.SIGKILL)
        spare.channel.close()
        await ended(spare.process)
        os.close(spare.process)
        await self.forget_group(spare.id)

    async def forget_group(self, name: str) -> None:
        """Remove a dead sandbox's control groups, as soon as the kernel lets go of them."""
        for _ in range(200):
            if self.cgroups.remove(name):
                return
            await asyncio.sleep(0.005)

    async def ask(self, fields: dict[str, Any], fds: list[int]) -> Message:
        """Send the launcher a request.

        Raises:
            SandboxError: it is gone, or the kernel refused.
        """
        if self._launcher is None:
            raise SandboxError("the driver is not open")
        try:
            async with asyncio.timeout(START_S):
                answer = await self._launcher.request(fields, fds=fds)
        except TimeoutError as error:
            raise SandboxError(f"the launcher of all sandboxes gave no answer within {START_S:.0f} s") from error
        except ChannelClosedError as error:
            raise SandboxError(
                f"the launcher of all sandboxes ended: {error}. Ask again: it is started anew."
            ) from error
        if "error" in answer.fields:
            raise SandboxError(f"the kernel refused: {answer.fields['error']}")
        return answer


async def ended(process: int) -> None:
    """Wait until the process behind a descriptor, and with it its whole pid namespace, has ended."""
    loop = asyncio.get_running_loop()
    over = asyncio.Event()
    loop.add_reader(process, over.set)
    try:
        async with asyncio.timeout(10):
            await over.wait()
    except TimeoutError:
        # Stuck in the kernel; the next open() sweeps its group.
        return
    finally:
        loop.remove_reader(process)
