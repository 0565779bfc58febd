"""Garbage collection on request: evicts, forgets and deletes what the background sweep would free later."""

import asyncio

from proxy.control.views.resources import Collected
from proxy.engine import Engine


async def collect_garbage(engine: Engine) -> Collected:
    """Evict snapshots over budget, close unused sandboxes, delete forgotten nodes and unused blobs."""
    before = engine.cache.used_bytes + engine.store.database.size_bytes()
    forgotten = await engine.forgetting.sweep()
    await engine.close_unused()
    evicted = await engine.evict_snapshots()
    engine.journal.fold()
    await engine.store.drafts.sweep()
    await engine.store.blobs.delete_unused()
    await asyncio.to_thread(engine.store.database.checkpoint)
    after = engine.cache.used_bytes + engine.store.database.size_bytes()
    return Collected(
        evicted=evicted, forgotten_nodes=forgotten, freed_bytes=max(0, before - after),
        snapshot_bytes=engine.cache.used_bytes, store_bytes=engine.store.database.size_bytes(),
    )  # fmt: skip
