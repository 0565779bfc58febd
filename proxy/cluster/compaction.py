"""Compacts the logs of the tasks that this member owns (rule 7 of `protocol`)."""

import asyncio
from collections.abc import Mapping
from contextlib import aclosing

import structlog

from proxy.cluster.lines import LogError
from proxy.cluster.owned import Owned
from proxy.cluster.postgres.connection import DatabaseError
from proxy.cluster.postgres.database import ClusterDatabase
from proxy.cluster.takeover import TaskLogReading, compaction_of
from proxy.telemetry.counters import Counters

log = structlog.get_logger()

LOOK_S = 5.0
"""How often the lengths of the logs are looked at, in seconds."""
MIN_ROWS = 1000
"""Least rows of a log that is compacted. A takeover reads as many rows in 5 ms."""


async def compact_logs(database: ClusterDatabase, owned: Mapping[str, Owned], counts: Counters) -> None:
    """Compact each log that has grown by as many rows as its last compaction left lines, until the database fails.

    So a log that grows is read a constant number of times for each of its lines. Each step of a compaction replaces
    rows by one row that says the same, if the rows are still as they were read. So one that broke off half-way is
    simply planned anew from what the log says then.
    """
    for task in tuple(owned.values()):
        if task.rows < max(MIN_ROWS, task.lines):
            continue
        try:
            await compact_log(database, task)
        except DatabaseError as error:
            counts.failure("compaction")
            log.warning("a log was not compacted: it is tried again", task=task.task, error=str(error))
            return


async def compact_log(database: ClusterDatabase, task: Owned) -> None:
    """Compact the log of a task. Rows that are written meanwhile stay. Raises DatabaseError."""
    is_done, rows = False, task.rows
    try:
        reading = await read_task(database, task.task)
        how = compaction_of(reading)
        # An attempt that broke off may have left fewer rows than were counted.
        task.rows += reading.rows - rows
    except LogError as error:
        log.warning("a log was not compacted", task=task.task, error=str(error))
        how = None
    steps = () if how is None else how.steps()
    while (step := await asyncio.to_thread(next, iter(steps), None)) is not None:
        is_done = await database.compact(task.task, *step)
        if not is_done:
            break
    if how is not None and is_done:
        task.rows, task.lines = task.rows - len(how.gone) + how.left, how.lines
        log.info("compacted a log", task=task.task, rows=len(how.gone), lines=how.lines)
    else:
        # Not again before the log is twice as long.
        task.lines = 2 * task.rows


async def read_task(database: ClusterDatabase, task: str) -> TaskLogReading:
    """Return what the log of a task says. A page of the log is in memory beside it. Raises DatabaseError."""
    reading = TaskLogReading()
    async with aclosing(database.read(task)) as pages:
        async for rows in pages:
            await asyncio.to_thread(reading.take_rows, rows)
    return reading
