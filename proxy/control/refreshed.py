"""Values that are expensive to read: shared by concurrent readers, and reused for a while."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

from sandboxes.task_owner import TaskOwner

T = TypeVar("T")
_SHARE = 20
"""A value is reused for this many times as long as reading it took: a page that polls takes at most 5 % of a core."""


class Refreshed(Generic[T]):
    """A value that is read again once it is too old; concurrent callers share one read, and its error."""

    def __init__(self, read: Callable[[], Coroutine[Any, Any, T]], *, min_age_s: float) -> None:
        self._read, self._min_age_s = read, min_age_s
        self._tasks = TaskOwner()
        self._reading: asyncio.Task[T] | None = None
        self.expires_at = 0.0  # On the monotonic clock.

    @property
    def expired(self) -> bool:
        """Whether the next `get` reads the value."""
        return self._reading is None or (self._reading.done() and time.monotonic() >= self.expires_at)

    async def get(self) -> T:
        """Return the value, which is read if it has expired."""
        if self.expired:
            self._reading = self._tasks.spawn("refresh", self._refresh(), awaited=True)
        assert self._reading is not None
        return await asyncio.shield(self._reading)

    async def _refresh(self) -> T:
        began = time.monotonic()
        value = await self._read()
        ended = time.monotonic()
        self.expires_at = ended + max(self._min_age_s, _SHARE * (ended - began))
        return value


class SharedReads(Generic[T]):
    """Reads that take long, by key. Callers share one that begins after they came, so that a key has two at most."""

    def __init__(self) -> None:
        self._tasks = TaskOwner()
        self._running: dict[Hashable, asyncio.Task[T]] = {}
        self._next: dict[Hashable, asyncio.Task[T]] = {}

    async def get(self, key: Hashable, read: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return what a read under this key returns that has not begun yet, or its error."""
        if key not in self._next:
            self._next[key] = self._tasks.spawn("read", self._read(key, read), awaited=True)
        return await asyncio.shield(self._next[key])

    async def _read(self, key: Hashable, read: Callable[[], Coroutine[Any, Any, T]]) -> T:
        if key in self._running:
            await asyncio.wait({self._running[key]})
        self._running[key] = self._next.pop(key)
        try:
            return await read()
        finally:
            del self._running[key]
