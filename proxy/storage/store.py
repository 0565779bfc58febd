"""The durable store: tasks, trees, rollouts and answers in one SQLite file (WAL), written from one thread.

With `schema`, the one door to sqlite-utils. It serves the views; what lies on the way to an answer uses its
connection directly (a transaction of two rows: 0.1 ms, against 0.2 ms through the library).
"""

import sqlite3
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, TypeVar

import orjson
import sqlite_utils

from proxy.storage.errors import StoreError
from proxy.storage.journal import JournalEntry
from proxy.storage.schema import ForeignDatabaseError, check_ours, make_tables
from proxy.transfer.format import Part
from proxy.transfer.schema import BundleLine, NodeLine
from proxy.tree.keys import CallKey, canonical_json
from proxy.tree.tree import Node, Record, Tree
from sandboxes.calls import ToolCall, ToolResult, content_type
from sandboxes.effects import Effect, StateDigest
from sandboxes.spec import EnvironmentSpec

T = TypeVar("T")
_COMPRESS_FROM = 1024
_TREES_OF = "SELECT id FROM trees WHERE task = {} UNION SELECT tree FROM shares WHERE task = {}"
OF_TASK = "(t.task = :task OR (t.task = :common AND t.id IN (SELECT tree FROM shares WHERE task = :task)))"
"""Whether a row t of `trees` is seen through a task; common: see `Store.common`."""
_DRAFT = "draft "
_NUMBERED = ("trees", "nodes", "records", "rollouts", "blobs")


@dataclass(slots=True)
class Draft:
    """A tree that is being written. node, record: the first ids of those that are its; written: records so far."""

    tree: int
    node: int
    record: int
    written: int = 0


class Store:
    """One SQLite file. All methods are synchronous and short; large folds are the caller's to slice."""

    def __init__(self, path: Path, *, sync: Literal["NORMAL", "FULL"] = "NORMAL") -> None:
        """Open or make the file. With FULL, each commit waits for the disk.

        Raises:
            StoreError: the file is of another version, somebody else's, or no database. It is left as it was.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self.namespace: Callable[[str], str] = lambda _task: ""
        self._connection = sqlite3.connect(path, isolation_level=None)
        self.database = sqlite_utils.Database(self._connection)
        try:
            check_ours(self.database)
            self._connection.execute("PRAGMA journal_mode=WAL")
            self._connection.execute(f"PRAGMA synchronous={sync}")
            # A checkpoint waits for the disk; `checkpoint` does it beside the event loop, not a commit on it.
            self._connection.execute("PRAGMA wal_autocheckpoint=0")
            make_tables(self.database)
            self._next = {name: self._last_id(name) + 1 for name in _NUMBERED}
            self._sweep_drafts()
        except (ForeignDatabaseError, sqlite3.DatabaseError) as error:
            self._connection.close()
            raise StoreError(f"{path} cannot be used as Forkpoint's store: {error}. Move it away or fix it.") from error

    def close(self) -> None:
        self._connection.close()

    def checkpoint(self) -> None:
        """Bring the write-ahead log into the file. Blocking, for a thread: it has a connection of its own."""
        with closing(sqlite3.connect(self._path)) as connection:
            connection.execute("PRAGMA wal_checkpoint(PASSIVE)")

    def apart(self, ask: Callable[[sqlite3.Connection], T]) -> T:
        """Ask on a connection of its own that can only read. Blocking, for a thread: for what looks at many rows."""
        with closing(sqlite3.connect(self._path)) as connection:
            connection.execute("PRAGMA query_only=1")
            return ask(connection)

    def open_apart(self) -> sqlite3.Connection:
        """Return a connection of its own that can only read, for any thread; the caller closes it."""
        connection = sqlite3.connect(self._path, check_same_thread=False, isolation_level=None)
        connection.execute("PRAGMA query_only=1")
        return connection

    def size_bytes(self) -> int:
        """Return the bytes of the file and of its log."""
        files = (self._path, self._path.with_name(self._path.name + "-wal"))
        return sum(file.stat().st_size for file in files if file.exists())

    def check_writable(self) -> None:
        """Write something small.

        Raises:
            StoreError: nothing can be written.
        """
        with self._transaction() as execute:
            execute("INSERT OR REPLACE INTO meta VALUES ('checked', ?)", (str(time.time()),))

    # Tasks and trees

    def put_task(self, name: str, spec: str | None) -> None:
        """Write a task; spec is its JSON, None for the default."""
        with self._transaction() as execute:
            execute(
                "INSERT INTO tasks (name, spec, created_at) VALUES (?, ?, ?) "
                "ON CONFLICT (name) DO UPDATE SET spec = excluded.spec",
                (name, spec, time.time()),
            )

    def tasks(self, name: str | None = None, *, offset: int = 0, limit: int = -1) -> list[dict[str, Any]]:
        """Return the tasks by name, or the one of that name, with how many rollouts and nodes each has."""
        counts = (
            "(SELECT COUNT(*) FROM rollouts r WHERE r.task = t.name) AS rollouts, "
            f"(SELECT COUNT(*) FROM nodes n WHERE n.tree IN ({_TREES_OF.format('t.name', 't.name')})) AS nodes"
        )
        where = "WHERE t.name = :name" if name is not None else ""
        sql = f"SELECT t.*, {counts} FROM tasks t {where} ORDER BY t.name LIMIT :limit OFFSET :offset"
        return list(self.database.query(sql, {"name": name, "limit": limit, "offset": offset}))

    def delete_task(self, name: str) -> None:
        """Delete a task with its trees, rollouts, steps and the answers that nothing else needs.

        A tree that it shares with other tasks stays.
        """
        doomed = self.sole_tree_ids(name)
        trees = ",".join(map(str, doomed))
        with self._transaction() as execute:
            execute("DELETE FROM steps WHERE rollout IN (SELECT id FROM rollouts WHERE task = ?)", (name,))
            execute("DELETE FROM notes WHERE rollout IN (SELECT id FROM rollouts WHERE task = ?)", (name,))
            execute("DELETE FROM rollouts WHERE task = ?", (name,))
            execute(f"DELETE FROM records WHERE tree IN ({trees})")
            execute(f"DELETE FROM nodes WHERE tree IN ({trees})")
            execute(f"DELETE FROM trees WHERE id IN ({trees})")
            execute(f"DELETE FROM findings WHERE tree IN ({trees})")
            execute(f"DELETE FROM audits WHERE tree IN ({trees})")
            execute("DELETE FROM masks WHERE task = ?", (name,))
            execute("DELETE FROM shares WHERE task = ?", (name,))
            execute("DELETE FROM tasks WHERE name = ?", (name,))
            self._delete_unused_blobs(execute)
            self._keep_numbers(execute)

    def tree(self, task: str, root_key: str, spec: EnvironmentSpec) -> Tree:
        """Return the tree of task under this root key, with all that is recorded of it; make it where there is none.

        Where spec is shared, it is the tree of all tasks with this root key. Cost: 2 to 3 ms for 1,000 nodes.
        """
        known = self.tree_id(task, root_key, spec)
        if known is not None:
            return self.tree_of(known)
        tree_id, root = self._take_id("trees"), Node(self._take_id("nodes"))
        values = (tree_id, self._owner(task, spec), root_key, spec.model_dump_json(), root.id, time.time())
        with self._transaction() as execute:
            execute("INSERT INTO trees VALUES (?, ?, ?, ?, ?, ?)", values)
            self._insert_node(execute, tree_id, root)
        return Tree(tree_id, root, spec, root_key)

    def tree_of(self, tree_id: int) -> Tree:
        """Return a tree by its id."""
        row = self._one("SELECT root, spec, root_key FROM trees WHERE id = ?", (tree_id,))
        assert row is not None
        spec = EnvironmentSpec.model_validate_json(row[1])
        return self._load(Tree(tree_id, self._load_node(row[0]), spec, row[2]))

    def tree_id(self, task: str, root_key: str, spec: EnvironmentSpec) -> int | None:
        """Return the id of the tree that `tree` would return; None where it would make one."""
        values = (self._owner(task, spec), root_key)
        row = self._one("SELECT id FROM trees WHERE task = ? AND root_key = ?", values)
        return None if row is None else int(row[0])

    # Trees from elsewhere: written a piece at a time, and there once they are published

    def draft(self, nodes: int, records: int) -> Draft:
        """Begin to write a tree; it does not exist before `publish`, and is swept at start if that never comes."""
        draft = Draft(self._take_id("trees"), self._take_id("nodes", nodes), self._take_id("records", records))
        with self._transaction() as execute:
            execute("INSERT INTO meta VALUES (?, '')", (f"{_DRAFT}{draft.tree}",))
        return draft

    def write_draft(self, draft: Draft, items: Iterable[Part | BundleLine]) -> None:
        """Write blobs, nodes and records, in one transaction; what they name was written before, or is among them."""
        with self._transaction() as execute:
            for item in items:
                if isinstance(item, Part):
                    self._add_blob(execute, item.digest, packed=item.kind == "zblob", data=item.stored)
                elif isinstance(item, NodeLine):
                    digests = [None if d is None else bytes.fromhex(d) for d in (item.exact, item.content)]
                    execute(
                        "INSERT INTO nodes VALUES (?, ?, ?, ?, '', ?)",
                        (draft.node + item.node, draft.tree, *digests, item.pinned),
                    )
                else:
                    blobs = [0 if d is None else self._blob_id(d) for d in (item.call, item.upload, item.answer)]
                    values = (
                        draft.record + draft.written, draft.tree, draft.node + item.source, bytes.fromhex(item.key),
                        draft.node + item.target, *blobs, item.effect, item.seconds, item.recorded_at, False,
                        item.reproducible,
                    )  # fmt: skip
                    execute(f"INSERT INTO records VALUES ({','.join('?' * len(values))})", values)
                    draft.written += 1

    def publish(self, draft: Draft, task: str, root_key: str, spec: EnvironmentSpec, *, instead: int | None) -> None:
        """Make a draft the tree of task under this root key, instead of an empty one."""
        values = (draft.tree, self._owner(task, spec), root_key, spec.model_dump_json(), draft.node, time.time())
        with self._transaction() as execute:
            if instead is not None:
                for table, column in (("trees", "id"), ("nodes", "tree"), ("shares", "tree")):
                    execute(f"DELETE FROM {table} WHERE {column} = ?", (instead,))
                execute("UPDATE rollouts SET tree = ?, start = ?, node = ? WHERE tree = ?", (
                    draft.tree, draft.node, draft.node, instead,
                ))  # fmt: skip
            execute("INSERT INTO trees VALUES (?, ?, ?, ?, ?, ?)", values)
            execute("DELETE FROM meta WHERE name = ?", (f"{_DRAFT}{draft.tree}",))

    def delete_unused(self) -> None:
        """Delete the answers that no call has."""
        with self._transaction() as execute:
            self._delete_unused_blobs(execute)

    def drop_draft(self, tree: int) -> None:
        """Delete what was written of a draft."""
        with self._transaction() as execute:
            for table in ("records", "nodes"):
                execute(f"DELETE FROM {table} WHERE tree = ?", (tree,))
            self._delete_unused_blobs(execute)
            execute("DELETE FROM meta WHERE name = ?", (f"{_DRAFT}{tree}",))

    def is_empty(self, tree: int) -> bool:
        """Say whether nothing is recorded in a tree."""
        return self._one("SELECT 1 FROM records WHERE tree = ?", (tree,)) is None

    def _sweep_drafts(self) -> None:
        for (name,) in self._all("SELECT name FROM meta WHERE name GLOB ?", (f"{_DRAFT}*",)):
            self.drop_draft(int(name.removeprefix(_DRAFT)))

    def _blob_id(self, digest: str) -> int:
        row = self._one("SELECT id FROM blobs WHERE digest = ?", (bytes.fromhex(digest),))
        if row is None:
            raise StoreError(f"a blob of an import is gone: {digest}. Import it again.")
        return int(row[0])

    def share(self, task: str, tree: int) -> None:
        """Write that task uses a tree that is not its own."""
        with self._transaction() as execute:
            execute("INSERT OR IGNORE INTO shares VALUES (?, ?)", (task, tree))

    def has_tree(self, tree_id: int) -> bool:
        return self._one("SELECT 1 FROM trees WHERE id = ?", (tree_id,)) is not None

    def task_of(self, tree_id: int) -> str:
        """Return the name of the task that a tree belongs to, of a shared one the first; empty where it is gone."""
        row = self._one(
            "SELECT COALESCE(CASE WHEN task = '' OR task GLOB '/*' THEN (SELECT MIN(task) FROM shares WHERE tree = id) "
            "ELSE task END, '') FROM trees WHERE id = ?",
            (tree_id,),
        )
        return "" if row is None else str(row[0])

    def tree_ids(self, task: str) -> list[int]:
        """Return the ids of all trees that a task ever used, one for each root state."""
        return [row[0] for row in self._all(_TREES_OF.format("?", "?"), (task, task))]

    def common(self, task: str) -> str:
        """Return what the trees are filed under that task shares with others: nothing, or its namespace.

        What it shared with those of another namespace is not its any more.
        """
        space = self.namespace(task)
        return f"/{space}" if space else ""

    def tree_with(self, task: str, node: int) -> int | None:
        """Return the id of the tree of task in which a node lies; None where it lies in none, or in others' alone."""
        sql = f"SELECT t.id FROM nodes n JOIN trees t ON t.id = n.tree WHERE n.id = :node AND {OF_TASK}"
        values = {"node": node, "task": task, "common": self.common(task)}
        row = self._connection.execute(sql, values).fetchone()
        return None if row is None else int(row[0])

    def sole_tree_ids(self, task: str) -> list[int]:
        """Return the ids of the trees that no other task uses."""
        others = "SELECT tree FROM shares WHERE task <> ?"
        sql = f"SELECT id FROM ({_TREES_OF.format('?', '?')}) WHERE id NOT IN ({others})"
        return [row[0] for row in self._all(sql, (task, task, task))]

    def _load(self, tree: Tree) -> Tree:
        sql = "SELECT id, exact, content, diverged, pinned FROM nodes WHERE tree = ? AND id <> ? ORDER BY id"
        private = {row[0] for row in self._all("SELECT target FROM records WHERE tree = ? AND private = 1", (tree.id,))}
        for node_id, exact, content, diverged, pinned in self._all(sql, (tree.id, tree.root.id)):
            node = Node(node_id, *_digests(exact, content), diverged=diverged, pinned=bool(pinned))
            tree.add_node(node, private=node_id in private)
        counts = dict(
            self._all(
                "SELECT s.record, COUNT(*) FROM rollouts r JOIN steps s ON s.rollout = r.id "
                "WHERE r.tree = ? GROUP BY s.record",
                (tree.id,),
            )
        )
        sql = (
            "SELECT id, key, source, target, effect, seconds, recorded_at, private, reproducible, "
            "call, upload, answer FROM records WHERE tree = ? ORDER BY id"
        )
        for row in self._all(sql, (tree.id,)):
            record = Record(
                row[0], CallKey(row[1]), tree.nodes[row[2]], tree.nodes[row[3]], Effect(row[4]), row[5], row[6],
                private=bool(row[7]), reproducible=bool(row[8]), call=row[9], upload=row[10], answer=row[11],
            )  # fmt: skip
            # Who recorded it saw its answer too; what else is known says enough of whether to keep its state.
            record.doubtful = record.target.state is None and record.effect not in (Effect.NONE, Effect.PROCESSES)
            uses = counts.get(record.id, 0)
            record.hits = max(0, uses - 1)
            if not record.observation:
                record.target.passes += uses
            tree.add_record(record)
        return self._load_findings(tree)

    def _load_findings(self, tree: Tree) -> Tree:
        found = self._all("SELECT record, why, quarantined FROM findings WHERE tree = ?", (tree.id,))
        records = {r.id: r for node in tree.nodes.values() for r in node.records.values()} if found else {}
        records |= {record.id: record for record in tree.aside}
        for record_id, why, quarantined in found:
            if (record := records.get(record_id)) is not None:
                record.differs = why
                if quarantined:
                    tree.quarantine(record, why)
        return tree

    # Audits

    def save_finding(self, tree: int, record: Record, lost: Iterable[Node], *, quarantined: bool) -> None:
        """Write that an audit found a record to differ, and which nodes were set aside for it."""
        with self._transaction() as execute:
            values = (record.id, tree, record.differs, quarantined, time.time())
            execute("INSERT OR REPLACE INTO findings VALUES (?, ?, ?, ?, ?)", values)
            execute("UPDATE records SET reproducible = ? WHERE id = ?", (record.reproducible, record.id))
            for node in lost:
                execute("UPDATE nodes SET diverged = ? WHERE id = ?", (node.diverged, node.id))

    def findings(self, tree: int) -> list[tuple[int, int, int, int, str, int, float]]:
        """Return what audits found in a tree: record, source, target, call, why, whether in quarantine, when."""
        sql = (
            "SELECT f.record, r.source, r.target, r.call, f.why, f.quarantined, f.at FROM findings f "
            "JOIN records r ON r.id = f.record WHERE f.tree = ? ORDER BY f.at DESC, f.record LIMIT 1000"
        )
        return self._all(sql, (tree,))

    def add_audit(self, tree: int, kind: str, checked: int, differing: int, unreachable: int) -> None:
        """Add to how often audits of a kind looked at a tree's calls, and what they saw."""
        with self._transaction() as execute:
            execute(
                "INSERT INTO audits VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (tree, kind) DO UPDATE SET "
                "checked = checked + excluded.checked, differing = differing + excluded.differing, "
                "unreachable = unreachable + excluded.unreachable, at = excluded.at",
                (tree, kind, checked, differing, unreachable, time.time()),
            )

    def audits(self, tree: int | None = None) -> list[tuple[str, int, int, int, float]]:
        """Return kind, checked, differing, unreachable and when last, of one tree or of all together."""
        where = "" if tree is None else "WHERE tree = ?"
        sql = (
            "SELECT kind, SUM(checked), SUM(differing), SUM(unreachable), MAX(at) FROM audits "
            f"{where} GROUP BY kind ORDER BY kind"
        )
        return self._all(sql, () if tree is None else (tree,))

    def place_of(self, record: int) -> tuple[int, int] | None:
        """Return the tree and the node at which a record was made; None where it is gone."""
        row = self._one("SELECT tree, source FROM records WHERE id = ?", (record,))
        return None if row is None else (row[0], row[1])

    def masks(self, task: str) -> str | None:
        row = self._one("SELECT value FROM masks WHERE task = ?", (task,))
        return None if row is None else str(row[0])

    def put_masks(self, task: str, value: str) -> None:
        with self._transaction() as execute:
            execute("INSERT OR REPLACE INTO masks VALUES (?, ?)", (task, value))

    def call_text(self, blob: int) -> ToolCall:
        """Return a call by its blob, without what was uploaded with it."""
        value = orjson.loads(self._blob(blob))
        return ToolCall(value["endpoint"], value["tool"], value["arguments"])

    def _load_node(self, node_id: int) -> Node:
        row = self._one("SELECT exact, content, pinned FROM nodes WHERE id = ?", (node_id,))
        assert row is not None
        return Node(node_id, *_digests(row[0], row[1]), pinned=bool(row[2]))

    # Records

    def new_node_id(self) -> int:
        return self._take_id("nodes")

    def new_record_id(self) -> int:
        return self._take_id("records")

    def save_record(self, tree: int, record: Record, node: Node | None, call: ToolCall, result: ToolResult) -> None:
        """Write a record with its call and answer, and the node that it made if it made one, in one transaction.

        Blobs are content-addressed and compressed; their ids are set on record. Cost: 0.1 ms.
        """
        with self._transaction() as execute:
            value = {"endpoint": call.endpoint, "tool": call.tool, "arguments": call.arguments}
            record.call = self._insert_blob(execute, canonical_json(value))
            record.upload = self._insert_blob(execute, call.body) if call.body else 0
            told = orjson.dumps(result.headers).decode() if result.headers else result.media_type
            head = f"{result.status} {told}\n".encode()
            record.answer = self._insert_blob(execute, head + result.body)
            if node is not None:
                self._insert_node(execute, tree, node)
            values = (
                record.id, tree, record.source.id, record.key, record.target.id, record.call, record.upload,
                record.answer, record.effect.value, record.seconds, record.recorded_at, record.private,
                record.reproducible,
            )  # fmt: skip
            execute(f"INSERT INTO records VALUES ({','.join('?' * len(values))})", values)

    def save_node(self, node: Node) -> None:
        """Write what may change about a node: its state's digest, its pin, why it diverged."""
        exact, content = (node.state.exact, node.state.content) if node.state else (None, node.witness)
        with self._transaction() as execute:
            execute(
                "UPDATE nodes SET exact = ?, content = ?, diverged = ?, pinned = ? WHERE id = ?",
                (exact, content, node.diverged, node.pinned, node.id),
            )

    def save_divergence(self, record: Record, lost: Iterable[Node]) -> None:
        """Write that record does not reproduce its target, and which nodes were set aside for it."""
        with self._transaction() as execute:
            execute("UPDATE records SET reproducible = 0 WHERE id = ?", (record.id,))
            for node in lost:
                execute("UPDATE nodes SET diverged = ? WHERE id = ?", (node.diverged, node.id))

    def save_set_aside(self, nodes: Iterable[Node]) -> None:
        """Write why nodes were set aside."""
        with self._transaction() as execute:
            for node in nodes:
                execute("UPDATE nodes SET diverged = ? WHERE id = ?", (node.diverged, node.id))

    def forget(self, nodes: Iterable[Node], records: Iterable[Record]) -> None:
        """Delete nodes and records, and the answers that nothing else needs."""
        with self._transaction() as execute:
            for node in nodes:
                execute("DELETE FROM nodes WHERE id = ?", (node.id,))
            for record in records:
                execute("DELETE FROM records WHERE id = ?", (record.id,))
                execute("DELETE FROM findings WHERE record = ?", (record.id,))
            self._delete_unused_blobs(execute)
            self._keep_numbers(execute)

    def call(self, record: Record) -> ToolCall:
        """Return the call that was recorded."""
        value = orjson.loads(self._blob(record.call))
        body = self._blob(record.upload) if record.upload else b""
        return ToolCall(value["endpoint"], value["tool"], value["arguments"], body)

    def result(self, record: Record) -> ToolResult:
        """Return the answer that was recorded. 8 us for 2 kB."""
        head, _, body = self._blob(record.answer).partition(b"\n")
        status, _, told = head.decode().partition(" ")
        if told.startswith("["):
            headers = tuple((name, value) for name, value in orjson.loads(told))
            return ToolResult(int(status), content_type(headers), body, headers)
        return ToolResult(int(status), told, body)

    # Rollouts

    def create_rollout(self, task: str, name: str, tree: int, node: int, token: str) -> int:
        """Write a rollout that stands at node and has made no call; return its id."""
        rollout = self._take_id("rollouts")
        values = (rollout, task, name, tree, node, node, 0, 0, token, time.time())
        with self._transaction() as execute:
            execute(f"INSERT INTO rollouts VALUES ({','.join('?' * 10)})", values)
        return rollout

    def put_note(self, rollout: int, protocol: str, value: str) -> None:
        """Write what a protocol knows of a running rollout, as JSON, in the place of what it wrote before. 0.1 ms.

        What others know of the same rollout stays.
        """
        sql = "INSERT INTO notes VALUES (?1, json_object(?2, json(?3))) "
        sql += "ON CONFLICT DO UPDATE SET value = json_set(value, '$.' || ?2, json(?3))"
        with self._transaction() as execute:
            execute(sql, (rollout, protocol, value))

    def notes(self, task: str, protocol: str) -> dict[str, str]:
        """Return a protocol's notes on a task's running rollouts, by their names."""
        sql = (
            "SELECT r.name, json_extract(n.value, '$.' || ?2) AS said FROM notes n JOIN rollouts r ON r.id = n.rollout "
        )
        sql += "WHERE r.task = ?1 AND r.finished = 0 AND said IS NOT NULL"
        return dict(self._all(sql, (task, protocol)))

    def finish_rollout(self, rollout: int) -> None:
        with self._transaction() as execute:
            execute("DELETE FROM notes WHERE rollout = ?", (rollout,))
            execute("UPDATE rollouts SET finished = 1 WHERE id = ?", (rollout,))

    def rollouts(
        self,
        task: str,
        *,
        name: str | None = None,
        running: bool = False,
        newest: bool = False,
        offset: int = 0,
        limit: int = -1,
    ) -> list[dict[str, Any]]:
        """Return a task's rollouts, oldest first: all, those of one name, or those not finished. Fold before asking.

        Each with the root of its tree.
        """
        sql = "SELECT r.*, (SELECT root FROM trees WHERE id = r.tree) AS root FROM rollouts r WHERE task = :task"
        sql += " AND name = :name" if name is not None else ""
        sql += " AND finished = 0" if running else ""
        sql += f" ORDER BY id {'DESC' if newest else 'ASC'} LIMIT :limit OFFSET :offset"
        return list(self.database.query(sql, {"task": task, "name": name, "limit": limit, "offset": offset}))

    def rollout_of_token(self, token: str) -> tuple[str, str] | None:
        """Return the task and the name of the rollout that token stands for."""
        row = self._one("SELECT task, name FROM rollouts WHERE token = ? AND finished = 0", (token,))
        return None if row is None else (row[0], row[1])

    def steps(self, rollout: int, *, offset: int = 0, limit: int = -1) -> list[tuple[int, int, int]]:
        """Return a rollout's (turn, record id, outcome) in order. Fold before asking."""
        sql = "SELECT turn, record, outcome FROM steps WHERE rollout = ? ORDER BY turn LIMIT ? OFFSET ?"
        return self._all(sql, (rollout, limit, offset))

    def latest(self, rollout: int, most: int) -> list[int]:
        """Return the records of a rollout's last steps, the last first. Fold before asking."""
        sql = "SELECT record FROM steps WHERE rollout = ? ORDER BY turn DESC LIMIT ?"
        return [row[0] for row in self._all(sql, (rollout, most))]

    def fold(self, steps: list[JournalEntry]) -> None:
        """Write steps, and where they brought their rollouts, in one transaction. Steps written before do no harm."""
        last = {step.rollout: step for step in steps}
        with self._transaction():
            self._connection.executemany("INSERT OR IGNORE INTO steps VALUES (?, ?, ?, ?)", steps)
            self._connection.executemany(
                "UPDATE rollouts SET calls = ?, node = COALESCE((SELECT target FROM records WHERE id = ?), node) "
                "WHERE id = ? AND calls < ?",
                [(s.turn + 1, s.record, s.rollout, s.turn + 1) for s in last.values()],
            )

    # Inside

    def _last_id(self, table: str) -> int:
        given = "(SELECT CAST(value AS INTEGER) FROM meta WHERE name = ?)"
        row = self._one(f"SELECT MAX(COALESCE(MAX(id), 0), COALESCE({given}, 0)) FROM {table}", (f"last {table}",))
        assert row is not None
        return int(row[0])

    def _keep_numbers(self, execute: Any) -> None:
        """Remember which ids were given, so that what is deleted never has a namesake: steps and agents may name it."""
        for table, number in self._next.items():
            execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (f"last {table}", str(number - 1)))

    def _take_id(self, table: str, count: int = 1) -> int:
        taken = self._next[table]
        self._next[table] += count
        return taken

    def _owner(self, task: str, spec: EnvironmentSpec) -> str:
        """Return the task that a tree of this spec is filed under; where tasks share it, none or their namespace."""
        return self.common(task) if spec.shared else task

    def _insert_node(self, execute: Any, tree: int, node: Node) -> None:
        exact, content = (node.state.exact, node.state.content) if node.state else (None, node.witness)
        execute(
            "INSERT INTO nodes VALUES (?, ?, ?, ?, ?, ?)", (node.id, tree, exact, content, node.diverged, node.pinned)
        )

    def _insert_blob(self, execute: Any, data: bytes) -> int:
        digest = blake2b(data, digest_size=32).digest()
        row = self._one("SELECT id FROM blobs WHERE digest = ?", (digest,))
        if row is not None:
            return int(row[0])
        packed = zlib.compress(data, 1) if len(data) >= _COMPRESS_FROM else data
        smaller = len(packed) < len(data)
        return self._add_blob(execute, digest, packed=smaller, data=packed if smaller else data)

    def _add_blob(self, execute: Any, digest: bytes, *, packed: bool, data: bytes) -> int:
        blob = self._take_id("blobs")
        execute("INSERT OR IGNORE INTO blobs VALUES (?, ?, ?, ?)", (blob, digest, packed, data))
        return blob

    def _blob(self, blob: int) -> bytes:
        row = self._one("SELECT packed, data FROM blobs WHERE id = ?", (blob,))
        if row is None:
            raise StoreError(f"blob {blob} is not in the store: it was damaged or changed from outside")
        return zlib.decompress(row[1]) if row[0] else bytes(row[1])

    def _delete_unused_blobs(self, execute: Any) -> None:
        used = "SELECT call FROM records UNION SELECT upload FROM records UNION SELECT answer FROM records"
        execute(f"DELETE FROM blobs WHERE id NOT IN ({used})")

    @contextmanager
    def _transaction(self) -> Iterator[Any]:
        execute = self._connection.execute
        try:
            execute("BEGIN IMMEDIATE")
            yield execute
            execute("COMMIT")
        except BaseException as error:
            if self._connection.in_transaction:
                execute("ROLLBACK")
            if isinstance(error, sqlite3.Error):
                raise StoreError(
                    f"the store could not be written: {error}. Free disk space or look at the file."
                ) from error
            raise

    def _one(self, sql: str, values: tuple[Any, ...]) -> tuple[Any, ...] | None:
        row: tuple[Any, ...] | None = self._connection.execute(sql, values).fetchone()
        return row

    def _all(self, sql: str, values: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        return self._connection.execute(sql, values).fetchall()


def _digests(exact: bytes | None, content: bytes | None) -> tuple[None, StateDigest | None, bytes | None]:
    """Return what follows a node's id: no origin yet, its state digest, and the witness that stands in for one."""
    if exact is None or content is None:
        return None, None, content
    return None, StateDigest(exact, content), None
