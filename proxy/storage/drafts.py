"""Trees that are being imported: written a piece at a time, and invisible until they are published.

The nodes and records of a draft carry the number of a tree that is not in `trees`, so no reader meets them. A row in
`meta` marks the draft; a draft whose row is still there at start belongs to an import that was killed, and is deleted.
"""

import time
from dataclasses import dataclass

from proxy.storage.blobs import DRAFT, note_unused_blobs
from proxy.storage.database import Execute, StoreDatabase
from proxy.storage.schema import is_whole
from proxy.storage.trees import TreeStore
from sandboxes.calls import ResourceUse
from sandboxes.spec import EnvironmentSpec


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
            self.drop(int(name.removeprefix(DRAFT)))

    def begin(self, nodes: int, records: int) -> Draft:
        """Reserve the numbers of a tree with so many nodes and records."""
        take = self._database.take_number
        draft = Draft(take("trees"), take("nodes", nodes), take("records", records))
        with self._database.transaction() as execute:
            execute("INSERT INTO meta VALUES (?, '')", (f"{DRAFT}{draft.tree}",))
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
        """Delete what was written of a draft."""
        with self._database.transaction() as execute:
            for table in ("records", "nodes"):
                execute(f"DELETE FROM {table} WHERE tree = ?", (tree,))
            note_unused_blobs(execute)
            execute("DELETE FROM meta WHERE name = ?", (f"{DRAFT}{tree}",))
