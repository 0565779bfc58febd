"""Trees that nobody can see: those that are being imported, until they are published, and what is left of deleted ones.

Both are written and deleted a piece at a time, because they may have 100,000s of rows. Their nodes and records carry
the number of a tree that is not in `trees`, so no reader meets them; the steps of deleted rollouts likewise. A row in
`meta` names each draft, and each of the *remains* until they are deleted. A draft whose row is still there at start
belongs to an import that was killed: it becomes remains.
"""

import asyncio
import json
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass

from proxy.storage.blobs import DRAFT, SLICE_S, note_unused_blobs
from proxy.storage.database import Execute, StoreDatabase
from proxy.storage.schema import is_whole
from proxy.storage.trees import TreeStore
from sandboxes.calls import ResourceUse
from sandboxes.spec import EnvironmentSpec

_REMAINS = "remains "
"""What the names of rows of `meta` begin with that name deleted trees and rollouts."""
_PARTS = (
    ("records", "id", "tree", "trees"),
    ("nodes", "id", "tree", "trees"),
    ("steps", "turn", "rollout", "rollouts"),
)
"""Tables with many rows of a task: their key, and the column and the table of what they belong to."""
_ROWS = 50
"""How many rows one statement deletes: 0.4 ms."""


def leave_remains(execute: Execute, *, trees: Iterable[int], rollouts: Iterable[int] = ()) -> None:
    """Let sweeps delete the rows of trees and rollouts that the same transaction has removed from their tables."""
    value = json.dumps({"trees": list(trees), "rollouts": list(rollouts)})
    execute("INSERT INTO meta VALUES (?, ?)", (f"{_REMAINS}{secrets.token_hex(8)}", value))


@dataclass(slots=True)
class Draft:
    """A tree that is being written."""

    tree: int
    first_node: int  # Number of its root; node k of the file gets number first_node + k.
    first_record: int
    records: int = 0  # How many were written so far.


class DraftStore:
    """Begins, publishes and drops drafts."""

    def __init__(self, database: StoreDatabase, trees: TreeStore) -> None:
        self._database, self._trees = database, trees
        # A damaged row could name a tree that is none of a draft.
        sql = f"SELECT name FROM meta WHERE name GLOB ? AND {is_whole('meta')}"
        for (name,) in database.rows(sql, (f"{DRAFT}*",)):
            tree, following = int(name.removeprefix(DRAFT)), database.take_number("trees")
            # Older stores did not keep a draft's number, which no other tree may get while rows carry it.
            database.take_number("trees", max(0, tree + 1 - following))
            self.drop(tree)

    async def sweep(self) -> None:
        """Delete what is left of deleted trees and rollouts, in slices between which other tasks run."""
        sql = f"SELECT name, value FROM meta WHERE name GLOB ? AND {is_whole('meta')}"
        for name, value in self._database.rows(sql, (f"{_REMAINS}*",)):
            numbers = json.loads(value)
            for table, key, owner, owners in _PARTS:
                for number in numbers[owners]:
                    await self._delete(table, key, owner, owners, number)
            with self._database.transaction() as execute:
                execute("DELETE FROM meta WHERE name = ?", (name,))
                note_unused_blobs(execute)

    async def _delete(self, table: str, key: str, owner: str, owners: str, number: int) -> None:
        # Rows are deleted only while their tree or rollout is not there.
        some = f"SELECT {key} FROM {table} WHERE {owner} = ?1 LIMIT {_ROWS}"
        sql = f"DELETE FROM {table} WHERE {owner} = ?1 AND {key} IN ({some}) "
        sql += f"AND NOT EXISTS (SELECT 1 FROM {owners} WHERE id = ?1)"
        more = True
        while more:
            with self._database.transaction() as execute:
                until = time.monotonic() + SLICE_S
                while (more := execute(sql, (number,)).rowcount == _ROWS) and time.monotonic() < until:
                    pass
            await asyncio.sleep(0)

    def begin(self, nodes: int, records: int) -> Draft:
        """Reserve the numbers of a tree with so many nodes and records."""
        take = self._database.take_number
        draft = Draft(take("trees"), take("nodes", nodes), take("records", records))
        with self._database.transaction() as execute:
            execute("INSERT INTO meta VALUES (?, '')", (f"{DRAFT}{draft.tree}",))
            self._database.keep_numbers(execute)
        return draft

    def add_node(
        self, execute: Execute, draft: Draft, node: int, exact: bytes | None, content: bytes | None, *, pinned: bool
    ) -> None:
        """Write a node by its number within the draft, with its digests."""
        values = (draft.first_node + node, draft.tree, exact, content, pinned)
        execute("INSERT INTO nodes VALUES (?, ?, ?, ?, '', ?)", values)

    def add_record(
        self,
        execute: Execute,
        draft: Draft,
        ends: tuple[int, int],
        key: bytes,
        blobs: tuple[int, int, int],
        *,
        effect: int,
        seconds: float,
        recorded_at: float,
        reproducible: bool,
        age_s: float | None,
        resources: ResourceUse,
    ) -> None:
        """Write the next record; the draft's count of records grows.

        `ends` are the numbers of source and target within the draft, `blobs` those of the call, the upload (0 for none)
        and the answer. `age_s` is for how long background processes had been running; None if that is not known.
        """
        source, target = (draft.first_node + node for node in ends)
        values = (
            draft.first_record + draft.records, draft.tree, source, key, target, *blobs, effect, seconds, recorded_at,
            False, reproducible, age_s, False, False, *resources,
        )  # fmt: skip
        execute(f"INSERT INTO records VALUES ({','.join('?' * len(values))})", values)
        draft.records += 1

    def publish(self, draft: Draft, task: str, root_key: str, spec: EnvironmentSpec, *, instead: int | None) -> None:
        """Make a complete draft a task's tree under this root key, in place of the empty tree `instead`, if any."""
        owner = self._trees.owner(task, spec)
        with self._database.transaction() as execute:
            if instead is not None:
                for table, column in (("trees", "id"), ("nodes", "tree"), ("shares", "tree")):
                    execute(f"DELETE FROM {table} WHERE {column} = ?", (instead,))
                execute(
                    "UPDATE rollouts SET tree = ?1, start = ?2, node = ?2 WHERE tree = ?3",
                    (draft.tree, draft.first_node, instead),
                )
            values = (draft.tree, owner, root_key, spec.model_dump_json(), draft.first_node, time.time())
            execute("INSERT INTO trees VALUES (?, ?, ?, ?, ?, ?)", values)
            execute("DELETE FROM meta WHERE name = ?", (f"{DRAFT}{draft.tree}",))

    def drop(self, tree: int) -> None:
        """Leave what was written of a draft to the next sweep."""
        with self._database.transaction() as execute:
            leave_remains(execute, trees=[tree])
            self._database.keep_numbers(execute)
            execute("DELETE FROM meta WHERE name = ?", (f"{DRAFT}{tree}",))
