"""What the control plane shows: the shapes of its answers, and how they are read off the tree."""

import contextlib
from typing import Any, Literal

import orjson
from pydantic import BaseModel, Field

from proxy.control.call_titles import exit_code
from proxy.control.views.resources import SnapshotView, node_name
from proxy.storage.store import Store
from proxy.tree.rollout import Outcome, Rollout
from proxy.tree.task import Task
from proxy.tree.tree import Node, Record, Tree, children
from sandboxes.calls import ToolResult
from sandboxes.spec import EnvironmentSpec

EffectName = Literal["none", "files", "session", "processes", "database", "unknown"]
Flag = Literal["pinned", "diverged", "unreproducible", "private"]
SHOWN_CHARS = 64 << 10
"""Of a text in an answer; the rest is downloaded."""
_SHOWN_ITEMS = 1000
_SHOWN_DEPTH = 60
"""Far below what the interpreter and JSON's readers bear."""
_PARSED_BYTES = 16 << 20


class CallView(BaseModel):
    """A tool call as the agent made it. upload_bytes: of the body that came with it."""

    endpoint: str
    tool: str
    arguments: dict[str, Any]


class AnswerView(BaseModel):
    """A recorded answer. Text and JSON are shown, other bytes only by their size.

    truncated: long texts in it are cut, and `…/answer` has all of it.
    """

    status: int
    media_type: str
    size_bytes: int
    truncated: bool = False
    json_: Any = Field(default=None, serialization_alias="json")
    text: str | None = None


class ObservationView(BaseModel):
    """A call that changed nothing. seconds: of the tool when it ran. hits: answers given from it since."""

    record: int
    call: CallView
    seconds: float
    hits: int
    exit_code: int | None = None


class NodeView(BaseModel):
    """A sandbox state in the tree. call, effect, seconds: of the first call that led there; empty for the root."""

    id: str
    parent: str | None
    call: CallView | None
    effect: list[EffectName]
    seconds: float
    hits: int
    exit_code: int | None
    snapshot: bool
    rollouts: list[str]
    observations: list[ObservationView]
    flags: list[Flag]
    children: int


class PassedRollout(BaseModel):
    """A rollout that a call led to a node; turn: its first call that did."""

    task: str
    rollout: str
    turn: int
    finished: bool


class NodeDetail(NodeView):
    """A node with its answer, its snapshot, and the nodes that its calls lead to.

    kept: why its state is kept, or why not, in words. passed: the latest rollouts that came here.
    """

    answer: AnswerView | None
    recorded_at: float | None
    passes: int
    diverged: str
    unfreezable: str
    snapshot_detail: SnapshotView | None
    leads_to: list[str]
    kept: str = ""
    passed: list[PassedRollout] = []


class TreeView(BaseModel):
    """Nodes below `node`, parents first. truncated: there are more than `limit`."""

    task: str
    root: str
    nodes: list[NodeView]
    truncated: bool


class TaskView(BaseModel):
    """A task. default: it runs on the default spec, for nobody gave it one. root: of its current tree.

    nodes, rollouts: of all its trees.
    """

    task: str
    spec: EnvironmentSpec
    default: bool
    root: str
    created_at: float
    nodes: int
    rollouts: int
    running: int


class TaskSummary(BaseModel):
    """A task, with what its rollouts were answered over all times; up to some seconds old."""

    task: str
    created_at: float
    nodes: int
    rollouts: int
    running: int = 0
    calls: int = 0
    hits: int = 0
    waits: int = 0
    misses: int = 0
    bypasses: int = 0
    hit_rate: float = 0.0
    executed_s: float = 0.0
    saved_s: float = 0.0


class RolloutView(BaseModel):
    """A rollout. root: of its tree. base_url is where its agent's tools are; token stands for it where a base URL has
    no path.
    """

    id: int
    task: str
    rollout: str
    root: str
    node: str
    start: str
    calls: int
    finished: bool
    created_at: float
    base_url: str
    token: str


class StepView(BaseModel):
    """One call of a rollout, in order."""

    turn: int
    outcome: Literal["hit", "miss", "wait", "bypass"]
    record: int
    call: CallView | None
    effect: list[EffectName]
    seconds: float
    node: str | None


class RolloutDetail(RolloutView):
    steps: list[StepView]


class Forgotten(BaseModel):
    """What was forgotten. rollouts: those that ended with it; going_on: those that stand there still."""

    nodes: int
    rollouts: list[str]
    going_on: list[str] = []


class Pin(BaseModel):
    pinned: bool = True


class Reader:
    """Reads views off trees; calls and answers come from the store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def tree(self, task: Task, tree: Tree, top: Node, *, depth: int | None, limit: int) -> TreeView:
        """Return up to limit nodes below top, a node of tree."""
        nodes: list[NodeView] = []
        truncated = False
        standing = self._standing(task)
        for node, _ in tree.walk(top, depth):
            if len(nodes) == limit:
                truncated = True
                break
            nodes.append(self.node(node, standing.get(node, [])))
        return TreeView(task=task.name, root=node_name(tree.root), nodes=nodes, truncated=truncated)

    def node(self, node: Node, rollouts: list[str]) -> NodeView:
        return NodeView(**self._node(node, rollouts))

    def detail(
        self,
        task: Task,
        node: Node,
        snapshot: SnapshotView | None,
        kept: str = "",
        passed: list[PassedRollout] | None = None,
    ) -> NodeDetail:
        origin = node.origin
        return NodeDetail(
            **self._node(node, self._standing(task).get(node, [])),
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

    def call(self, record: Record) -> CallView:
        call = self._store.records.call(record)
        return CallView(endpoint=call.endpoint, tool=call.tool, arguments=dict(call.arguments))

    def steps(self, rollout: int, tree: Tree, *, offset: int, limit: int) -> list[StepView]:
        """Return a rollout's calls; of those that were forgotten since, only that they were made."""
        records = {r.id: r for node in tree.nodes.values() for r in node.records.values()}
        records |= {record.id: record for record in tree.aside}
        views = []
        for turn, record_id, outcome in self._store.rollouts.steps(rollout, offset=offset, limit=limit):
            record = records.get(record_id)
            views.append(
                StepView(
                    turn=turn,
                    outcome=Outcome(outcome).name.lower(),  # type: ignore[arg-type]
                    record=record_id,
                    call=None if record is None else self.call(record),
                    effect=[] if record is None else record.effect.names,  # type: ignore[arg-type]
                    seconds=0.0 if record is None else record.seconds,
                    node=None if record is None else node_name(record.target),
                )
            )
        return views

    def _node(self, node: Node, rollouts: list[str]) -> dict[str, Any]:
        origin = node.origin
        return {
            "id": node_name(node),
            "parent": None if origin is None else node_name(origin.source),
            "call": None if origin is None else self.call(origin),
            "effect": [] if origin is None else origin.effect.names,
            "seconds": 0.0 if origin is None else origin.seconds,
            "hits": 0 if origin is None else origin.hits,
            "exit_code": None if origin is None else exit_code(self._store.records.result(origin)),
            "snapshot": node.snapshot is not None,
            "rollouts": sorted(rollouts),
            "observations": [self._observation(r) for r in node.records.values() if r.observation],
            "flags": flags(node),
            "children": len(children(node)),
        }

    def _observation(self, record: Record) -> ObservationView:
        return ObservationView(
            record=record.id,
            call=self.call(record),
            seconds=record.seconds,
            hits=record.hits,
            exit_code=exit_code(self._store.records.result(record)),
        )

    def _standing(self, task: Task) -> dict[Node, list[str]]:
        standing: dict[Node, list[str]] = {}
        for rollout in task.rollouts.values():
            standing.setdefault(rollout.node, []).append(rollout.name)
        return standing


def answer_view(result: ToolResult) -> AnswerView:
    """Return what of an answer can be shown: of long ones the beginning."""
    view = AnswerView(status=result.status, media_type=result.media_type, size_bytes=len(result.body))
    if result.media_type.partition(";")[0].endswith("json") and len(result.body) <= _PARSED_BYTES:
        with contextlib.suppress(orjson.JSONDecodeError):
            shown, cut = bounded(orjson.loads(result.body))
            return view.model_copy(update={"json_": shown, "truncated": cut})
    try:
        text = result.body.decode()
    except UnicodeDecodeError:
        return view
    return view.model_copy(update={"text": text[:SHOWN_CHARS], "truncated": len(text) > SHOWN_CHARS})


def bounded(value: Any) -> tuple[Any, bool]:
    """Return a JSON value with what is long or nested too deep cut, and whether anything was (pure)."""
    cut = False

    def shown(part: Any, depth: int = 0) -> Any:
        nonlocal cut
        if depth == _SHOWN_DEPTH and isinstance(part, list | dict):
            cut = True
            return "…"
        if isinstance(part, str) and len(part) > SHOWN_CHARS:
            cut = True
            return part[:SHOWN_CHARS]
        if isinstance(part, list):
            cut = cut or len(part) > _SHOWN_ITEMS
            return [shown(item, depth + 1) for item in part[:_SHOWN_ITEMS]]
        if isinstance(part, dict):
            cut = cut or len(part) > _SHOWN_ITEMS
            return {name: shown(item, depth + 1) for name, item in list(part.items())[:_SHOWN_ITEMS]}
        return part

    return shown(value), cut


def task_view(task: Task, row: dict[str, Any]) -> TaskView:
    return TaskView(
        task=task.name,
        spec=task.spec.redacted(),
        default=task.origin is None,
        root=node_name(task.tree.root),
        created_at=task.created_at,
        nodes=row["nodes"],
        rollouts=row["rollouts"],
        running=len(task.rollouts),
    )


def rollout_view(row: dict[str, Any], base_url: str, live: Rollout | None) -> dict[str, Any]:
    """Return the members of a `RolloutView`; where the rollout runs, as it stands this moment."""
    return {
        "id": row["id"],
        "task": row["task"],
        "rollout": row["name"],
        "root": f"n{row['root']}",
        "node": f"n{row['node']}" if live is None else node_name(live.node),
        "start": f"n{row['start']}",
        "calls": row["calls"] if live is None else live.calls,
        "finished": bool(row["finished"]),
        "created_at": row["created_at"],
        "base_url": f"{base_url.rstrip('/')}/t/{row['task']}/r/{row['name']}",
        "token": row["token"],
    }


def _differs(node: Node) -> bool:
    """Whether an audit found a call here, or the one that led here, to be answered differently."""
    return bool(node.quarantined or (node.origin is not None and node.origin.differs))


def flags(node: Node) -> list[Flag]:
    """Return what is to be said of a node."""
    origin = node.origin
    found: list[tuple[Flag, bool]] = [
        ("pinned", node.pinned),
        ("diverged", bool(node.diverged) or _differs(node)),
        ("unreproducible", origin is not None and not origin.reproducible),
        ("private", origin is not None and origin.private),
    ]
    return [flag for flag, on in found if on]
