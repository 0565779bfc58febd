"""A member uses a store only if it belongs to its cluster, and starts without one that fails for now."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from proxy.cluster.postgres.joining import ClusterError
from proxy.cluster.states.objects import ObjectStore, ObjectStoreError, open_store
from proxy.cluster.states.store_mark import admit_store, check_store

MARK = "forkpoint-cluster.json"


class Database:
    """The store that a cluster uses, as its database has it."""

    def __init__(self, cluster: str = "cluster", store: str | None = None) -> None:
        self.membership, self.store = SimpleNamespace(cluster=cluster), store

    async def use_store(self, store: str) -> bool:
        self.store = self.store or store
        return self.store == store

    async def has_store(self) -> bool:
        return self.store is not None


def check(store: ObjectStore, database: Database) -> str:
    return asyncio.run(check_store(store, cast("Any", database)))


def test_one_store_has_one_name(tmp_path: Path) -> None:
    """Of several members, one names the store; another cluster is refused, and so is a damaged name."""
    store, database = open_store(f"file://{tmp_path / 'store'}"), Database()

    async def together() -> list[str]:
        return await asyncio.gather(*(check_store(store, cast("Any", database)) for _ in range(8)))

    assert asyncio.run(together()) == [""] * 8
    with pytest.raises(ClusterError, match="belongs to another cluster"):
        check(store, Database("another"))
    assert [path.name for path in (tmp_path / "store").iterdir()] == [MARK]
    with pytest.raises(ClusterError, match="uses another --store"):
        check(open_store(str(tmp_path / "other")), database)
    (tmp_path / "store" / MARK).write_text("{}")
    with pytest.raises(ClusterError, match="cannot be read"):
        check(store, database)


def test_store_without_conditional_put_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two members could both name such a store. It stays as it was, so that it is refused again."""

    async def create(store: ObjectStore, name: str, data: bytes) -> bool:
        await store.put(name, data)
        return True

    monkeypatch.setattr(ObjectStore, "create", create)
    for _ in range(2):
        with pytest.raises(ClusterError, match="no conditional put"):
            check(open_store(str(tmp_path / "store")), Database())


def test_a_store_that_fails_is_used_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is used once it is known to be the cluster's own, and not at all if it belongs to another one."""
    database, store = Database(), open_store(str(tmp_path / "store"))

    async def fail(*_given: object, **_named: object) -> None:
        raise ObjectStoreError("no space left")

    monkeypatch.setattr(ObjectStore, "put", fail)
    monkeypatch.setattr(ObjectStore, "get", fail)
    with pytest.raises(ClusterError, match="no space left"):
        check(store, database)
    database.store = "known"
    assert check(store, database) == "no space left"
    monkeypatch.undo()

    async def go() -> None:
        other = open_store(str(tmp_path / "other"))
        await check_store(other, cast("Any", Database("another")))
        for own, is_own in ((store, True), (other, False)):
            database.store = None

            async def admit(own: ObjectStore = own) -> None:
                await admit_store(open_store(own.url), cast("Any", database))

            own.admit = admit
            if is_own:
                await own.put("state", b"bytes")
            else:
                with pytest.raises(ObjectStoreError, match="belongs to another cluster"):
                    await own.put("state", b"bytes")

    asyncio.run(go())
    assert sorted(path.name for path in (tmp_path / "store").iterdir()) == [MARK, "state"]
    assert [path.name for path in (tmp_path / "other").iterdir()] == [MARK]
