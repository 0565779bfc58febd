"""Compacts the logs of the tasks that this member owns (rule 9 of `protocol`)."""

import asyncio
from collections.abc import Mapping

import structlog

from proxy.cluster.lines import LogError
from proxy.cluster.owned import Owned
from proxy.cluster.postgres.connection import DatabaseError
from proxy.cluster.postgres.database import ClusterDatabase
from proxy.cluster.takeover import compact

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
    try:
        rows = await database.read(task.task)
        how = await asyncio.to_thread(compact, rows)
        is_done = how is not None and await database.compact(task.task, how.gone, how.rows)
    except (DatabaseError, LogError) as error:
        log.warning("a log was not compacted", task=task.task, error=str(error))
        how, is_done = None, False
    if how is not None and is_done:
        task.rows, task.lines = task.rows - len(how.gone) + len(how.rows), how.lines
        log.info("compacted a log", task=task.task, rows=len(how.gone), lines=how.lines)
    else:
        # Not again before the log is twice as long.
        task.lines = 2 * task.rows
