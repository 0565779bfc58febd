"""Trees as rows: read back whole, and filed under the task that they belong to or the group that shares them."""

import math
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import structlog

from proxy.storage.database import StoreDatabase
from proxy.storage.errors import DamagedError
from proxy.storage.records import insert_node
from proxy.storage.schema import is_whole
from proxy.tree.keys import CallKey
from proxy.tree.tree import Node, Record, Tree
from sandboxes.effects import Effect, StateDigest
from sandboxes.spec import EnvironmentSpec

log = structlog.get_logger()

TREES_OF = "SELECT id FROM trees WHERE task = {task} UNION SELECT tree FROM shares WHERE task = {task}"
"""The numbers of the trees that a task uses; the placeholder is formatted in."""
OF_TASK = "(t.task = :task OR (t.task = :shared_owner AND t.id IN (SELECT tree FROM shares WHERE task = :task)))"
"""Whether a task may see row t of `trees`; for shared_owner see `TreeStore.shared_owner`."""


class TreeStore:
    """Reads and creates trees.

    A tree belongs to one task. A tree whose spec is shared belongs to all tasks with its root key: its column `task`
    holds no task's name, and the table `shares` lists the tasks that use it.

    Attributes:
        damaged: How many rows of nodes and records were left out since the start, because they are damaged.
    """

    def __init__(self, database: StoreDatabase, namespace: Callable[[str], str]) -> None:
        """Create the reader.

        Args:
            database: The file.
            namespace: Returns what separates a task's shared trees from those that other tokens see; empty for none.
        """
        self._database, self._namespace = database, namespace
        self.damaged = 0

    def open(self, task: str, root_key: str, spec: EnvironmentSpec) -> Tree:
        """Return the tree of a task under this root key, which is created if the store has none.

        A shared spec gives the tree of all tasks with this root key. Cost: 2 to 3 ms for 1,000 nodes.
        """
        known = self.id_of(task, root_key, spec)
        if known is not None:
            return self.load(known)
        tree, root = self._database.take_number("trees"), Node(self._database.take_number("nodes"))
        values = (tree, self.owner(task, spec), root_key, spec.model_dump_json(), root.id, time.time())
        with self._database.transaction() as execute:
            execute("INSERT INTO trees VALUES (?, ?, ?, ?, ?, ?)", values)
            insert_node(execute, tree, root)
        return Tree(tree, root, spec, root_key)

    def load(self, tree_id: int) -> Tree:
        """Return an existing tree with all of its nodes and records.

        Damaged nodes and records are left out, and so is what no path of whole records leads to. Their number is
        `damaged` afterwards.

        Raises:
            DamagedError: The tree's own row, or its root, is not as it was written.
        """
        sql = f"SELECT root, spec, root_key FROM trees WHERE id = ? AND {is_whole('trees')}"
        row = self._database.row(sql, (tree_id,))
        if row is None:
            raise DamagedError(f"tree {tree_id} is damaged in the store.")
        tree = Tree(tree_id, self._root(row[0]), EnvironmentSpec.model_validate_json(row[1]), row[2])
        self._add(tree)
        self._add_findings(tree)
        return tree

    def id_of(self, task: str, root_key: str, spec: EnvironmentSpec) -> int | None:
        """Return the number of the tree that `open` would read; None if it would create one."""
        values = (self.owner(task, spec), root_key)
        # A damaged tree is not found: its task begins another one, and its rollouts are lost.
        sql = f"SELECT id FROM trees WHERE task = ? AND root_key = ? AND {is_whole('trees')}"
        row = self._database.row(sql, values)
        return None if row is None else int(row[0])

    def exists(self, tree: int) -> bool:
        """Return whether the store has this tree."""
        return self._database.row("SELECT 1 FROM trees WHERE id = ?", (tree,)) is not None

    def is_empty(self, tree: int) -> bool:
        """Return whether no call is recorded in a tree."""
        return self._database.row("SELECT 1 FROM records WHERE tree = ?", (tree,)) is None

    def share(self, task: str, tree: int) -> None:
        """Write that a task uses a shared tree."""
        with self._database.transaction() as execute:
            execute("INSERT OR IGNORE INTO shares VALUES (?, ?)", (task, tree))

    def owner(self, task: str, spec: EnvironmentSpec) -> str:
        """Return the value of the column `task` for a tree of this task with this spec."""
        return self.shared_owner(task) if spec.shared else task

    def shared_owner(self, task: str) -> str:
        """Return the owner of the trees that a task shares: empty, or the task's namespace with a leading slash.

        A task that moves to another namespace loses sight of what it shared in the old one.
        """
        space = self._namespace(task)
        return f"/{space}" if space else ""

    def task_of(self, tree: int) -> str:
        """Return the name of a tree's task, or of a shared tree's first task; empty if the tree was deleted."""
        row = self._database.row(
            "SELECT COALESCE(CASE WHEN task = '' OR task GLOB '/*' THEN (SELECT MIN(task) FROM shares WHERE tree = id) "
            "ELSE task END, '') FROM trees WHERE id = ?",
            (tree,),
        )
        return "" if row is None else str(row[0])

    def ids_of(self, task: str) -> list[int]:
        """Return the numbers of all trees that a task ever used, one for each root state."""
        return [row[0] for row in self._database.rows(TREES_OF.format(task="?1"), (task,))]

    def sole_ids(self, task: str) -> list[int]:
        """Return the numbers of the trees that no other task uses."""
        others = "SELECT tree FROM shares WHERE task <> ?1"
        sql = f"SELECT id FROM ({TREES_OF.format(task='?1')}) WHERE id NOT IN ({others})"
        return [row[0] for row in self._database.rows(sql, (task,))]

    def id_with_node(self, task: str, node: int) -> int | None:
        """Return the number of the task's tree that holds a node; None if only other tasks' trees do, or none."""
        sql = f"SELECT t.id FROM nodes n JOIN trees t ON t.id = n.tree WHERE n.id = :node AND {OF_TASK}"
        row = self._database.row(sql, {"node": node, "task": task, "shared_owner": self.shared_owner(task)})
        return None if row is None else int(row[0])

    def _root(self, node: int) -> Node:
        sql = f"SELECT exact, content, pinned FROM nodes WHERE id = ? AND {is_whole('nodes')}"
        row = self._database.row(sql, (node,))
        if row is None:
            raise DamagedError(f"the root n{node} of a tree is damaged in the store.")
        return _node(node, row[0], row[1], "", pinned=row[2])

    def _nodes(self, tree: Tree) -> tuple[dict[int, Node], int]:
        """Return the nodes of a tree but its root, by number, and how many rows are damaged."""
        sql = (
            f"SELECT id, exact, content, diverged, pinned, {is_whole('nodes')} FROM nodes "
            "WHERE tree = ? AND id <> ? ORDER BY id"
        )
        rows = self._database.rows(sql, (tree.id, tree.root.id))
        nodes = {
            number: _node(number, exact, content, diverged, pinned=pinned)
            for number, exact, content, diverged, pinned, whole in rows
            if whole
        }
        return nodes, len(rows) - len(nodes)

    def _add(self, tree: Tree) -> None:
        """Add nodes and records, with the hits and visits that the steps of the tree's rollouts add up to."""
        nodes, damaged = self._nodes(tree)
        sql = (
            "SELECT s.record, COUNT(*) FROM rollouts r JOIN steps s ON s.rollout = r.id "
            "WHERE r.tree = ? GROUP BY s.record"
        )
        uses_of = dict(self._database.rows(sql, (tree.id,)))
        private = self._database.rows("SELECT target FROM records WHERE tree = ? AND private = 1", (tree.id,))
        private_nodes = {target for (target,) in private}
        sql = (
            "SELECT id, key, source, target, effect, seconds, recorded_at, private, reproducible, "
            f"call, upload, answer, age_s, {is_whole('records')}, proven FROM records WHERE tree = ? ORDER BY id"
        )
        rows = self._database.rows(sql, (tree.id,))
        pending = [row for row in rows if row[13]]
        damaged += len(rows) - len(pending)
        # Records come in the order in which they were made, so nearly always one round adds all of them. What remains
        # when a round adds nothing has no path from the root: such a node must not pass for a root itself.
        while pending:
            waiting = [row for row in pending if not self._add_record(tree, row, nodes, private_nodes, uses_of)]
            if len(waiting) == len(pending):
                damaged += len(waiting)
                break
            pending = waiting
        self.damaged += damaged
        if damaged:
            log.error("rows of a tree are damaged, so their calls run again", tree=tree.id, rows=damaged)

    def _add_record(
        self,
        tree: Tree,
        row: tuple[Any, ...],
        nodes: Mapping[int, Node],
        private_nodes: Collection[int],
        uses_of: Mapping[int, int],
    ) -> bool:
        """Add a record, and its target if the tree lacks it; return False if the tree lacks its source."""
        source = tree.nodes.get(row[2])
        target = tree.nodes.get(row[3]) or nodes.get(row[3])
        if source is None or target is None:
            return False
        if target.id not in tree.nodes:
            tree.add_node(target, private=target.id in private_nodes)
        record = Record(
            row[0], CallKey(row[1]), source, target, Effect(row[4]), row[5], row[6],
            private=bool(row[7]), reproducible=bool(row[8]), proven=bool(row[14]),
            call=row[9], upload=row[10], answer=row[11], age_s=math.inf if row[12] is None else row[12],
        )  # fmt: skip
        # Whether an answer was doubtful is not stored: a target without a digest says enough to keep its state.
        record.doubtful = record.target.state is None and record.effect not in (Effect.NONE, Effect.PROCESSES)
        uses = uses_of.get(record.id, 0)
        # The first use is the miss that recorded it.
        record.hits = max(0, uses - 1)
        if not record.observation:
            record.target.visits += uses
        tree.add_record(record)
        return True

    def _add_findings(self, tree: Tree) -> None:
        findings = self._database.rows("SELECT record, why, quarantined FROM findings WHERE tree = ?", (tree.id,))
        if not findings:
            return
        records = {record.id: record for node in tree.nodes.values() for record in node.records.values()}
        records |= {record.id: record for record in tree.aside}
        for number, why, quarantined in findings:
            if (record := records.get(number)) is not None:
                record.differs = why
                if quarantined:
                    tree.quarantine(record, why)


def _node(number: int, exact: bytes | None, content: bytes | None, diverged: str, *, pinned: int) -> Node:
    """Return a node from its columns; content without exact is the witness of a state that has no digest."""
    if exact is None or content is None:
        return Node(number, witness=content, diverged=diverged, pinned=bool(pinned))
    return Node(number, state=StateDigest(exact, content), diverged=diverged, pinned=bool(pinned))
