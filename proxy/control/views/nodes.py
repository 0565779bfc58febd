"""Views of trees and nodes. Pure."""

from typing import Any, Literal

from pydantic import BaseModel

from proxy.control.call_titles import TITLE_CHARS, title
from proxy.control.views.answers import AnswerView
from proxy.control.views.resources import SnapshotView, node_name
from proxy.times import UtcTime
from proxy.tree.tree import Node, children
from sandboxes.calls import ResourceUse, ToolCall

EffectName = Literal["none", "files", "session", "processes", "database", "unknown"]
Flag = Literal["pinned", "diverged", "unreproducible", "private"]


class CallView(BaseModel):
    """A tool call as the agent made it.

    Attributes:
        endpoint: The endpoint that received the call, such as `shell`.
        tool: The tool of the endpoint, such as `exec`.
        arguments: The call's arguments; an uploaded body is not among them.
        title: The call in one line: the command, the SQL statement, or the request with the begin of its body.
    """

    endpoint: str
    tool: str
    arguments: dict[str, Any]
    title: str

    @classmethod
    def of(cls, call: ToolCall) -> "CallView":
        """Return the view of a call."""
        return cls(
            endpoint=call.endpoint, tool=call.tool, arguments=dict(call.arguments), title=title(call)[:TITLE_CHARS]
        )  # fmt: skip


class ResourcesView(BaseModel):
    """What the execution of a call used of the machine; null is what is not known.

    All that ran in its sandbox meanwhile is counted, background processes too, and cached pages of files in the peak.
    """

    cpu_s: float | None
    peak_bytes: int | None
    read_bytes: int | None
    written_bytes: int | None

    @classmethod
    def of(cls, use: ResourceUse | None) -> "ResourcesView | None":
        """Return the view; None if nothing is known."""
        return None if use is None else cls(**use._asdict())


class ObservationView(BaseModel):
    """A recorded call that did not change the state.

    Attributes:
        hits: Number of hits that the record has answered.
        exit_code: The exit code in the answer; null if the answer has none.
        resources: What the call used of the machine; null if nothing is known.
    """

    record: int
    call: CallView
    seconds: float
    hits: int
    exit_code: int | None = None
    resources: ResourcesView | None = None


class NodeFacts(BaseModel):
    """What all views of a node show.

    Attributes:
        parent: The node that the first call was made at; null for the root.
        effect: What the first call that led here changed.
        seconds: How long that call's tool ran.
        hits: Number of hits that this call has answered.
        exit_code: The exit code in the call's answer; null if the answer has none.
        rollouts: Names of the running rollouts at this node.
    """

    id: str
    parent: str | None
    effect: list[EffectName]
    seconds: float
    hits: int
    exit_code: int | None
    snapshot: bool
    flags: list[Flag]
    children: int
    rollouts: list[str]


class NodeView(NodeFacts):
    """A node: a sandbox state in the tree.

    Attributes:
        call: The first call that led here; null for the root.
        observations: Calls recorded at this node that did not change the state.
        resources: What that call used of the machine; null if nothing is known.
    """

    call: CallView | None
    observations: list[ObservationView]
    resources: ResourcesView | None = None


class PassedRollout(BaseModel):
    """A rollout that reached a node by a call.

    Attributes:
        turn: Number of its first call that led to the node, from 0.
    """

    task: str
    rollout: str
    turn: int
    finished: bool


class NodeDetail(NodeView):
    """A node with its answer, its snapshot, and the nodes that its calls lead to.

    Attributes:
        answer: The answer of the call that led here; null for the root.
        recorded_at: When this answer was recorded; null for the root.
        passes: How often a rollout reached this node.
        diverged: How a replay diverged from the record; empty if none did.
        unfreezable: Why no snapshot of the state can be taken; empty if nothing prevents it.
        leads_to: Names of the nodes that recorded calls lead to from here.
        kept: Why the state has a snapshot, or why it has none.
    """

    answer: AnswerView | None
    recorded_at: UtcTime | None
    passes: int
    diverged: str
    unfreezable: str
    snapshot_detail: SnapshotView | None
    leads_to: list[str]
    kept: str = ""
    passed: list[PassedRollout] = []


class TreeView(BaseModel):
    """The nodes of a tree or of a subtree, parents first; `truncated` if there are more than `limit`."""

    task: str
    root: str
    nodes: list[NodeView]
    truncated: bool


class Forgotten(BaseModel):
    """The result of forgetting a subtree; `going_on` names the rollouts that continue in the forgotten states."""

    nodes: int
    rollouts: list[str]
    going_on: list[str] = []


class Pin(BaseModel):
    """Whether a node's snapshot is exempt from eviction: true pins it, false unpins it."""

    pinned: bool = True


def node_facts(node: Node) -> dict[str, Any]:
    """Return the members of `NodeFacts` that the node itself has: all but its exit code and its rollouts."""
    origin = node.origin
    return {
        "id": node_name(node),
        "parent": None if origin is None else node_name(origin.source),
        "effect": [] if origin is None else origin.effect.names,
        "seconds": 0.0 if origin is None else origin.seconds,
        "hits": 0 if origin is None else origin.hits,
        "snapshot": node.snapshot is not None,
        "flags": flags(node),
        "children": len(children(node)),
    }


def flags(node: Node) -> list[Flag]:
    """Return the flags of a node."""
    origin = node.origin
    # An audit got another answer here, or for the call that led here.
    differs = bool(node.quarantined or (origin is not None and origin.differs))
    states: list[tuple[Flag, bool]] = [
        ("pinned", node.pinned),
        ("diverged", bool(node.diverged) or differs),
        ("unreproducible", origin is not None and not origin.reproducible),
        ("private", origin is not None and origin.private),
    ]
    return [flag for flag, is_set in states if is_set]
