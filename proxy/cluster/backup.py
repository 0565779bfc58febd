"""A backup of a cluster: a store with all tasks as their logs have them, which any member can write."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from proxy.cluster.compaction import read_task
from proxy.cluster.postgres.connection import DatabaseError
from proxy.cluster.postgres.database import ClusterDatabase
from proxy.cluster.takeover import TaskLogReading
from proxy.refusals import RefusalError
from proxy.storage import backup as store_backup
from proxy.storage.copies import Copy, TreeCopy
from proxy.storage.store import Store


async def back_up(database: ClusterDatabase, target: Path) -> None:
    """Write a store with each task as it was at one moment. Raises RefusalError (503), StoreError, LogError.

    Owners take no part: all that was answered is in the logs, whichever members live, and wherever tasks move.
    """
    # Only the thread that has opened a store may use it.
    thread, draft = ThreadPoolExecutor(1), target.with_name(f"{target.name}.store")
    run = partial(asyncio.get_running_loop().run_in_executor, thread)
    try:
        store = await run(Store, draft)
        try:
            for task in await database.tasks():
                await run(_write, store, task, await read_task(database, task))
            await run(store_backup.back_up, store.database, target)
        finally:
            await run(store.close)
    except DatabaseError as error:
        raise RefusalError(503, "database", f"{error}. Try again.") from error
    finally:
        thread.shutdown(wait=False)
        # A kill leaves them, as files of a folder that is emptied at the start.
        for file in target.parent.glob(f"{draft.name}*"):
            file.unlink()


def _write(store: Store, task: str, reading: TaskLogReading) -> None:
    store.copies.replace(task, map(partial(_outside, task), reading.copies()))


def _outside(task: str, copy: Copy) -> Copy:
    """Return a copy as a proxy without a cluster has it: the owner of a shared tree does not name the task there."""
    if not isinstance(copy, TreeCopy) or copy.owner == task:
        return copy
    owner = copy.owner.removesuffix(f"/{task}")
    return copy._replace(owner="" if owner == "/" else owner)
