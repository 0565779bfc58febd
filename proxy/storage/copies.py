"""Rows of a task that travel from one store to another and keep their numbers.

The stores of a cluster give out numbers of different blocks (`StoreDatabase`). So nodes, records and rollouts have the
same number everywhere, and so have the names that agents and people hold.
"""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from proxy.storage.audits import put_finding
from proxy.storage.blobs import BlobStore
from proxy.storage.database import Execute, StoreDatabase
from proxy.storage.errors import DamagedError
from proxy.storage.notes import PUT_NOTE
from proxy.storage.records import RecordBytes, stored_digests
from proxy.storage.schema import is_whole
from proxy.storage.trees import TREES_OF
from proxy.tree.tree import Record


class TaskCopy(NamedTuple):
    """A task."""

    name: str
    spec: str | None  # Its environment as JSON; None for the default one.
    created_at: float  # Seconds since the epoch, as all times of copies.


class TreeCopy(NamedTuple):
    """A tree with its root, and without calls."""

    tree: int
    owner: str  # The value of its column `task`.
    root_key: str  # Key of its root state.
    spec: str  # Its environment as JSON.
    root: int  # Number of the root.
    exact: bytes | None  # Digests of the root state, as `content`; None if they are not known yet.
    content: bytes | None
    created_at: float


class RecordCopy(NamedTuple):
    """A record with its call and its answer, and with its target if this record was the first to reach it."""

    record: int
    tree: int
    source: int  # Number of the node at which the call was made.
    key: bytes
    target: int  # Number of the node that the call led to.
    effect: int  # What the call changed; an `Effect`.
    seconds: float  # How long the tool ran.
    recorded_at: float
    private: bool  # Whether the record serves one rollout only.
    reproducible: bool  # Whether a replay may be expected to reach the target.
    age_s: float | None  # For how long background processes had been running; None if that is not known.
    is_first: bool  # Whether the target is new with this record.
    exact: bytes | None  # Digests of a new target, as its row has them, as `content`; None without.
    content: bytes | None
    call: bytes  # The call as its blob has it.
    upload: bytes  # The uploaded body; empty without one.
    answer: bytes  # The answer as its blob has it.
    cpu_s: float | None = None  # What the call used of the machine, as its `ResourceUse`; None if that is not known.
    peak_bytes: int | None = None
    read_bytes: int | None = None
    written_bytes: int | None = None


class RolloutCopy(NamedTuple):
    """A rollout and its position."""

    rollout: int
    task: str
    name: str
    tree: int
    start: int  # Number of the node that it began at.
    node: int  # Number of the node that it is at.
    calls: int  # How many of its calls were answered.
    token_digest: bytes | None  # SHA-256 of its token; None without one.
    created_at: float
    labels: str  # As JSON.


class StepCopy(NamedTuple):
    """A step of a rollout."""

    rollout: int
    turn: int  # How many of its calls were answered before.
    record: int  # Number of the record that answered the call.
    outcome: int  # An `Outcome`.


class EndedCopy(NamedTuple):
    """A rollout that has ended. Its labels may change later: a reward comes when it is over."""

    rollout: RolloutCopy


class NoteCopy(NamedTuple):
    """What a protocol remembers of a running rollout, as JSON."""

    rollout: int
    protocol: str
    value: str


class FindingCopy(NamedTuple):
    """What was noticed of a record: its call does something else now."""

    record: int
    tree: int
    why: str  # What differs.
    quarantined: bool  # Whether the record answers no call any more.
    reproducible: bool  # Whether a replay may be expected to reach its target.
    noticed_at: float


class NodeCopy(NamedTuple):
    """What people have changed of a node."""

    node: int
    diverged: str  # Why it was set aside; empty if it was not.
    pinned: bool


class MasksCopy(NamedTuple):
    """The noise masks of a task's audits, as JSON."""

    task: str
    value: str


Copy = (
    TaskCopy | TreeCopy | RecordCopy | FindingCopy | RolloutCopy | EndedCopy | StepCopy | NoteCopy | NodeCopy
    | MasksCopy
)  # fmt: skip

_ROLLOUT = "id, task, name, tree, start, node, calls, token_digest, created_at, labels"
_RECORDS = (
    "SELECT id, tree, source, key, target, effect, seconds, recorded_at, private, reproducible, age_s, call, upload, "
    f"answer, cpu_s, peak_bytes, read_bytes, written_bytes, {is_whole('records')} FROM records "
    "WHERE tree = ? AND id > ? ORDER BY id LIMIT ?"
)

_PLAIN: dict[type[Copy], str] = {
    TaskCopy: "INSERT OR REPLACE INTO tasks (name, spec, created_at) VALUES (?, ?, ?)",
    StepCopy: "INSERT OR REPLACE INTO steps VALUES (?, ?, ?, ?)",
    MasksCopy: "INSERT OR REPLACE INTO masks VALUES (?, ?)",
    NoteCopy: PUT_NOTE,
}
"""How copies are written whose values are those of a row."""


def copy_of(tree: int, record: Record, written: RecordBytes, *, is_first: bool) -> RecordCopy:
    """Return the copy of a record that was just saved, with its target if it was the first to reach it."""
    digests = stored_digests(record.target) if is_first else (None, None)
    return RecordCopy(
        record.id, tree, record.source.id, record.key, record.target.id, record.effect.value, record.seconds,
        record.recorded_at, record.private, record.reproducible, None if record.age_s == math.inf else record.age_s,
        is_first, *digests, *written[:3], **written.resources._asdict(),
    )  # fmt: skip


class CopyStore:
    """Reads rows as copies, and writes the copies of a task in place of what the store has of it."""

    def __init__(self, database: StoreDatabase, blobs: BlobStore) -> None:
        self._database, self._blobs = database, blobs

    def task(self, name: str) -> TaskCopy | None:
        """Return a task; None if there is none, or if its row is damaged."""
        sql = f"SELECT {', '.join(TaskCopy._fields)} FROM tasks WHERE name = ? AND {is_whole('tasks')}"
        row = self._database.row(sql, (name,))
        return None if row is None else TaskCopy(*row)

    def tree(self, tree: int) -> TreeCopy | None:
        """Return a tree with its root; None if there is none, or if a row is damaged."""
        sql = f"SELECT id, task, root_key, spec, root, created_at FROM trees WHERE id = ? AND {is_whole('trees')}"
        row = self._database.row(sql, (tree,))
        digests = None if row is None else self._digests(row[4])
        if row is None or digests is None:
            return None
        number, owner, root_key, spec, root, created_at = row
        return TreeCopy(number, owner, root_key, spec, root, *digests, created_at)

    def records(self, tree: int, after: int, limit: int) -> list[RecordCopy]:
        """Return a tree's next records by number, each as if first to reach its target. Raises DamagedError."""
        return [self._record(row) for row in self._database.rows(_RECORDS, (tree, after, limit))]

    def pinned(self, tree: int) -> list[NodeCopy]:
        """Return the nodes of a tree that are pinned."""
        rows = self._database.rows("SELECT id, diverged FROM nodes WHERE tree = ? AND pinned", (tree,))
        return [NodeCopy(number, diverged, True) for number, diverged in rows]

    def rollout(self, rollout: int) -> RolloutCopy | EndedCopy | None:
        """Return a rollout; None if its position is lost or its row damaged. Fold the journal before."""
        sql = (
            f"SELECT {_ROLLOUT}, finished FROM rollouts "
            f"WHERE id = ? AND (finished OR lost = '') AND {is_whole('rollouts')}"
        )
        row = self._database.row(sql, (rollout,))
        if row is None:
            return None
        *values, finished = row
        return EndedCopy(RolloutCopy(*values)) if finished else RolloutCopy(*values)

    def replace(self, task: str, copies: Iterable[Copy]) -> None:
        """Write a task in place of what the store has under its name, in one transaction.

        Rollouts that have ended here stay, and so do the steps through records which are there afterwards. The task may
        not be in memory, nor the last steps of its rollouts in the journal. Raises StoreError if nothing could be
        written; the store is as it was then.
        """
        trees = TREES_OF.format(task="?1")
        with self._database.transaction() as execute:
            # The numbers of rows that go are never given out again.
            self._database.keep_numbers(execute)
            for table, column in (("records", "tree"), ("nodes", "tree"), ("trees", "id")):
                execute(f"DELETE FROM {table} WHERE {column} IN ({trees})", (task,))
            execute("DELETE FROM shares WHERE task = ?", (task,))
            execute("DELETE FROM notes WHERE rollout IN (SELECT id FROM rollouts WHERE task = ?)", (task,))
            running = "SELECT id FROM rollouts WHERE task = ? AND finished = 0"
            execute(f"DELETE FROM overheads WHERE rollout IN ({running})", (task,))
            execute("DELETE FROM rollouts WHERE task = ? AND finished = 0", (task,))
            execute("DELETE FROM tasks WHERE name = ?", (task,))
            for copy in copies:
                self._write(execute, task, copy)
            # The findings of this store's own audits stay: they may be of a time at which it did not write to the log.
            findings = f"SELECT record FROM findings WHERE quarantined AND {is_whole('findings')}"
            execute(f"UPDATE records SET quarantined = 1 WHERE id IN ({findings}) AND NOT quarantined")
            own = "SELECT id FROM rollouts WHERE task = ?"
            # Steps that were taken by an owner which had been replaced.
            late = f"rollout IN ({own}) AND turn >= (SELECT calls FROM rollouts WHERE id = steps.rollout)"
            execute(f"DELETE FROM steps WHERE {late}", (task,))
            lost = f"rollout IN ({own}) AND record NOT IN (SELECT id FROM records)"
            execute(f"DELETE FROM steps WHERE {lost}", (task,))

    def _write(self, execute: Execute, task: str, copy: Copy) -> None:
        match copy:
            case TaskCopy() | StepCopy() | NoteCopy() | MasksCopy():
                execute(_PLAIN[type(copy)], copy)
            case TreeCopy():
                self._write_tree(execute, task, copy)
            case RecordCopy():
                self._write_record(execute, copy)
            case RolloutCopy():
                self._write_rollout(execute, copy)
            case EndedCopy(rollout):
                self._write_rollout(execute, rollout, finished=1)
            case NodeCopy(node, diverged, pinned):
                execute("UPDATE nodes SET diverged = ?, pinned = ? WHERE id = ?", (diverged, pinned, node))
            case FindingCopy():
                put_finding(execute, *copy)

    def _record(self, row: tuple[Any, ...]) -> RecordCopy:
        call, upload, answer = row[11:14]
        digests = self._digests(row[4])
        if not row[18] or digests is None:
            raise DamagedError(f"record {row[0]} is damaged in the store.")
        private, reproducible = (bool(value) for value in row[8:10])
        uploaded = self._blobs.read(upload) if upload else b""
        return RecordCopy._make((
            *row[:8], private, reproducible, row[10], True, *digests,
            self._blobs.read(call), uploaded, self._blobs.read(answer), *row[14:18],
        ))  # fmt: skip

    def _digests(self, node: int) -> tuple[bytes | None, bytes | None] | None:
        sql = f"SELECT exact, content FROM nodes WHERE id = ? AND {is_whole('nodes')}"
        row = self._database.row(sql, (node,))
        return None if row is None else (row[0], row[1])

    def _write_tree(self, execute: Execute, task: str, copy: TreeCopy) -> None:
        values = (copy.tree, copy.owner, copy.root_key, copy.spec, copy.root, copy.created_at)
        execute("INSERT INTO trees (id, task, root_key, spec, root, created_at) VALUES (?, ?, ?, ?, ?, ?)", values)
        if copy.owner != task:
            execute("INSERT INTO shares VALUES (?, ?)", (task, copy.tree))
        self._write_node(execute, copy.root, copy.tree, copy.exact, copy.content)

    def _write_node(self, execute: Execute, node: int, tree: int, exact: bytes | None, content: bytes | None) -> None:
        sql = "INSERT INTO nodes (id, tree, exact, content, diverged, pinned) VALUES (?, ?, ?, ?, '', 0)"
        execute(sql, (node, tree, exact, content))

    def _write_record(self, execute: Execute, copy: RecordCopy) -> None:
        if copy.is_first:
            self._write_node(execute, copy.target, copy.tree, copy.exact, copy.content)
        call, answer = (self._blobs.insert(execute, data) for data in (copy.call, copy.answer))
        upload = self._blobs.insert(execute, copy.upload) if copy.upload else 0
        values = (
            copy.record, copy.tree, copy.source, copy.key, copy.target, call, upload, answer, copy.effect, copy.seconds,
            copy.recorded_at, copy.private, copy.reproducible, copy.age_s, False, False,
            copy.cpu_s, copy.peak_bytes, copy.read_bytes, copy.written_bytes,
        )  # fmt: skip
        execute(f"INSERT INTO records VALUES ({','.join('?' * len(values))})", values)

    def _write_rollout(self, execute: Execute, copy: RolloutCopy, finished: int = 0) -> None:
        if finished:
            # One that has ended here keeps what its calls took.
            sql = "UPDATE rollouts SET node = ?, calls = ?, labels = ? WHERE id = ? AND finished"
            execute(sql, (copy.node, copy.calls, copy.labels, copy.rollout))
        execute(
            # A row that has ended here alone: the log does not know of its end.
            f"INSERT OR {'IGNORE' if finished else 'REPLACE'} INTO rollouts ({_ROLLOUT}, "
            "used_at, finished, lost, restore_s, replay_s, wait_s) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, '', 0, 0, 0)",
            (*copy, copy.created_at, finished),
        )
