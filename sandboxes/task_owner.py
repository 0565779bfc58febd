"""Background tasks: the only module that calls `asyncio.create_task` and `asyncio.ensure_future`.

asyncio keeps only weak references to tasks, and an exception in a task that is not awaited is lost until the garbage
collector finds it. A `TaskOwner` holds its tasks, logs their failures, and waits for them when its own owner closes.
"""

import asyncio
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

import structlog

log = structlog.get_logger()
T = TypeVar("T")


def start(coroutine: Coroutine[Any, Any, T], *, name: str | None = None) -> asyncio.Task[T]:
    """Start a task that its caller awaits or cancels in the same function, and must keep: asyncio does not."""
    return asyncio.create_task(coroutine, name=name)


def waiting() -> list[str]:
    """Return the name of each other task of the running event loop, and the lines at which it waits."""
    return [
        f"{task.get_name()}: {waits_at(task)}" for task in asyncio.all_tasks() if task is not asyncio.current_task()
    ]


def waits_at(task: asyncio.Task[Any]) -> str:
    """Return the lines at which the coroutines of a task wait, the outermost first, up to an asynchronous generator."""
    # `Task.get_stack` has the outermost coroutine only.
    coroutine: Any = task.get_coro()
    lines = []
    while (frame := getattr(coroutine, "cr_frame", None)) is not None:
        lines.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        coroutine = coroutine.cr_await
    return " > ".join(lines)


class TaskOwner:
    """Owns the background tasks of one object, from `spawn` until they end."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def __iter__(self) -> Iterator[asyncio.Task[Any]]:
        return iter(tuple(self._tasks))

    def spawn(self, name: str, coroutine: Coroutine[Any, Any, T], *, awaited: bool = False) -> asyncio.Task[T]:
        """Run a coroutine in the background, under a name for log lines; the owner holds the task until it ends."""
        # An awaited task has a caller that handles its exception, so a failure is not logged here.
        task = asyncio.create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._forget if awaited else self._report)
        return task

    def cancel(self) -> None:
        """Cancel every task that runs now; see `end`."""
        for task in tuple(self._tasks):
            task.cancel()

    async def wait(self) -> None:
        """Return when no task runs any more, tasks that were spawned meanwhile included."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def end(self) -> None:
        """Cancel every task, tasks that are spawned meanwhile included, and return when none runs any more."""
        cancelled: set[asyncio.Task[Any]] = set()
        while self._tasks:
            for task in self._tasks - cancelled:
                task.cancel()
            cancelled |= self._tasks
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            # Mark the exception as retrieved: the awaiting caller may have gone away.
            task.exception()

    def _report(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("background task failed", task=task.get_name(), error=str(error), exc_info=error)
