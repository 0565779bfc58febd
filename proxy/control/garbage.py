"""Frees on request what the background sweep would free later: snapshots over budget, forgotten nodes, unused blobs."""

import asyncio

from proxy.control.views.resources import Collected
from proxy.engine import Engine


async def collect_garbage(engine: Engine) -> Collected:
    """Free what nothing needs and return what was freed."""
    before = engine.cache.used_bytes + engine.store.database.size_bytes()
    swept = await engine.forgetting.sweep()
    await engine.pool.close_unused(engine.settings.sandbox_idle_s)
    evicted = await engine.evict_snapshots()
    engine.journal.fold()
    engine.store.blobs.delete_unused()
    await asyncio.to_thread(engine.store.database.checkpoint)
    after = engine.cache.used_bytes + engine.store.database.size_bytes()
    return Collected(
        evicted=evicted, forgotten_nodes=swept, freed_bytes=max(0, before - after),
        snapshot_bytes=engine.cache.used_bytes, store_bytes=engine.store.database.size_bytes(),
    )  # fmt: skip
