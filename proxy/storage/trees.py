"""Trees as rows: read back whole, and filed under the task that they belong to or the group that shares them."""

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
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

_WHOLE_SHARE = is_whole("shares")
"""A damaged share names another task or another tree. It is left out; a task that opens its tree writes it again."""
TREES_OF = (
    f"SELECT id FROM trees WHERE task = {{task}} UNION SELECT tree FROM shares WHERE task = {{task}} AND {_WHOLE_SHARE}"
)
"""The numbers of the trees that a task uses; the placeholder is formatted in."""
OF_TASK = (
    "(t.task = :task OR (t.task = :shared_owner AND t.id IN "
    f"(SELECT tree FROM shares WHERE task = :task AND {_WHOLE_SHARE})))"
)
"""Whether a task may see row t of `trees`; for shared_owner see `TreeStore.shared_owner`."""

_FINDING_LOST = "an audit noticed a difference; which one is damaged in the store"
_RECORDS_OF_A_COUNT = 4096
"""Records whose uses are counted in one dictionary. A dictionary that grows copies itself: one of 350,000 records takes
12 ms for it, and hits wait meanwhile."""
_STEPS_AT_ONCE = 1000
"""Steps that are counted at once, but for those of one rollout that has more."""
_PAGE_ROWS = 50
"""Rows that are read back at once: hits wait for one page."""


class TreeStore:
    """Reads and creates trees; `damaged` counts rows that were left out since the start.

    A tree belongs to one task. A tree whose spec is shared belongs to all tasks with its root key: its column `task`
    holds no task's name, and the table `shares` lists the tasks that use it.
    """

    def __init__(self, database: StoreDatabase, namespace: Callable[[str], str]) -> None:
        """Create the reader; `namespace` separates a task's shared trees from those that other tokens see."""
        self._database, self._namespace = database, namespace
        self.damaged = 0

    def open(self, task: str, root_key: str, spec: EnvironmentSpec) -> Tree:
        """Return or create a task's tree under this root key; a shared spec has one for all tasks."""
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
        """Return an existing tree with all of its nodes and records. See `loading`."""
        steps = self.loading(tree_id)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                tree: Tree = end.value
                return tree

    def loading(self, tree_id: int) -> Generator[None, None, Tree]:
        """Read an existing tree with all of its nodes and records, and yield after each slice of about a millisecond.

        Damaged nodes and records, and what only they lead to, are left out and counted in `damaged`. The tree is what
        the store had only if no row was written meanwhile. Raises DamagedError for the tree's own row, or its root.
        """
        sql = f"SELECT root, spec, root_key FROM trees WHERE id = ? AND {is_whole('trees')}"
        row = self._database.row(sql, (tree_id,))
        if row is None:
            raise DamagedError(f"tree {tree_id} is damaged in the store.")
        tree = Tree(tree_id, self._root(row[0]), EnvironmentSpec.model_validate_json(row[1]), row[2])
        quarantined = yield from self._add(tree)
        self._add_findings(tree, quarantined)
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

    def specs(self, trees: Iterable[int]) -> Iterator[tuple[int, EnvironmentSpec]]:
        """Yield the environments of trees, each with the tree's number. Damaged and missing ones are left out."""
        for tree in trees:
            row = self._database.row(f"SELECT spec FROM trees WHERE id = ? AND {is_whole('trees')}", (tree,))
            if row is not None:
                yield tree, EnvironmentSpec.model_validate_json(row[0])

    def is_empty(self, tree: int) -> bool:
        """Return whether no call is recorded in a tree."""
        return self._database.row("SELECT 1 FROM records WHERE tree = ?", (tree,)) is None

    def share(self, task: str, tree: int) -> None:
        """Write that a task uses a shared tree."""
        with self._database.transaction() as execute:
            execute("INSERT OR REPLACE INTO shares VALUES (?, ?)", (task, tree))

    def owner(self, task: str, spec: EnvironmentSpec) -> str:
        """Return the value of the column `task` for a tree of this task with this spec."""
        return self.shared_owner(task) if spec.shared else task

    def shared_owner(self, task: str) -> str:
        """Return the owner of the trees that a task shares: empty, or its namespace now, with a leading slash."""
        space = self._namespace(task)
        return f"/{space}" if space else ""

    def task_of(self, tree: int) -> str:
        """Return the name of a tree's task, or of a shared tree's first task; empty if the tree was deleted."""
        row = self._database.row(
            "SELECT COALESCE(CASE WHEN task = '' OR task GLOB '/*' THEN "
            f"(SELECT MIN(task) FROM shares WHERE tree = id AND {_WHOLE_SHARE}) ELSE task END, '') "
            "FROM trees WHERE id = ?",
            (tree,),
        )
        return "" if row is None else str(row[0])

    def ids_of(self, task: str) -> list[int]:
        """Return the numbers of all trees that a task ever used, one for each root state."""
        return [row[0] for row in self._database.rows(TREES_OF.format(task="?1"), (task,))]

    def sole_ids(self, task: str) -> list[int]:
        """Return the numbers of the trees that no other task uses."""
        # A damaged share may be another task's of any shared tree.
        others = f"SELECT tree FROM shares WHERE task <> ?1 OR EXISTS (SELECT 1 FROM shares WHERE NOT {_WHOLE_SHARE})"
        sql = f"SELECT id FROM ({TREES_OF.format(task='?1')}) WHERE id NOT IN ({others})"
        return [row[0] for row in self._database.rows(sql, (task,))]

    def id_with_node(self, task: str, node: int) -> int | None:
        """Return the number of the task's tree that holds a node; None if only other tasks' trees do, or none."""
        sql = f"SELECT t.id FROM nodes n JOIN trees t ON t.id = n.tree WHERE n.id = :node AND {OF_TASK}"
        row = self._database.row(sql, {"node": node, "task": task, "shared_owner": self.shared_owner(task)})
        return None if row is None else int(row[0])

    def task_with_node(self, node: int) -> str:
        """Return the name of the task that holds a node, or of the first that shares it; empty if no tree has it."""
        row = self._database.row("SELECT tree FROM nodes WHERE id = ?", (node,))
        return "" if row is None else self.task_of(row[0])

    def _root(self, node: int) -> Node:
        sql = f"SELECT exact, content, pinned FROM nodes WHERE id = ? AND {is_whole('nodes')}"
        row = self._database.row(sql, (node,))
        if row is None:
            raise DamagedError(f"the root n{node} of a tree is damaged in the store.")
        return _node(node, row[0], row[1], "", pinned=row[2])

    def _pages(self, sql: str, tree: int) -> Iterator[list[tuple[Any, ...]]]:
        """Yield the rows of a query over a tree in pages, in the order of their numbers, which is the first column."""
        last = -1
        while page := self._database.rows(f"{sql} AND id > ? ORDER BY id LIMIT {_PAGE_ROWS}", (tree, last)):
            yield page
            last = page[-1][0]

    def _nodes(self, tree: Tree) -> Generator[None, None, tuple[dict[int, Node], int]]:
        """Return the nodes of a tree but its root, by number, and how many rows are damaged. Yields between pages."""
        nodes, damaged = dict[int, Node](), 0
        sql = f"SELECT id, exact, content, diverged, pinned, {is_whole('nodes')} FROM nodes WHERE tree = ?"
        for page in self._pages(sql, tree.id):
            for number, exact, content, diverged, pinned, whole in page:
                if whole and number != tree.root.id:
                    nodes[number] = _node(number, exact, content, diverged, pinned=pinned)
                damaged += not whole
            yield
        return nodes, damaged

    def _uses(self, tree: Tree) -> Generator[None, None, defaultdict[int, Counter[int]]]:
        """Return how often the tree's rollouts use each record, in groups of close numbers. Yields between pages."""
        uses_of = defaultdict[int, Counter[int]](Counter)
        used = f"SELECT record FROM steps WHERE rollout = ? AND {is_whole('steps')}"
        counted = 0
        for page in self._pages("SELECT id FROM rollouts WHERE tree = ?", tree.id):
            for (rollout,) in page:
                # A page of long rollouts has many thousands of steps.
                if counted >= _STEPS_AT_ONCE:
                    counted = 0
                    yield
                records = self._database.rows(used, (rollout,))
                counted += len(records)
                for (record,) in records:
                    uses_of[record // _RECORDS_OF_A_COUNT][record] += 1
            yield
        return uses_of

    def _add(self, tree: Tree) -> Generator[None, None, set[int]]:
        """Add nodes and records with hits and visits, yielding between pages; return the records in quarantine."""
        nodes, damaged = yield from self._nodes(tree)
        uses_of = yield from self._uses(tree)
        sql = (
            "SELECT id, key, source, target, effect, seconds, recorded_at, private, reproducible, "
            f"call, upload, answer, age_s, {is_whole('records')}, proven, quarantined FROM records WHERE tree = ?"
        )
        pending: list[tuple[Any, ...]] = []
        quarantined = set[int]()
        # Records come in the order in which they were made, so nearly always one round adds all of them.
        for page in self._pages(sql, tree.id):
            whole = [row for row in page if row[13]]
            damaged += len(page) - len(whole)
            quarantined.update(row[0] for row in whole if row[15])
            pending += [row for row in whole if not self._add_record(tree, row, nodes, uses_of)]
            yield
        # What remains when a round adds nothing has no path from the root: such a node must not pass for a root itself.
        while pending:
            waiting = [row for row in pending if not self._add_record(tree, row, nodes, uses_of)]
            if len(waiting) == len(pending):
                damaged += len(waiting)
                break
            pending = waiting
            yield
        self.damaged += damaged
        if damaged:
            log.error("rows of a tree are damaged, so their calls run again", tree=tree.id, rows=damaged)
        return quarantined

    def _add_record(
        self,
        tree: Tree,
        row: tuple[Any, ...],
        nodes: Mapping[int, Node],
        uses_of: Mapping[int, Counter[int]],
    ) -> bool:
        """Add a record, and its target if the tree lacks it; return False if the tree lacks its source."""
        source = tree.nodes.get(row[2])
        target = tree.nodes.get(row[3]) or nodes.get(row[3])
        if source is None or target is None:
            return False
        if target.id not in tree.nodes:
            # The record is the node's origin: a private call leads to a node of its own, and nothing else ever does.
            tree.add_node(target, private=bool(row[7]))
        record = Record(
            row[0], CallKey(row[1]), source, target, Effect(row[4]), row[5], row[6],
            private=bool(row[7]), reproducible=bool(row[8]), proven=bool(row[14]),
            call=row[9], upload=row[10], answer=row[11], age_s=math.inf if row[12] is None else row[12],
        )  # fmt: skip
        # Whether an answer was doubtful is not stored: a target without a digest says enough to keep its state.
        record.doubtful = record.target.state is None and record.effect not in (Effect.NONE, Effect.PROCESSES)
        uses = uses_of[record.id // _RECORDS_OF_A_COUNT][record.id]
        # The first use is the miss that recorded it.
        record.hits = max(0, uses - 1)
        if not record.observation:
            record.target.visits += uses
        tree.add_record(record)
        return True

    def _add_findings(self, tree: Tree, quarantined: set[int]) -> None:
        """Mark the records that differ, and put those with these numbers in quarantine, also without a finding."""
        sql = f"SELECT record, why FROM findings WHERE tree = ? AND {is_whole('findings')}"
        findings = dict(self._database.rows(sql, (tree.id,)))
        numbers = quarantined | findings.keys()
        if not numbers:
            return
        records = {record.id: record for node in tree.nodes.values() for record in node.records.values()}
        records |= {record.id: record for record in tree.aside}
        for number in sorted(numbers & records.keys()):
            record = records[number]
            record.differs = findings.get(number, _FINDING_LOST)
            if number in quarantined:
                tree.quarantine(record, record.differs)


def _node(number: int, exact: bytes | None, content: bytes | None, diverged: str, *, pinned: int) -> Node:
    """Return a node from its columns; content without exact is the witness of a state that has no digest."""
    if exact is None or content is None:
        return Node(number, witness=content, diverged=diverged, pinned=bool(pinned))
    return Node(number, state=StateDigest(exact, content), diverged=diverged, pinned=bool(pinned))
