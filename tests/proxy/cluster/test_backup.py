"""A backup of a cluster is written from the logs."""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, cast

import pytest

from proxy.cluster.backup import back_up
from proxy.cluster.lines import Deleted, encode
from proxy.cluster.postgres.connection import DatabaseError
from proxy.cluster.postgres.database import LogRow
from proxy.refusals import RefusalError
from proxy.storage.copies import TaskCopy, TreeCopy
from proxy.storage.store import Store
from sandboxes.spec import EnvironmentSpec

SPEC = EnvironmentSpec(share="on")


class Logs:
    """The logs of two tasks that have trees of the same environment, and of one that was deleted."""

    def __init__(self) -> None:
        self.lines: dict[str, list[Any]] = {
            name: [
                TaskCopy(name, None, 1.0),
                TreeCopy(number, owner, "key", SPEC.model_dump_json(), number, None, None, 1.0),
            ]
            for number, (name, owner) in enumerate(
                {"a": "//a", "b": "//b", "gone": "//gone", "c": "/mine-*/c"}.items(), 1
            )
        }
        self.lines["gone"].append(Deleted())
        self.fails = False

    async def tasks(self) -> list[str]:
        return list(self.lines)

    async def read(self, task: str) -> AsyncGenerator[list[LogRow]]:
        yield [LogRow(1, 1, None), LogRow(2, 1, encode(self.lines[task]))]
        if self.fails:
            raise DatabaseError("the database is away")


def test_each_task_has_its_own_tree(tmp_path: Path) -> None:
    """Without a cluster, tasks of one environment share a tree; these keep those that they have."""
    asyncio.run(back_up(cast("Any", Logs()), tmp_path / "backup"))
    assert [path.name for path in tmp_path.iterdir()] == ["backup"]
    store = Store(tmp_path / "backup", namespace=lambda task: "mine-*" if task == "c" else "")
    trees = {task: store.trees.id_of(task, "key", SPEC) for task, _ in store.tasks.all()}
    assert trees == {"a": 1, "b": 2, "c": 4}
    assert store.trees.id_of("new", "key", SPEC) == 1
    store.close()


def test_a_backup_that_fails_leaves_nothing(tmp_path: Path) -> None:
    """It must not keep the member from its next start."""
    logs = Logs()
    logs.fails = True
    with pytest.raises(RefusalError) as refused:
        asyncio.run(back_up(cast("Any", logs), tmp_path / "backup"))
    assert (refused.value.status, list(tmp_path.iterdir())) == (503, [])
