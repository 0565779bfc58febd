"""The mark of a store, which says which cluster it belongs to. Each member looks at it before it uses the store."""

import uuid

import orjson

from proxy.cluster.postgres.connection import DatabaseError
from proxy.cluster.postgres.database import ClusterDatabase
from proxy.cluster.postgres.joining import ClusterError
from proxy.cluster.states.objects import MissingObjectError, ObjectSizeError, ObjectStore, ObjectStoreError

_MARK = "forkpoint-cluster.json"


async def check_store(store: ObjectStore, database: ClusterDatabase) -> str:
    """Check a store at the start of a member; return why it cannot be used now, or an empty text.

    Raises ClusterError if the store belongs to another cluster, or if the cluster has never used one: then it is more
    likely a mistake in the settings than a failure. Raises DatabaseError.
    """
    probe = f"forkpoint-probe-{uuid.uuid4().hex}"
    try:
        await claim_store(store, database)
        await store.put(probe, b"probe")
        await store.delete([probe])
    except ObjectStoreError as error:
        if not await database.has_store():
            raise ClusterError(f"--store {store.url} cannot be used: {error}. Use one that can be written.") from error
        return str(error)
    return ""


async def admit_store(store: ObjectStore, database: ClusterDatabase) -> None:
    """Check the mark of a store that failed at the start. Raises ObjectStoreError: it may not be used, or not yet."""
    try:
        await claim_store(store, database)
    except (ClusterError, DatabaseError) as error:
        raise ObjectStoreError(str(error)) from error


async def claim_store(store: ObjectStore, database: ClusterDatabase) -> None:
    """Let the cluster use a store, which the first member marks. Raises ClusterError, or what the two raise."""
    cluster = database.membership.cluster
    try:
        value = orjson.loads(await _mark(store, cluster))
        owner, name = str(value["cluster"]), str(value["store"])
    except (MissingObjectError, ObjectSizeError, ValueError, KeyError, TypeError) as error:
        raise ClusterError(f"{_MARK} in {store.url} cannot be read: {error}. Use another --store.") from error
    if owner != cluster:
        raise ClusterError(
            f"--store {store.url} belongs to another cluster. Use another --store, or that cluster's database."
        )
    if not await database.use_store(name):
        raise ClusterError(
            f"the cluster of this database uses another --store than {store.url}. Use the same one on all members, or "
            "another database for another cluster."
        )


async def _mark(store: ObjectStore, cluster: str) -> bytes:
    try:
        return await store.get(_MARK, most_bytes=1000)
    except MissingObjectError:
        mark = orjson.dumps({"cluster": cluster, "store": uuid.uuid4().hex})
    if await store.create(_MARK, mark) and await store.create(_MARK, mark):
        await store.delete([_MARK])
        raise ClusterError(
            f"--store {store.url} has no conditional put: two members can create the same object. Use another store."
        )
    # Another member may have been faster.
    return await store.get(_MARK, most_bytes=1000)
