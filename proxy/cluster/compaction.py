"""Compacts the logs of the tasks that this member owns (rule 9 of `protocol`)."""

import asyncio
from collections.abc import Mapping
from contextlib import aclosing

import structlog

from proxy.cluster.lines import LogError
from proxy.cluster.owned import Owned
from proxy.cluster.postgres.connection import DatabaseError
from proxy.cluster.postgres.database import ClusterDatabase
from proxy.cluster.takeover import TaskLogReading, compaction_of

log = structlog.get_logger()

LOOK_S = 5.0
"""How often the lengths of the logs are looked at, in seconds."""
MIN_ROWS = 1000
"""Least rows of a log that is compacted. A takeover reads as many rows in 5 ms."""


async def compact_logs(database: ClusterDatabase, owned: Mapping[str, Owned]) -> None:
    """Compact each log that has grown by as many rows as its last compaction left lines, for ever.

    So a log that grows is read a constant number of times for each of its lines.
    """
    while True:
        await asyncio.sleep(LOOK_S)
        for task in tuple(owned.values()):
            if task.rows >= max(MIN_ROWS, task.lines):
                await compact_log(database, task)


async def compact_log(database: ClusterDatabase, task: Owned) -> None:
    """Compact the log of a task. Rows that are written meanwhile stay."""
    is_done, how = False, None
    try:
        how = compaction_of(await read_task(database, task.task))
        steps = () if how is None else how.steps()
        while (step := await asyncio.to_thread(next, iter(steps), None)) is not None:
            is_done = await database.compact(task.task, *step)
            if not is_done:
                break
    except (DatabaseError, LogError) as error:
        log.warning("a log was not compacted", task=task.task, error=str(error))
        is_done = False
    if how is not None and is_done:
        task.rows, task.lines = task.rows - len(how.gone) + how.left, how.lines
        log.info("compacted a log", task=task.task, rows=len(how.gone), lines=how.lines)
    else:
        # Not again before the log is twice as long.
        task.lines = 2 * task.rows


async def read_task(database: ClusterDatabase, task: str) -> TaskLogReading:
    """Return what the log of a task says. A page of the log is in memory beside it.

    Raises:
        DatabaseError: The database did not answer.
        LogError: A row is not what a member of this version writes.
    """
    reading = TaskLogReading()
    async with aclosing(database.read(task)) as pages:
        async for rows in pages:
            await asyncio.to_thread(reading.take_rows, rows)
    return reading
