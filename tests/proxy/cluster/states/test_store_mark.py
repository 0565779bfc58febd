"""What is wrong with a store is said in one sentence when a member starts."""

import asyncio
from pathlib import Path

import pytest

from proxy.cluster.postgres.joining import ClusterError
from proxy.cluster.states.objects import ObjectStore
from proxy.cluster.states.store_mark import name_of_store, shared_store


def test_one_store_has_one_name(tmp_path: Path) -> None:
    """Of several members, one names the store; another cluster is refused, and so is a damaged name."""

    async def go() -> None:
        store = await shared_store(f"file://{tmp_path / 'store'}")
        names = await asyncio.gather(*(name_of_store(store, "cluster") for _ in range(8)))
        assert len(set(names)) == 1
        with pytest.raises(ClusterError, match="belongs to another cluster"):
            await name_of_store(store, "another")
        assert [path.name for path in (tmp_path / "store").iterdir()] == ["forkpoint-cluster.json"]
        (tmp_path / "store" / "forkpoint-cluster.json").write_text("{}")
        with pytest.raises(ClusterError, match="cannot be read"):
            await name_of_store(store, "cluster")

    asyncio.run(go())


def test_store_without_conditional_put_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two members could both name such a store."""

    async def create(_store: ObjectStore, _name: str, _data: bytes) -> bool:
        return True

    monkeypatch.setattr(ObjectStore, "create", create)
    with pytest.raises(ClusterError, match="no conditional put"):
        asyncio.run(shared_store(str(tmp_path / "store")))
