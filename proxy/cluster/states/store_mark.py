"""The check of a store at the start of a member, and the mark that says which cluster it belongs to."""

import uuid

import orjson

from proxy.cluster.postgres.joining import ClusterError
from proxy.cluster.states.objects import MissingObjectError, ObjectSizeError, ObjectStore, ObjectStoreError, open_store

_MARK = "forkpoint-cluster.json"


async def shared_store(address: str) -> ObjectStore:
    """Return the store that all members share. Raises ClusterError."""
    probe = f"forkpoint-probe-{uuid.uuid4().hex}"
    try:
        store = open_store(address)
        created = [await store.create(probe, b"probe"), await store.create(probe, b"probe")]
        await store.delete([probe])
    except (ValueError, ObjectStoreError) as error:
        raise ClusterError(f"--store {address!r} cannot be used: {error}. Use one that can be written.") from error
    if created != [True, False]:
        raise ClusterError(
            f"--store {address!r} has no conditional put: two members can create the same object. Use another store."
        )
    return store


async def name_of_store(store: ObjectStore, cluster: str) -> str:
    """Return the random name of a store, which belongs to one cluster. Raises ClusterError."""
    try:
        await store.create(_MARK, orjson.dumps({"cluster": cluster, "store": uuid.uuid4().hex}))
        value = orjson.loads(await store.get(_MARK, most_bytes=1000))
        owner, name = str(value["cluster"]), str(value["store"])
    except ObjectStoreError as error:
        raise ClusterError(f"--store {store.url} cannot be used: {error}. Use one that can be written.") from error
    except (MissingObjectError, ObjectSizeError, ValueError, KeyError, TypeError) as error:
        raise ClusterError(f"{_MARK} in {store.url} cannot be read: {error}. Use another --store.") from error
    if owner != cluster:
        raise ClusterError(
            f"--store {store.url} belongs to another cluster. Use another --store, or that cluster's database."
        )
    return name
