"""Makes the views of nodes, trees and rollouts: positions come from the tree, calls and answers from the store."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from proxy.control.browsing import OwnPart
from proxy.control.paging import ListQuery, Page
from proxy.control.views import nodes as views
from proxy.control.views.answers import answer_view
from proxy.control.views.resources import SnapshotView, node_name
from proxy.control.views.rollouts import StepView
from proxy.dialects.shell import exit_code
from proxy.storage.records import marked_records
from proxy.storage.store import Store
from proxy.tree.rollout import Outcome
from proxy.tree.task import Task
from proxy.tree.tree import Node, Record, Tree
from sandboxes.calls import MARKS


def rollouts_by_node(task: Task) -> dict[Node, list[str]]:
    """Return the names of a task's running rollouts by the node that each is at."""
    names: dict[Node, list[str]] = {}
    for rollout in task.rollouts.values():
        names.setdefault(rollout.node, []).append(rollout.name)
    return names


class Reader:
    """Makes the views of nodes, trees and rollouts."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def tree(
        self, task: Task, tree: Tree, top: Node, *, depth: int | None, limit: int, own: OwnPart | None = None
    ) -> views.TreeView:
        """Return a view of a subtree of at most `limit` nodes and `depth` levels (None: all); with `own`, that part."""
        nodes: list[views.NodeView] = []
        truncated = False
        rollouts = rollouts_by_node(task)
        for node, _ in tree.walk(top, depth):
            if len(nodes) == limit:
                truncated = True
                break
            if own is None or node.id in own.nodes:
                nodes.append(views.NodeView(**self._node(node, rollouts.get(node, []), own)))
        return views.TreeView(task=task.name, root=node_name(tree.root), nodes=nodes, truncated=truncated)

    def detail(
        self,
        task: Task,
        node: Node,
        snapshot: SnapshotView | None,
        kept: str = "",
        passed: list[views.PassedRollout] | None = None,
    ) -> views.NodeDetail:
        """Return the full view of a node. `kept` says why the state is kept or not; `passed` reached the node last."""
        origin = node.origin
        return views.NodeDetail(
            **self._node(node, rollouts_by_node(task).get(node, [])),
            answer=None if origin is None else answer_view(self._store.records.result(origin)),
            recorded_at=None if origin is None else origin.recorded_at,
            passes=node.visits,
            diverged=node.diverged,
            unfreezable=node.unfreezable,
            snapshot_detail=snapshot,
            leads_to=sorted({node_name(r.target) for r in node.records.values() if not r.observation}),
            kept=kept,
            passed=passed or [],
        )

    def path(self, task: Task, node: Node, wanted: ListQuery) -> Page[views.NodeView]:
        """Return a page of the nodes from the root to a node, by the calls that first led to each. O(depth)."""
        nodes = [node]
        while nodes[-1].origin is not None:
            nodes.append(nodes[-1].origin.source)
        rollouts = rollouts_by_node(task)
        part = wanted.sorted_part(enumerate(nodes[::-1]), lambda step: (step[0],))
        return part.page(lambda step: views.NodeView(**self._node(step[1], rollouts.get(step[1], []))))

    def call(self, record: Record) -> views.CallView:
        """Return the view of a record's call."""
        return views.CallView.of(self._store.records.call(record))

    def steps(self, rollout: dict[str, Any], tree: Tree, wanted: ListQuery) -> Page[StepView]:
        """Return a page of the calls of a rollout; one whose record was forgotten has only its turn and outcome."""
        end, values = wanted.sql("turn")
        rows = self._store.rollouts.steps(rollout["id"], end, values)
        aside = {record.id: record for record in tree.aside}
        turns = [row[0] for row in rows]
        marked = marked_records(self._store.database, rollout["id"], min(turns), max(turns)) if turns else {}
        part = wanted.part(rows, rollout["calls"], lambda row: (row[0],))
        page = part.page(lambda row: self._step(*row, self.record(row[1], tree) or aside.get(row[1])))
        for step in page.items:
            step.marks = list(marked[step.record].marks) if step.record in marked else []
        return page

    def marks(self, rollout: Mapping[str, Any]) -> dict[str, int]:
        """Return how many of a rollout's calls have each mark, in O(calls). The one that lost its state counts too."""
        counts = Counter[str]({"machine": 1} if rollout["lost"] else {})
        for calls, marks in marked_records(self._store.database, rollout["id"]).values():
            counts.update(dict.fromkeys(marks, calls))
        return {mark: counts[mark] for mark in MARKS if counts[mark]}

    def record(self, number: int, tree: Tree) -> Record | None:
        """Return a record of a tree; None if it was forgotten or set aside."""
        origin = self._store.records.origin(number)
        source = None if origin is None else tree.nodes.get(origin[1])
        return None if source is None else next((r for r in source.records.values() if r.id == number), None)

    def _step(self, turn: int, number: int, outcome: int, record: Record | None) -> StepView:
        return StepView(
            turn=turn,
            outcome=Outcome(outcome).name.lower(),  # type: ignore[arg-type]
            record=number,
            call=None if record is None else self.call(record),
            effect=[] if record is None else record.effect.names,  # type: ignore[arg-type]
            seconds=0.0 if record is None else record.seconds,
            node=None if record is None else node_name(record.target),
            resources=None if record is None else self._resources(record),
        )

    def _node(self, node: Node, rollouts: list[str], own: OwnPart | None = None) -> dict[str, Any]:
        origin = node.origin
        return {
            **views.node_facts(node),
            "call": None if origin is None else self.call(origin),
            "exit_code": None if origin is None else exit_code(self._store.records.result(origin)),
            "rollouts": sorted(rollouts),
            "resources": None if origin is None else self._resources(origin),
            "observations": [
                self._observation(record)
                for record in node.records.values()
                if record.observation and (own is None or record.id in own.records)
            ],
        }

    def _observation(self, record: Record) -> views.ObservationView:
        return views.ObservationView(
            record=record.id,
            call=self.call(record),
            seconds=record.seconds,
            hits=record.hits,
            exit_code=exit_code(self._store.records.result(record)),
            resources=self._resources(record),
        )

    def _resources(self, record: Record) -> views.ResourcesView | None:
        return views.ResourcesView.of(self._store.records.resources(record))
