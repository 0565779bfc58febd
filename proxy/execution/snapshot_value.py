"""The worth of snapshots: what the tree knows of how often a state is needed and what reaching it costs otherwise.

A snapshot is worth the seconds that it saves at each use, times the uses to expect (`snapshots.policy`):

- *Saved seconds.* The cheapest other way to the node (`plan_restore` without its snapshot), plus the risk that its
  replay diverges, minus the restore.
- *Expected uses.* Rollouts that are above the node in the tree may still come to it (`_behind`). How many of them need
  a sandbox there follows from this node's history (visits and demand) and from that of all nodes (`Reuse`).
- *No other way.* A state that no replay reaches has only its snapshot. While a replay is only expected to reach a
  state, its snapshot is kept for `proxy.audit.prover` to try the replay, and as long as a rollout needs it.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import chain

from proxy.execution.open_trees import OpenTrees
from proxy.telemetry.counters import Counters
from proxy.tree.restore_plan import RestorePlan, kind_of, plan_restore
from proxy.tree.task import Walkers
from proxy.tree.tree import Node, Tree
from snapshots.cache import SnapshotCache
from snapshots.costs import SnapshotKind
from snapshots.policy import Prospect, Reuse, at_stake_s, expected_uses, is_cheap, why, worth_keeping
from snapshots.snapshot import Snapshot, snapshot_kind

_LOOK_BACK = 100
"""How many calls above a state rollouts count as coming to it.

A rollout farther above leaves the path before it with near certainty. With far fewer, the rollouts of a group that is
just starting are not seen."""
ABANDONED = "its snapshot was given up when the budget was exceeded, and no replay is known to reach it"
"""Why a node was set aside that no rollout needed."""
_READ_BACK = 8
"""How many trees are brought into memory at once to see whether their snapshots can go. A large one takes seconds."""


class SnapshotValue:
    """Values the snapshots of all trees, those that could be taken too."""

    def __init__(
        self,
        cache: SnapshotCache,
        counts: Counters,
        walkers: Walkers,
        trees: OpenTrees,
        stored: Callable[[int], Iterable[Node]],
        save_set_aside: Callable[[list[Node]], object] | None = None,
    ) -> None:
        """Value the snapshots of a cache. `stored` returns a tree's nodes with running rollouts, in memory or not.

        `save_set_aside` saves nodes whose snapshots are given up; None where only records with a way back answer calls.
        """
        self._cache, self._counts, self._walkers, self._trees = cache, counts, walkers, trees
        self._stored, self._save_set_aside = stored, save_set_aside
        self.reuse = Reuse()  # How often nodes needed a sandbox again, learnt over all nodes made in this process.

    def note_demand(self, node: Node) -> None:
        """Note that a rollout needed a sandbox at a node and none was there."""
        node.demand += 1
        # The root needs a sandbox for each rollout anyway; it would drown what other nodes teach.
        if node.origin is not None:
            self.reuse = self.reuse.demanded()

    def worth_freezing(self, node: Node, tree: Tree) -> bool:
        """Return whether a snapshot of the node is worth what taking it costs."""
        # Cheap tests first: they decide for most nodes.
        if tree.spec.cache == "never" or node.snapshot is not None or node.detached or node.unfreezable:
            return False
        # Which turns of a harness are kept is what its spec says.
        if (
            tree.spec.harness is not None
            and node.state is None
            and node.origin is not None
            and not node.origin.reproducible
        ):
            return False
        if not node.weighed:
            # Once for each node: the statistics are over nodes, however many calls they answer.
            node.weighed = True
            self.reuse = self.reuse.made(self._behind(node, tree.id))
        kind, driver = kind_of(node), tree.spec.driver
        if not self._cache.accepts(kind, tree.id):
            return False
        # The freeze itself is the price; the bytes are limited by the budget (`SnapshotCache.fit`).
        costs = self._cache.costs[driver]
        cost_s = costs.of(kind).freeze.seconds
        # Another member can have no other way to a state that no replay surely reaches.
        if kind == "files" and self._save_set_aside is not None and not self.is_proven(node, driver):
            return True
        # A checkpoint stops live processes for a while, so it is never cheap.
        if kind == "files" and node.origin is not None:
            made_s = node.origin.seconds + costs.replay_overhead.seconds
            if is_cheap(self.reuse, cost_s=cost_s, made_s=made_s):
                return True
        return worth_keeping(self._prospect(node, tree.id, driver, kind), cost_s=cost_s)

    async def read_back(self, snapshots: Iterable[Snapshot]) -> bool:
        """Bring some of the trees of these snapshots into memory that are not there; return whether there were any."""
        closed = dict.fromkeys(snapshot.tree for snapshot in snapshots if self._trees.get(snapshot.tree) is None)
        for tree_id in list(closed)[:_READ_BACK]:
            if self._trees.exists(tree_id):
                await self._trees.read_back(tree_id)
            else:
                self._cache.drop_tree(tree_id)
        return bool(closed)

    def node(self, snapshot: Snapshot) -> Node | None:
        """Return the node of a snapshot; None if it is not in memory or has been forgotten."""
        tree = self._trees.get(snapshot.tree)
        return None if tree is None else tree.nodes.get(snapshot.node)

    def prospect(self, snapshot: Snapshot) -> Prospect | None:
        """Return what is known of a snapshot, but for whether it is needed; None if its tree is not in memory."""
        if self._trees.get(snapshot.tree) is None:
            return None
        node = self.node(snapshot)
        # A forgotten node is worth nothing: its snapshot is the first to be evicted.
        if node is None:
            return Prospect(snapshot.id, 0.0, 0.0, snapshot.size_bytes, snapshot.parts)
        return self._prospect(node, snapshot.tree, snapshot.driver, snapshot_kind(snapshot), snapshot)

    def prospects(self, snapshots: Iterable[Snapshot]) -> list[Prospect]:
        """Return what is known of the snapshots whose trees are in memory. O(snapshots + their rollouts' suffixes)."""
        needed: dict[int, set[Node]] = {}
        prospects = []
        for snapshot in snapshots:
            prospect = self.prospect(snapshot)
            if prospect is not None:
                if snapshot.tree not in needed:
                    needed[snapshot.tree] = self._needed(snapshot.tree)
                prospects.append(replace(prospect, needed=self.node(snapshot) in needed[snapshot.tree]))
        return prospects

    def give_up(self, snapshot: Snapshot) -> None:
        """Lead no rollout to the node of a snapshot that goes, because no other way to it is known."""
        tree, node = self._trees.get(snapshot.tree), self.node(snapshot)
        if self._save_set_aside is None or tree is None or node is None or node.origin is None or node.diverged:
            return
        self._save_set_aside(tree.set_aside(node.origin, ABANDONED))

    def explain(self, node: Node, tree: Tree) -> str:
        """Return a sentence that says why the node's state is kept, or why not."""
        snapshot = self._cache.of(node)
        if snapshot is not None:
            prospect = self._prospect(node, tree.id, snapshot.driver, snapshot_kind(snapshot), snapshot)
            return f"kept: {why(prospect)}"
        if node.unfreezable:
            return f"not kept: it cannot be frozen: {node.unfreezable}"
        if tree.spec.cache == "never":
            return "not kept: the task's calls are never cached"
        kind, driver = kind_of(node), tree.spec.driver
        prospect = self._prospect(node, tree.id, driver, kind)
        if not prospect.reproducible:
            return "not kept, and no replay reaches it: the state exists only in its sandbox, if that still runs"
        cost_s = self._cache.costs[driver].of(kind).freeze.seconds
        return f"not kept: {why(prospect)}, and keeping it takes {cost_s:.3g} s; it is rebuilt by replay"

    def is_last_way(self, node: Node, tree: Tree) -> bool:
        """Return whether a sandbox at the node may be all that is left of a state that a running rollout needs."""
        return self._may_be_lost(node, tree) and node in self._needed(tree.id)

    def is_last_way_of_others(self, node: Node, tree: Tree, rollout: int | None) -> bool:
        """Return whether a sandbox at the node may be all that is left of the state of a rollout but this one."""
        others = (other.id != rollout for other in self._walkers.of(tree.id) if other.node is node)
        return any(others) and self._may_be_lost(node, tree)

    def _may_be_lost(self, node: Node, tree: Tree) -> bool:
        """Return whether no snapshot has the node's state, and no replay is known to reach it."""
        if tree.spec.cache == "never" or node.origin is None or node.snapshot is not None or node.detached:
            return False
        return not node.diverged and not self.is_proven(node, tree.spec.driver)

    def can_freeze(self, node: Node) -> bool:
        """Return whether a snapshot of the node can be taken, as far as is known, and has room."""
        return not node.unfreezable and self._cache.accepts(kind_of(node))

    def is_proven(self, node: Node, driver: str) -> bool:
        """Return whether the node is known to be reached without its snapshot: each call was replayed before."""
        return self._way_without(node, driver, proven=True) is not None

    def _prospect(
        self, node: Node, tree_id: int, driver: str, kind: SnapshotKind, snapshot: Snapshot | None = None
    ) -> Prospect:
        # The other way decides: a snapshot is worth what it saves against the cheapest replay.
        plan = self._way_without(node, driver)
        saved_s = risk_s = 0.0
        if plan is not None:
            risk_s = self._risk_s(plan) if plan.suffix else 0.0
            # Never negative: a snapshot that is slower than a replay is worth nothing, not less than nothing.
            saved_s = max(0.0, plan.cost_s + risk_s - self._cache.costs[driver].of(kind).restore.seconds)
        held = ""
        if snapshot is not None:
            # A pin is a person's wish and a lease is a restore under way; both end eviction.
            held = "pinned" if node.pinned else "leased" if snapshot.leases else ""
        behind = self._behind(node, tree_id)
        is_proven = plan is not None and (all(record.proven for record in plan.suffix) or self.is_proven(node, driver))
        return Prospect(
            "" if snapshot is None else snapshot.id,
            saved_s=saved_s,
            uses=expected_uses(self.reuse, behind=behind, visits=node.visits, demand=node.demand),
            size_bytes=0 if snapshot is None else snapshot.size_bytes,
            parts=() if snapshot is None else snapshot.parts,
            reproducible=plan is not None,
            proven=is_proven,
            held=held,
            risk_s=min(risk_s, saved_s),
            doubtful=kind == "files" and plan is not None and any(record.doubtful for record in plan.suffix),
        )

    def _risk_s(self, plan: RestorePlan) -> float:
        """Return the seconds that a replay loses on average because it may diverge."""
        replayed, diverged = self._counts.replayed_calls, self._counts.divergences
        return at_stake_s(replayed=replayed, diverged=diverged, doubtful=sum(record.doubtful for record in plan.suffix))

    def _behind(self, node: Node, tree_id: int) -> int:
        """Return how many running rollouts may still come to the node: the rollouts on its path from the root."""
        # Rollouts at the node itself count among its visits already.
        rollouts_at = Counter(rollout.node for rollout in self._walkers.of(tree_id) if rollout.node is not node)
        behind, above = 0, node.origin
        # The walk ends once every rollout has been counted. Most are on other paths, so it ends anyway.
        for _ in range(_LOOK_BACK):
            if not rollouts_at or above is None:
                break
            source = above.source
            # One look-up: most nodes of the path have no rollout.
            if source in rollouts_at:
                behind += rollouts_at.pop(source)
            above = source.origin
        return behind

    def _needed(self, tree_id: int) -> set[Node]:
        """Return the nodes from each running rollout of a tree up to the nearest snapshot, or to the root."""
        # Records that answer calls without a known way back may lead rollouts anywhere on the path.
        paths = self._save_set_aside is not None
        needed: set[Node] = set()
        positions = (rollout.node for rollout in self._walkers.of(tree_id))
        for position in chain(positions, self._stored(tree_id)):
            at: Node | None = position
            # Each node is walked up once, however many rollouts share the path.
            while at is not None and at not in needed:
                needed.add(at)
                at = None if at.origin is None or (at.snapshot is not None and not paths) else at.origin.source
        return needed

    def _way_without(self, node: Node, driver: str, *, proven: bool = False) -> RestorePlan | None:
        """Return the cheapest way to the node without its snapshot or a sandbox that happens to be there, if any."""
        # Idle sandboxes do not count: they may be gone when the snapshot is needed.
        return plan_restore(
            node, idle_at=lambda _: False, costs=self._cache.costs[driver], avoid=(node,), proven=proven
        )
