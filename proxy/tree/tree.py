"""The tree of one root state: nodes are sandbox states, records are the calls made at them.

1. A call that changed nothing makes an *observation*: its record leads back to its own node.
2. Any other call leads to a new node, or to the node that already has the state it reached. Different histories then
   meet, and the tree becomes a graph. The `origin` links (the record that first reached a node) still form a tree, and
   a node's `path` follows them.
3. Merging needs a state digest. Without one (live processes run, or directories are too deep) each call leads to
   a new node.
4. A *private* record serves one rollout only. It has a key that no lookup uses, and its node never merges.
5. A record whose target cannot be rebuilt is *set aside*: it answers no calls any more, and the nodes behind it are
   marked as diverged. Rollouts that are there go on; no other rollout gets there.
6. A *quarantined* call is one that an audit found to be answered differently: at this node it always runs again.

Everything here runs without `await` on one thread, so no lock guards a tree.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from proxy.tree.keys import CallKey
from sandboxes.calls import Execution, ToolCall
from sandboxes.effects import Effect, StateDigest
from sandboxes.spec import EnvironmentSpec


@dataclass(slots=True, eq=False)
class Node:
    """A sandbox state."""

    id: int  # Unique in the store.
    origin: "Record | None" = None  # The record that first reached the node; None for the root only.
    state: StateDigest | None = None  # None without a digest: live processes run, or directories are too deep.
    # Without a digest: digest of the files and sessions that a replay must reach; None if not known.
    witness: bytes | None = None
    records: "dict[CallKey, Record]" = field(default_factory=dict)  # Records of the calls made here, by key.
    snapshot: str | None = None  # Id of the snapshot that holds the state; None without one.
    kept_age_s: float = 0.0  # For how long the live processes of the snapshot had run when it was taken.
    pinned: bool = False  # Whether the snapshot is never evicted.
    visits: int = 0  # Number of rollouts that have stepped onto the node.
    demand: int = 0  # How often a rollout needed a sandbox here and there was none.
    weighed: bool = False  # Whether a snapshot was considered; once for each node, for the statistics.
    still: bool = False  # Whether live processes stand still between calls, so that none of them grows old.
    unfreezable: str = ""  # Why the driver cannot freeze the state; empty if nothing is known against it.
    diverged: str = ""  # Why the state cannot be rebuilt; empty if nothing is known against it.
    detached: bool = False  # Whether the node has been forgotten. Rollouts may still point at it.
    quarantined: frozenset[CallKey] = frozenset()  # Keys of calls that are never answered from the tree here.


@dataclass(slots=True, eq=False)
class Record:
    """One recorded call: made at `source`, it led to `target`."""

    id: int  # Unique in the store.
    key: CallKey  # The call is looked up by it at `source`.
    source: Node
    target: Node  # `source` itself for an observation.
    effect: Effect
    seconds: float  # How long the tool ran.
    recorded_at: float  # Unix time at which the call ended.
    private: bool = False  # Whether the record serves one rollout only.
    hits: int = 0  # How often the record has answered a call.
    # Whether a replay may be expected to reach `target`. False once a replay reached another state.
    reproducible: bool = True
    proven: bool = False  # Whether a replay reached `target`, at least `PROOF_AGE_S` after the call was recorded.
    # Whether a replay may well diverge (see `doubtful`). False once a replay did reach `target`.
    doubtful: bool = False
    differs: str = ""  # How the call was answered in an audit; empty if no audit found a difference.
    # For how long background processes had been running when the call was made (`Rollout.age_s`). Infinite if that is
    # not known, as in files of older exports.
    age_s: float = math.inf
    call: int = 0  # Number of the call's blob in the store; 0 before it is stored.
    upload: int = 0  # Number of the uploaded body's blob; 0 without one.
    answer: int = 0  # Number of the result's blob; 0 before it is stored.

    @property
    def observation(self) -> bool:
        """Whether the call changed nothing."""
        return self.target is self.source

    @property
    def repeatable(self) -> bool:
        """Whether an audit may run the call again: not a turn of a harness, which draws ids and reads clocks."""
        return self.reproducible or not self.target.still

    def repeated(self, now: float) -> bool:
        """Note that another execution reached `target` at this Unix time; return whether that proves the record."""
        self.doubtful = False
        if self.proven or now - self.recorded_at < PROOF_AGE_S:
            return False
        self.proven = True
        return True


PROOF_AGE_S = 61.0
"""How long after a call a replay must begin to prove its record: a state that shows the minute differs by then."""
_UNREPEATABLE = re.compile(rb"[0-9]{10}|[0-9]\.[0-9]{6}|[0-9a-f]{12}|[0-9]{2}:[0-9]{2}:[0-9]{2}", re.IGNORECASE)
"""Times, random numbers and ids in an answer: a second run would hardly repeat them."""
_SEARCHED_BYTES = 1 << 16
"""How much of an answer is searched for them: 64 KiB take less than a millisecond."""
_FORWARDED = frozenset({"target", "server"})
"""Arguments that only calls to a tool server or an MCP server have."""


def doubtful(call: ToolCall, execution: Execution) -> bool:
    """Return whether a replay of a call may well fail to reach the recorded state.

    A call that used the clock or random numbers is doubtful, as far as its driver can tell. Beside live processes a
    replay must repeat the whole answer, so every state change is doubtful. The exception are calls to a server that
    wrote no file, if nothing in the answer looks random or timed: no rollout was shown what they leave in the server's
    memory. They are doubtful all the same if another process may be writing files (`restless`): a replay comes at
    another moment and would find other files.
    """
    if execution.volatile and execution.effect:
        return True
    if execution.state is not None or not execution.effect:
        return False
    plain = execution.effect is Effect.PROCESSES and not _FORWARDED.isdisjoint(call.arguments)
    plain = plain and not execution.restless
    return not plain or _UNREPEATABLE.search(execution.result.body[:_SEARCHED_BYTES]) is not None


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a call leads: to a known node, or to a new node with this state (`known` is None)."""

    known: Node | None
    state: StateDigest | None


class Unread(Protocol):
    """What the store has of a tree that is being read back, and memory has not yet."""

    def record(self, node: Node, key: CallKey) -> Record | None:
        """Return the record of a call at a node, if the whole tree will surely have it there; else None."""
        ...

    def node(self, number: int) -> Node | None:
        """Return a node with its path from the root, if the whole tree will surely have both; else None."""
        ...


class Tree:
    """All nodes and records of one root state."""

    def __init__(
        self, tree_id: int, root: Node, spec: EnvironmentSpec, key: str = "", unread: Unread | None = None
    ) -> None:
        # `key` is the digest of the spec and of what it referred to when the tree began (`keys.root_key`).
        self.unread = unread  # None once the tree is whole.
        self.id, self.root, self.spec, self.key = tree_id, root, spec, key
        self.nodes: dict[int, Node] = {root.id: root}  # By number, diverged ones included.
        self.aside: list[Record] = []  # Records that are set aside.
        self.size = 1  # Number of nodes and records ever added.
        self.forgotten = 0  # Number of those that were forgotten since.
        self._by_state: dict[bytes, Node] = {}
        self._index(root)

    def complete(self) -> None:
        """Note that all nodes and records of the store are in the tree."""
        self.unread = None

    def record(self, node: Node, key: CallKey) -> Record | None:
        """Return the record of a call at a node; of a tree that is not whole, only one that it will surely have."""
        record = node.records.get(key)
        return record if record is not None or self.unread is None else self.unread.record(node, key)

    def node(self, number: int) -> Node | None:
        """Return a node by its number; of a tree that is not whole, only one that it will surely have."""
        node = self.nodes.get(number)
        return node if node is not None or self.unread is None else self.unread.node(number)

    def destination(
        self, source: Node, effect: Effect, state: StateDigest | None, *, private: bool = False
    ) -> Destination:
        """Return where a call at a node with this effect and state leads. Changes nothing. O(1)."""
        if not effect:
            return Destination(source, source.state)
        # A rollout of a harness is entered again at a turn of its own path, so no two paths meet.
        merges = self.spec.merge == "on" and self.spec.harness is None
        if private or source.diverged or state is None or not merges:
            return Destination(None, state)
        return Destination(self._by_state.get(state.exact), state)

    def add_node(self, node: Node, *, private: bool = False) -> None:
        """Add a node. The record that leads to it must follow before the next `await`. A private node never merges."""
        self.nodes[node.id] = node
        node.still = self.spec.stands_still
        self.size += 1
        if not private and not node.diverged:
            self._index(node)

    def add_record(self, record: Record) -> None:
        """Add a record to its source, and as the origin of a new node. Raises ValueError if its key is taken."""
        if record.key in record.source.records:
            raise ValueError(f"node n{record.source.id} has a record under this key already")
        self.size += 1
        # A tree that is read back: what was set aside then is set aside now.
        if record.target.diverged and not record.source.diverged:
            self.aside.append(record)
        else:
            record.source.records[record.key] = record
        if record.target.origin is None and record.target is not self.root:
            record.target.origin = record

    def rekey(self, record: Record, key: CallKey) -> None:
        """Move a record to a key that no call has: it answers nothing more, and stays a step of the path."""
        if record.source.records.get(record.key) is record:
            del record.source.records[record.key]
            record.source.records[key] = record
        # Private: neither an audit nor an export may read its answer.
        record.key, record.private = key, True

    def set_root_state(self, state: StateDigest | None) -> None:
        """Give the root its digest, which is first known when a sandbox in the root state is frozen."""
        self.root.state = state
        self._index(self.root)

    def forget(self, node: Node) -> tuple[list[Node], list[Record]]:
        """Remove a node, not the root, with all that came from it and every record that leads there; return them."""
        if node is self.root:
            raise ValueError("the root cannot be forgotten; delete the task instead")
        gone = self.closure(node)
        # Merging: records outside the closure may lead into it.
        records = [r for n in self.nodes.values() for r in n.records.values() if r.target in gone or r.source in gone]
        records += [r for r in self.aside if r.target in gone or r.source in gone]
        self.aside = [r for r in self.aside if r.target not in gone and r.source not in gone]
        for record in records:
            record.source.records.pop(record.key, None)
        for lost in gone:
            lost.detached = True
            del self.nodes[lost.id]
            self._unindex(lost)
        self.forgotten += len(gone) + len(records)
        return sorted(gone, key=lambda n: n.id), records

    def set_aside(self, record: Record, why: str) -> list[Node]:
        """Answer no more calls from a record, because its target cannot be rebuilt. People are shown why.

        Returns the target and all nodes that came from it: marked as diverged, and kept for rollouts that are there.
        """
        lost = sorted(self._offspring(record.target), key=lambda n: n.id)
        for node in lost:
            node.diverged = node.diverged or why
            self._unindex(node)
        # Every record that leads in from outside goes too: merged histories would lead there as well.
        for node in self.nodes.values():
            for entry in [r for r in node.records.values() if r.target.diverged and not node.diverged]:
                del node.records[entry.key]
                self.aside.append(entry)
        return lost

    def quarantine(self, record: Record, why: str) -> list[Node]:
        """Answer no more calls from a record that an audit found to differ, nor from later ones of the same call here.

        Returns the nodes that can no longer be rebuilt, because the record is their origin.
        """
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
        """Yield nodes with their depth below `top` (the root if None), parents before children. O(nodes yielded)."""
        stack = [(top or self.root, 0)]
        while stack:
            node, below = stack.pop()
            yield node, below
            if depth is None or below < depth:
                stack.extend((child, below + 1) for child in reversed(children(node)))

    def check(self) -> None:
        """Assert every invariant of the tree. O(size of the tree)."""
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
        """Return a node and all that came from it, nodes that were set aside too. O(size of the tree)."""
        nodes = self._offspring(top)
        # A record that is set aside is no longer at its source, so its target is not among the source's children.
        hidden: dict[Node, list[Node]] = {}
        for record in self.aside:
            if record.target.origin is record:
                hidden.setdefault(record.source, []).append(record.target)
        pending = list(nodes) if hidden else []
        while pending:
            for lost in hidden.get(pending.pop(), ()):
                more = self._offspring(lost) - nodes
                nodes |= more
                pending.extend(more)
        return nodes

    def _offspring(self, top: Node) -> set[Node]:
        return {node for node, _ in self.walk(top)}

    def _index(self, node: Node) -> None:
        if node.state is not None and self.spec.merge == "on":
            self._by_state.setdefault(node.state.exact, node)

    def _unindex(self, node: Node) -> None:
        if node.state is not None and self._by_state.get(node.state.exact) is node:
            del self._by_state[node.state.exact]


def children(node: Node) -> list[Node]:
    """Return the nodes whose origin is a record at this node."""
    return [r.target for r in node.records.values() if r.target.origin is r]


def path(node: Node) -> list[Record]:
    """Return the records that lead from the root to a node, the node's own origin first. O(depth): not for hits."""
    steps = []
    origin = node.origin
    while origin is not None:
        steps.append(origin)
        origin = origin.source.origin
    return steps
