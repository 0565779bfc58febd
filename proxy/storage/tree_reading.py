"""Reading a tree back from the store: in slices, and ahead of them what the next answers need.

The slices add nodes and records in the order of their numbers, in which they were made. Until the last one the tree is
not whole: it has some of its records. `record` and `node` find others by themselves, with the path from the root, as
the objects that a later slice adds. What they cannot tell for sure they leave to the slices.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterator
from typing import Any

import structlog

from proxy.storage.database import StoreDatabase
from proxy.storage.errors import NotWholeError
from proxy.storage.schema import is_whole
from proxy.tree.keys import CallKey
from proxy.tree.tree import Node, Record, Tree, Unread
from sandboxes.effects import Effect, StateDigest

log = structlog.get_logger()

_FINDING_LOST = "an audit noticed a difference; which one is damaged in the store"
_RECORDS_OF_A_COUNT = 4096
"""Records whose uses are counted in one dictionary. A dictionary that grows copies itself: one of 350,000 records takes
12 ms for it, and hits wait meanwhile."""
_STEPS_AT_ONCE = 1000
"""Steps that are counted at once, but for those of one rollout that has more."""
_PAGE_ROWS = 50
"""Rows that are read back at once: hits wait for one page."""
_MOST_AHEAD = 1000
"""The longest path that is read ahead at once: it takes some 30 ms, and hits wait meanwhile."""
_COLUMNS = (
    "id, key, source, target, effect, seconds, recorded_at, private, reproducible, "
    f"call, upload, answer, age_s, {is_whole('records')}, proven, quarantined"
)

_Row = tuple[Any, ...]


class TreeReading:
    """Reads one tree back, and implements `Unread` for it until it is whole."""

    def __init__(
        self,
        database: StoreDatabase,
        tree: Callable[[Unread], Tree],
        attach: Callable[[Node], object],
        left_out: Callable[[int], object],
    ) -> None:
        """Begin with a tree that has its root.

        `attach` gives a node that is found ahead of the slices its snapshot. `left_out` is told in the end how many
        rows are damaged, or have no path from the root.
        """
        self._database, self._attach, self._left_out = database, attach, left_out
        self.tree = tree(self)
        self.ahead: list[Node] = []  # Nodes that were found ahead of the slices.
        self._nodes: dict[int, Node] = {}  # Nodes that were read, in the tree or not yet, by number.
        self._found: dict[int, Record] = {}  # Records that were found ahead and that no slice has added yet, by number.
        # What calls in quarantine take with them is known at the end only.
        sql = f"SELECT 1 FROM findings WHERE (tree = ? AND quarantined) OR NOT {is_whole('findings')}"
        self.tells = database.row(sql, (self.tree.id,)) is None  # Whether `record` and `node` find anything.
        self._slices = self._read()

    def step(self) -> bool:
        """Read the next slice, of about a millisecond; return False once the tree is whole.

        It is what the store had only if no row was written meanwhile. Raises StoreError; NotWholeError after that.
        """
        if next(self._slices, None) is None and self.tree.unread is not None:
            raise NotWholeError
        return self.tree.unread is not None

    def record(self, node: Node, key: CallKey) -> Record | None:
        """Return the record that answers a call at a node, if the whole tree will surely have it there; else None."""
        # Which key a call has beside live processes depends on all records there.
        if node.state is None or node.diverged:
            return None
        row = self._row(f"SELECT {_COLUMNS} FROM records WHERE source = ? AND key = ? AND tree = ?", node.id, key)
        if row is None:
            return None
        source, target = self.node(row[2]), self.node(row[3])
        if source is not node or target is None or target.diverged:
            return None
        # Its target may have been found by it.
        record = self._found.get(row[0])
        if record is None:
            record = self._found[row[0]] = self._made(row, source, target)
        return record

    def node(self, number: int) -> Node | None:
        """Return a node with its path from the root, if the whole tree will surely have both; else None."""
        way = dict[int, _Row]()
        while (known := self._with_path(number)) is None:
            # The first record that led there is its origin: calls at the node itself came later.
            row = self._row(
                f"SELECT {_COLUMNS} FROM records WHERE target = ? AND source <> ? AND tree = ? ORDER BY id LIMIT 1",
                number, number,
            )  # fmt: skip
            if row is None or number in way or len(way) >= _MOST_AHEAD or not self._read_node(number):
                return None
            way[number], number = row, row[2]
        for number, row in reversed(way.items()):
            node = self._nodes[number]
            node.origin = self._found[row[0]] = self._made(row, known, node)
            node.still = self.tree.spec.stands_still
            self._attach(node)
            self.ahead.append(node)
            known = node
        return known

    def _with_path(self, number: int) -> Node | None:
        node = self.tree.nodes.get(number) or self._nodes.get(number)
        return node if node is self.tree.root or (node is not None and node.origin is not None) else None

    def _row(self, sql: str, *values: object) -> _Row | None:
        """Return a row of a record that is as it was written, and that no audit has found to differ."""
        row = self._database.row(sql, (*values, self.tree.id)) if self.tells else None
        return row if row is not None and row[13] and not row[15] else None

    def _read_node(self, number: int) -> bool:
        """Read a node, if it has not been read; return False if the tree will lack it."""
        if number not in self._nodes:
            sql = (
                f"SELECT exact, content, diverged, pinned FROM nodes WHERE id = ? AND tree = ? AND {is_whole('nodes')}"
            )
            row = self._database.row(sql, (number, self.tree.id))
            if row is None:
                return False
            self._nodes[number] = node_of(number, *row)
        return True

    def _read(self) -> Generator[bool, None, None]:
        """Add nodes and records with hits and visits, yielding between pages."""
        damaged = yield from self._read_nodes()
        uses_of = yield from self._uses()
        pending: list[_Row] = []
        quarantined = set[int]()
        # Records come in the order in which they were made, so nearly always one round adds all of them.
        for page in self._pages(f"SELECT {_COLUMNS} FROM records WHERE tree = ?"):
            whole = [row for row in page if row[13]]
            damaged += len(page) - len(whole)
            quarantined.update(row[0] for row in whole if row[15])
            pending += [row for row in whole if not self._add(row, uses_of)]
            yield True
        # What remains when a round adds nothing has no path from the root: such a node must not pass for a root itself.
        while pending:
            waiting = [row for row in pending if not self._add(row, uses_of)]
            if len(waiting) == len(pending):
                damaged += len(waiting)
                break
            pending = waiting
            yield True
        self._left_out(damaged)
        if damaged:
            log.error("rows of a tree are damaged, so their calls run again", tree=self.tree.id, rows=damaged)
        self._add_findings(quarantined)
        self.tree.complete()

    def _pages(self, sql: str) -> Iterator[list[_Row]]:
        """Yield the rows of a query over the tree in pages, ordered by their numbers, the first column."""
        last = -1
        while page := self._database.rows(f"{sql} AND id > ? ORDER BY id LIMIT {_PAGE_ROWS}", (self.tree.id, last)):
            yield page
            last = page[-1][0]

    def _read_nodes(self) -> Generator[bool, None, int]:
        """Read the nodes but for the root, yielding between pages; return how many rows are damaged."""
        damaged = 0
        sql = f"SELECT id, exact, content, diverged, pinned, {is_whole('nodes')} FROM nodes WHERE tree = ?"
        for page in self._pages(sql):
            for number, exact, content, diverged, pinned, whole in page:
                if whole and number != self.tree.root.id and number not in self._nodes:
                    self._nodes[number] = node_of(number, exact, content, diverged, pinned)
                damaged += not whole
            yield True
        return damaged

    def _uses(self) -> Generator[bool, None, defaultdict[int, Counter[int]]]:
        """Return how often the tree's rollouts use each record, in groups of close numbers. Yields between pages."""
        uses_of = defaultdict[int, Counter[int]](Counter)
        used = f"SELECT record FROM steps WHERE rollout = ? AND {is_whole('steps')}"
        counted = 0
        for page in self._pages("SELECT id FROM rollouts WHERE tree = ?"):
            for (rollout,) in page:
                # A page of long rollouts has many thousands of steps.
                if counted >= _STEPS_AT_ONCE:
                    counted = 0
                    yield True
                records = self._database.rows(used, (rollout,))
                counted += len(records)
                for (record,) in records:
                    uses_of[record // _RECORDS_OF_A_COUNT][record] += 1
            yield True
        return uses_of

    def _add(self, row: _Row, uses_of: defaultdict[int, Counter[int]]) -> bool:
        """Add a record, and its target if the tree lacks it; return False if the tree lacks its source."""
        tree = self.tree
        source = tree.nodes.get(row[2])
        target = tree.nodes.get(row[3]) or self._nodes.get(row[3])
        if source is None or target is None:
            return False
        if target.id not in tree.nodes:
            # The record is the node's origin: a private call leads to a node of its own, and nothing else ever does.
            tree.add_node(target, private=bool(row[7]))
        record = self._found.pop(row[0], None) or self._made(row, source, target)
        uses = uses_of[record.id // _RECORDS_OF_A_COUNT][record.id]
        # The first use is the miss that recorded it.
        record.hits += max(0, uses - 1)
        if not record.observation:
            record.target.visits += uses
        tree.add_record(record)
        if row[15] and source.records.get(record.key) is record:
            # It is in quarantine from the end on, and answers nothing until then.
            del source.records[record.key]
            tree.aside.append(record)
        return True

    @staticmethod
    def _made(row: _Row, source: Node, target: Node) -> Record:
        record = Record(
            row[0], CallKey(row[1]), source, target, Effect(row[4]), row[5], row[6],
            private=bool(row[7]), reproducible=bool(row[8]), proven=bool(row[14]),
            call=row[9], upload=row[10], answer=row[11], age_s=math.inf if row[12] is None else row[12],
        )  # fmt: skip
        # Whether an answer was doubtful is not stored: a target without a digest says enough to keep its state.
        record.doubtful = target.state is None and record.effect not in (Effect.NONE, Effect.PROCESSES)
        return record

    def _add_findings(self, quarantined: set[int]) -> None:
        """Mark the records that differ, and put those with these numbers in quarantine, also without a finding."""
        sql = f"SELECT record, why FROM findings WHERE tree = ? AND {is_whole('findings')}"
        findings = dict(self._database.rows(sql, (self.tree.id,)))
        numbers = quarantined | findings.keys()
        if not numbers:
            return
        records = {record.id: record for node in self.tree.nodes.values() for record in node.records.values()}
        records |= {record.id: record for record in self.tree.aside}
        for number in sorted(numbers & records.keys()):
            record = records[number]
            record.differs = findings.get(number, _FINDING_LOST)
            if number in quarantined:
                self.tree.quarantine(record, record.differs)


def node_of(number: int, exact: bytes | None, content: bytes | None, diverged: str, pinned: int) -> Node:
    """Return a node from its columns; content without exact is the witness of a state that has no digest."""
    if exact is None or content is None:
        return Node(number, witness=content, diverged=diverged, pinned=bool(pinned))
    return Node(number, state=StateDigest(exact, content), diverged=diverged, pinned=bool(pinned))
