"""The tree of one task and one root state: nodes are sandbox states, records are the calls made at them (pure).

A record whose call changed nothing is an observation: it leads back to its own node. Any other leads to a child, or to
the node that already stands for the state it reached: different histories then meet, and the tree becomes a graph whose
`origin` links still form a tree. All functions here run without `await`, so no lock guards a tree.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from proxy.tree.keys import CallKey
from sandboxes.calls import Execution, ToolCall
from sandboxes.effects import Effect, StateDigest
from sandboxes.spec import EnvironmentSpec


@dataclass(slots=True, eq=False)
class Node:
    """A sandbox state.

    origin: the record that first reached it; None for the root alone.
    witness: where there is no state digest, what a replay must reach all the same; None where nothing is known.
    snapshot: id of the snapshot that holds it, if one does.
    young: whether what came to live with it may have been on its way when its calls were made: see `Rollout.key_of`.
    passes: how many rollouts have stepped onto it. wanted: how often a sandbox was wanted here and none stood here.
    weighed: whether it was thought about keeping it: once for each node, for the statistics.
    unfreezable: why no snapshot can be taken; empty while nothing is known against it.
    diverged: why its recorded state could not be rebuilt; empty while nothing is known against it.
    quarantined: calls that are never answered from the tree here: an audit found that they answer differently.
    """

    id: int
    origin: "Record | None" = None
    state: StateDigest | None = None
    witness: bytes | None = None
    records: "dict[CallKey, Record]" = field(default_factory=dict)
    snapshot: str | None = None
    pinned: bool = False
    settling: bool = False
    visits: int = 0
    demand: int = 0
    weighed: bool = False
    unfreezable: str = ""
    diverged: str = ""
    detached: bool = False
    quarantined: frozenset[CallKey] = frozenset()


@dataclass(slots=True, eq=False)
class Record:
    """One recorded call: made at `source`, it led to `target`.

    call, upload, answer: where the store keeps them; 0 before it does, and for a call that uploads nothing.
    seconds: what the tool took when it ran. hits: how often it was answered from here since.
    reproducible: False once a replay of it reached another state than `target`. doubtful: see `doubtful`; no longer
        once a replay did reach it. differs: how an audit found that it does not come again; empty while it did not.
    age_s: for how long its rollout had stood at source when it was made; long ago where nobody knows any more.
    """

    id: int
    key: CallKey
    source: Node
    target: Node
    effect: Effect
    seconds: float
    recorded_at: float
    private: bool = False
    hits: int = 0
    reproducible: bool = True
    doubtful: bool = False
    differs: str = ""
    dwell_s: float = math.inf
    call: int = 0
    upload: int = 0
    answer: int = 0

    @property
    def observation(self) -> bool:
        return self.target is self.source


_LOOKS_DRAWN = re.compile(rb"[0-9]{10}|[0-9]\.[0-9]{6}|[0-9a-f]{12}|[0-9]{2}:[0-9]{2}:[0-9]{2}", re.IGNORECASE)
"""Times, random numbers, ids: a second run would hardly say them again."""
_LOOKED_AT_BYTES = 1 << 16
_FORWARDED = frozenset({"target", "server"})
"""What the arguments of a call to a tool server, or to an MCP server, have, and no other's."""


def doubtful(call: ToolCall, execution: Execution) -> bool:
    """Say whether a replay may well fail to reach what execution reached: it is beside live processes, and then all
    that was told must come again.

    Calls to a server that wrote no file and told nothing that looks drawn or timed are not in doubt: a replay that
    leaves other things in its memory, of which nobody was told, is as good as the first run. Unless something beside
    may be writing files meanwhile: a replay is given at another moment, and would find others.
    """
    if execution.state is not None or not execution.effect:
        return False
    plain = execution.effect is Effect.PROCESSES and not _FORWARDED.isdisjoint(call.arguments)
    plain = plain and not execution.restless
    return not plain or _LOOKS_DRAWN.search(execution.result.body[:_LOOKED_AT_BYTES]) is not None


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a call leads: to a node that is known, or to a new one of this state."""

    known: Node | None
    state: StateDigest | None


class Tree:
    """All that is known of one root state, the one that `spec` builds.

    key: names that state: a digest of the spec, and of what the spec named when the tree began. size: nodes and records
    ever added.
    """

    def __init__(self, tree_id: int, root: Node, spec: EnvironmentSpec, key: str = "") -> None:
        self.id, self.root, self.spec, self.key = tree_id, root, spec, key
        self.nodes: dict[int, Node] = {root.id: root}
        self.aside: list[Record] = []
        self.size = 1
        self._by_state: dict[bytes, Node] = {}
        self._index(root)

    def destination(
        self, source: Node, effect: Effect, state: StateDigest | None, *, private: bool = False
    ) -> Destination:
        """Say where a call at source with this effect leads; nothing changes. O(1)."""
        if not effect:
            return Destination(source, source.state)
        if private or source.diverged or state is None or self.spec.merge == "off":
            return Destination(None, state)
        return Destination(self._by_state.get(state.exact), state)

    def add_node(self, node: Node, *, private: bool = False) -> None:
        """Add a node; the record that leads to it must follow before the next `await`. A private one never merges."""
        self.nodes[node.id] = node
        self.size += 1
        if not private and not node.diverged:
            self._index(node)

    def add_record(self, record: Record) -> None:
        """Hang record on its source. The first record to reach a node becomes its origin."""
        if record.key in record.source.records:
            raise ValueError(f"node n{record.source.id} has a record under this key already")
        self.size += 1
        if record.target.diverged and not record.source.diverged:
            self.aside.append(record)
        else:
            record.source.records[record.key] = record
        if record.target.origin is None and record.target is not self.root:
            record.target.origin = record

    def set_root_state(self, state: StateDigest | None) -> None:
        """Take the root's digest, which is learnt when its first sandbox stands."""
        self.root.state = state
        self._index(self.root)

    def forget(self, node: Node) -> tuple[list[Node], list[Record]]:
        """Remove node and all that came from it, with every record that leads there. O(size of the tree).

        Raises:
            ValueError: node is the root.
        """
        if node is self.root:
            raise ValueError("the root cannot be forgotten; delete the task instead")
        gone = self.closure(node)
        records = [r for n in self.nodes.values() for r in n.records.values() if r.target in gone or r.source in gone]
        records += [r for r in self.aside if r.target in gone or r.source in gone]
        self.aside = [r for r in self.aside if r.target not in gone and r.source not in gone]
        for record in records:
            record.source.records.pop(record.key, None)
        for lost in gone:
            lost.detached = True
            del self.nodes[lost.id]
            self._unindex(lost)
        return sorted(gone, key=lambda n: n.id), records

    def set_aside(self, record: Record, why: str) -> list[Node]:
        """Take record out of the answers because its target cannot be rebuilt; return the nodes that fall with it.

        They stay in memory and in the views, for the rollouts that stand there; no other rollout gets in.
        """
        lost = sorted(self._offspring(record.target), key=lambda n: n.id)
        for node in lost:
            node.diverged = node.diverged or why
            self._unindex(node)
        for node in self.nodes.values():
            for entry in [r for r in node.records.values() if r.target.diverged and not node.diverged]:
                del node.records[entry.key]
                self.aside.append(entry)
        return lost

    def quarantine(self, record: Record, why: str) -> list[Node]:
        """Answer nobody from record any more, nor from what this call is recorded as here later; return the nodes that
        fall with it."""
        source = record.source
        record.differs = why
        source.quarantined |= {record.key}
        lost: list[Node] = []
        if not record.observation and record.target.origin is record and not record.target.diverged:
            lost = self.set_aside(record, why)
        if source.records.get(record.key) is record:
            del source.records[record.key]
            self.aside.append(record)
        return lost

    def walk(self, top: Node | None = None, depth: int | None = None) -> Iterator[tuple[Node, int]]:
        """Yield nodes with their depth below top, parents first, in the order in which they were found."""
        stack = [(top or self.root, 0)]
        while stack:
            node, below = stack.pop()
            yield node, below
            if depth is None or below < depth:
                stack.extend((child, below + 1) for child in reversed(children(node)))

    def check(self) -> None:
        """Assert every invariant of the tree. O(size)."""
        assert self.nodes[self.root.id] is self.root
        assert self.root.origin is None
        for node in self.nodes.values():
            assert not node.detached
            seen = set()
            for step in path(node):
                assert step.target.id not in seen
                seen.add(step.target.id)
                assert step.source.id in self.nodes
            for key, record in node.records.items():
                assert record.key == key
                assert record.source is node
                assert self.nodes[record.target.id] is record.target
                assert record.observation or record.effect
                assert not record.target.diverged or node.diverged
        for exact, node in self._by_state.items():
            assert node.state is not None
            assert node.state.exact == exact
            assert self.nodes[node.id] is node
            assert not node.diverged

    def closure(self, top: Node) -> set[Node]:
        """Return top and all that came from it, what was set aside too. O(size of the tree)."""
        found = self._offspring(top)
        hidden: dict[Node, list[Node]] = {}
        for record in self.aside:
            if record.target.origin is record:
                hidden.setdefault(record.source, []).append(record.target)
        pending = list(found) if hidden else []
        while pending:
            for lost in hidden.get(pending.pop(), ()):
                more = self._offspring(lost) - found
                found |= more
                pending.extend(more)
        return found

    def _offspring(self, top: Node) -> set[Node]:
        return {node for node, _ in self.walk(top)}

    def _index(self, node: Node) -> None:
        if node.state is not None and self.spec.merge == "on":
            self._by_state.setdefault(node.state.exact, node)

    def _unindex(self, node: Node) -> None:
        if node.state is not None and self._by_state.get(node.state.exact) is node:
            del self._by_state[node.state.exact]


def children(node: Node) -> list[Node]:
    """Return the nodes whose first history goes through node."""
    return [r.target for r in node.records.values() if r.target.origin is r]


def path(node: Node) -> list[Record]:
    """Return the records of node's first history, node's own origin first. O(depth): never on the way of a hit."""
    steps = []
    origin = node.origin
    while origin is not None:
        steps.append(origin)
        origin = origin.source.origin
    return steps
