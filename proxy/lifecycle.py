"""The life of an engine: what other rooms have it do when it opens, while it is open, and when it closes.

The end has stages. Each has a limit, because a service manager kills a proxy that does not stop, and its sandboxes'
states with it. What is cut off costs time and no answer: a call that is cut off is not recorded.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import structlog

from sandboxes.task_owner import TaskOwner, waiting

log = structlog.get_logger()

STAGE_S = 10.0
"""How long a stage of the end may take. Each takes milliseconds, unless a sandbox's processes are stuck in the kernel.

The value is that of `sandboxes.local.machine.END_S`. What service managers must allow follows from it
(`docs/deploying.md`).
"""
UNFINISHED = "unfinished"
"""Kind of failure under which stages are counted that were cut off."""


@dataclass(frozen=True, slots=True)
class BackgroundWork:
    """Work that the engine repeats while it is open, `every_s` after the end of a run; a failed one is logged."""

    name: str
    every_s: float
    work: Callable[[], Awaitable[None]]


@dataclass(slots=True)
class Lifecycle:
    """How far the engine has come, and what other rooms want done at its stages.

    Attributes:
        closing: Set when the engine begins to close. What would never end by itself waits for it.
        background: Repeated while the engine is open. Rooms append their work before `Engine.open`.
        at_open: Awaited when the engine has opened, before it answers calls.
        at_hang_up: Called when the server stops accepting requests; each ends streams that would never end.
        at_drop: Called with the name of a task before it goes from memory because another proxy may change it.
        before_close: Awaited first when the engine closes; each ends what a protocol has in flight.
        start_error: Why the engine could not open, if the reason was foreseen; empty otherwise.
    """

    ready: bool = False
    closing: asyncio.Event = field(default_factory=asyncio.Event)
    background: list[BackgroundWork] = field(default_factory=list)
    at_open: list[Callable[[], Awaitable[None]]] = field(default_factory=list)
    at_hang_up: list[Callable[[], None]] = field(default_factory=list)
    at_drop: list[Callable[[str], None]] = field(default_factory=list)
    before_close: list[Callable[[], Coroutine[Any, Any, None]]] = field(default_factory=list)
    start_error: str = ""
    _running: TaskOwner = field(default_factory=TaskOwner)

    def start(self, failed: Callable[[str, Exception], None]) -> None:
        """Start the background work; `failed` is called with its name and the error of a run."""
        for work in self.background:
            self._running.spawn(work.name, _repeat(work, failed))

    def hang_up(self) -> None:
        """End what would never end by itself: event streams and terminals. Idempotent."""
        self.closing.set()
        for end in self.at_hang_up:
            end()

    async def stop(self) -> None:
        """End the background work."""
        await self._running.end()


class EngineEnd:
    """The stages of the end of an engine. None of them can keep the next one from its work."""

    def __init__(self, failed: Callable[[str], None]) -> None:
        """Begin the end; `failed` is called with the kind of failure of a stage that was cut off."""
        self.errors: list[BaseException] = []
        self._failed = failed
        self._stages = TaskOwner()

    async def stage(self, name: str, work: Coroutine[Any, Any, object], *, within_s: float = STAGE_S) -> None:
        """Carry out a stage. After its time it is cancelled, and the log says what the proxy still waited for."""
        running = self._stages.spawn(name, work, awaited=True)
        try:
            # Not `asyncio.timeout`: work that does not end when it is cancelled is not waited for.
            await asyncio.wait([running], timeout=within_s)
            if not running.done():
                self._failed(UNFINISHED)
                log.error("the proxy stops without waiting any longer", stage=name, waits_for=waiting())
            elif not running.cancelled() and (error := running.exception()) is not None:
                self.errors.append(error)
                log.error("a part of the proxy failed while it stopped", stage=name, exc_info=error)
        finally:
            running.cancel()


async def _repeat(background: BackgroundWork, failed: Callable[[str, Exception], None]) -> None:
    while True:
        await asyncio.sleep(background.every_s)
        try:
            await background.work()
        except Exception as error:  # noqa: BLE001 - a background task ends here; the next round may do better
            failed(background.name, error)
