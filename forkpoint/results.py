"""What the client's operations return. Pure."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime
from typing import Any, Literal, TypeVar

from forkpoint.exchange import Reply
from forkpoint.notebook import Shown

V = TypeVar("V")
Outcome = Literal["hit", "miss", "wait", "bypass"]
"""How a call was answered: from the tree, by running it, by another rollout's execution, or for this rollout alone."""
_OUTCOMES: Mapping[str, Outcome] = {"hit": "hit", "collapsed": "wait", "fwd=miss": "miss", "fwd=bypass": "bypass"}
"""By parameters of the header `Cache-Status` (RFC 9211), of which the first that a response has counts."""
_DURATION = re.compile(r"(\w+);dur=([0-9.]+)")
_AMOUNT = re.compile(r"(\w+);desc=([0-9]+)")


def made_of(kind: type[V], payload: Mapping[str, Any], **more: Any) -> V:
    """Return a result with the members of a JSON object that its class names; a newer proxy may send others."""
    known = {each.name: each.type for each in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: _member(value, known[name]) for name, value in payload.items() if name in known}, **more)


def _member(value: Any, kind: object) -> Any:
    return datetime.fromisoformat(value) if kind is datetime else value


@dataclass(frozen=True, slots=True, kw_only=True)
class CallResult:
    """The answer to a tool call.

    Attributes:
        outcome: How the call was answered; None if the proxy answered it by itself.
        node: The rollout's node after the call, such as `n12`; None if the response names none.
        tool_s: Seconds that the tool ran for this request; 0 on a hit.
        restore_s: Seconds that getting a sandbox took.
        replay_s: Seconds that bringing the sandbox to the rollout's state took.
        wait_s: Seconds that the call waited for other calls.
        cpu_s: CPU seconds that the execution used which the answer comes from, a hit's too; None if not known.
        peak_bytes: The most memory at one time that it used; None if not known.
        read_bytes: Bytes that it read from disks; None if not known.
        written_bytes: Bytes that were written to disks meanwhile; None if not known.
        marks: Limits that the call reached, `broken` for a sandbox that the agent has broken, and `machine` for a
            failure that is not the agent's.
    """

    outcome: Outcome | None = None
    node: str | None = None
    tool_s: float = 0.0
    restore_s: float = 0.0
    replay_s: float = 0.0
    wait_s: float = 0.0
    cpu_s: float | None = None
    peak_bytes: int | None = None
    read_bytes: int | None = None
    written_bytes: int | None = None
    marks: tuple[str, ...] = ()

    @property
    def hit(self) -> bool:
        """Whether no tool ran for this rollout: the tree knew the answer, or another rollout's execution gave it."""
        return self.outcome in ("hit", "wait")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShellResult(CallResult):
    """The result of a command.

    Attributes:
        stdout: Standard output.
        stderr: Standard error.
        exit_code: The exit code; 124 after a timeout.
        timed_out: Whether the command was ended because it ran for too long.
        truncated: Whether output was cut.
    """

    stdout: str
    stderr: str
    exit_code: int
    timed_out: bool = False
    truncated: bool = False

    @property
    def output(self) -> str:
        """Standard output and standard error, one after the other."""
        return self.stdout + self.stderr


@dataclass(frozen=True, slots=True, kw_only=True)
class HarnessTurn:
    """What an agent inside its sandbox did between two requests to its model.

    Attributes:
        turn: How many responses it had had.
        node: The node of the state in which it waits.
        outcome: `hit`, `wait`, `miss` or `bypass`, as for a call.
        seconds: How long it worked when the turn was recorded.
        model_s: How long its model took before.
        waiting: How many of its requests wait for a response.
        not_kept: Why the state cannot be entered again; empty if it can, or need not be.
    """

    turn: int
    node: str
    outcome: str
    seconds: float
    model_s: float
    waiting: int
    not_kept: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HarnessRun:
    """A run of an agent inside its sandbox.

    Attributes:
        turns: Its turns in this run.
        exit_code: Its exit code.
        log: The end of what it has printed.
    """

    turns: tuple[HarnessTurn, ...]
    exit_code: int
    log: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FileResult(CallResult):
    """The result of a file operation.

    Attributes:
        content: The bytes of the file; the JSON list of a directory; empty after a write.
        media_type: The type of the content.
    """

    content: bytes = b""
    media_type: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SqlResult(CallResult):
    """The result of a SQL tool. An error of the database is a result too.

    Attributes:
        columns: Names of the columns.
        rows: The rows; empty if `text` has them.
        row_count: Number of rows shown, or changed by a statement without columns.
        truncated: Whether rows were left out.
        text: The rows as text, if a `format` was requested.
        error: `message`, `kind` and `code` of the database's error; None for none.
    """

    columns: list[str] = field(default_factory=list)
    rows: list[list[Any]] = field(default_factory=list)
    row_count: int = 0
    truncated: bool = False
    text: str = ""
    error: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedQueries(CallResult):
    """Whether two queries have the same result.

    Attributes:
        match: Whether they do.
        why: What differs; empty if they match.
        rows: Number of rows of the first query.
        gold_rows: Number of rows of the second query.
        error: The error of one of them; None for none.
    """

    match: bool
    why: str = ""
    rows: int | None = None
    gold_rows: int | None = None
    error: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoResult(CallResult):
    """The result of a video tool. An error of the tool is a result too.

    Attributes:
        payload: The JSON object; empty for a picture and for an error.
        content: The bytes of the response, for example of a picture.
        media_type: The type of the content.
        error: `kind` and `message` of the tool's error; None for none.
    """

    payload: Mapping[str, Any] = field(default_factory=dict)
    content: bytes = b""
    media_type: str = ""
    error: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResponse(CallResult):
    """The response of a tool server, whatever its status.

    Attributes:
        status: The HTTP status.
        headers: The headers by their names in lower case.
        content: The body.
    """

    status: int
    headers: Mapping[str, str]
    content: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One call of a rollout.

    Attributes:
        turn: Number of the call in the rollout, from 0.
        outcome: How it was answered.
        title: The call in one line; empty if its record was forgotten since.
        call: `endpoint`, `tool` and `arguments` of the call; None if its record was forgotten since.
        effect: What the call changed.
        seconds: Seconds that the tool ran when the call was recorded.
        node: The node that the call led to; None if its record was forgotten since.
        resources: What the call used of the machine when it was recorded; None if nothing is known.
        marks: Its marks, as in `CallResult`.
    """

    turn: int
    outcome: Outcome
    title: str
    call: Mapping[str, Any] | None
    effect: list[str]
    seconds: float
    node: str | None
    resources: Mapping[str, Any] | None = None
    marks: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutInfo(Shown):
    """A rollout.

    Attributes:
        id: Number of the rollout, unique in the proxy.
        task: Name of its task.
        rollout: Its name.
        root: Root of its tree.
        node: The node that it is at.
        start: The node that it began at.
        calls: Number of its answered calls.
        finished: Whether it has ended.
        state: `running`, `idle` if its last call is some minutes old, or `finished`.
        created_at: When it began, in UTC.
        used_at: When it made its last call, in UTC.
        labels: Its labels: `step` and `epoch` as whole numbers, `reward` as a number, all others as texts.
        base_url: Base URL of its agent's tools.
        token: Its token, if it has just begun; None later.
        lost: Why its position is not known any more; empty for nearly all.
        steps: Its calls, if the rollout was requested by name; at most the requested page.
        next_steps: The cursor of the next page of its calls; None if there is none.
        marks: How many of all its calls have each mark, if the rollout was requested by name.
    """

    id: int
    task: str
    rollout: str
    root: str
    node: str
    start: str
    calls: int
    finished: bool
    state: Literal["running", "idle", "lost", "finished"]
    created_at: datetime
    used_at: datetime
    labels: Mapping[str, str | int | float]
    base_url: str
    token: str | None = None
    lost: str = ""
    steps: list[Step] = field(default_factory=list)
    next_steps: str | None = None
    marks: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskInfo(Shown):
    """A task, with totals of its rollouts where a list of tasks was requested.

    Attributes:
        task: Its name.
        created_at: When it was created, in UTC.
        nodes: Number of nodes in all of its trees.
        rollouts: Number of its rollouts, finished ones included.
        running: Number of rollouts that have not ended.
        advice: What makes its states dear on the proxy's machine; empty if nothing is known, and in a list.
        root: Root of its current tree; empty in a list.
        spec: Its environment, without secret values; empty in a list.
        calls: Number of answered calls.
        hit_rate: Share of calls that no tool ran for, from 0 to 1.
        executed_s: Seconds that tools ran.
        saved_s: Seconds of tool time that hits and waits saved.
    """

    task: str
    created_at: datetime
    nodes: int
    rollouts: int
    running: int
    root: str = ""
    advice: str = ""
    spec: Mapping[str, Any] = field(default_factory=dict)
    calls: int = 0
    hit_rate: float = 0.0
    executed_s: float = 0.0
    saved_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Node(Shown):
    """A node: a sandbox state in the tree.

    Attributes:
        id: Its name, such as `n12`.
        parent: The node that its first call was made at; None for the root.
        call: `endpoint`, `tool`, `arguments` and `title` of the call that led here; None for the root.
        effect: What that call changed.
        seconds: Seconds that its tool ran.
        hits: Number of hits that it has answered.
        exit_code: The exit code in its answer; None if the answer has none.
        snapshot: Whether the state has a snapshot.
        rollouts: Names of the rollouts that are at this node.
        observations: Calls recorded here that did not change the state, as JSON objects.
        flags: Properties that need attention: `pinned`, `diverged`, `unreproducible`, `private`.
        children: Number of child nodes.
        answer: The recorded answer as a JSON object, if the node was requested by name; None in a tree.
        resources: `cpu_s`, `peak_bytes`, `read_bytes` and `written_bytes` of the call; None if nothing is known.
    """

    id: str
    parent: str | None
    call: Mapping[str, Any] | None
    effect: list[str]
    seconds: float
    hits: int
    exit_code: int | None
    snapshot: bool
    rollouts: list[str]
    observations: list[Mapping[str, Any]]
    flags: list[str]
    children: int
    answer: Mapping[str, Any] | None = None
    resources: Mapping[str, Any] | None = None

    @property
    def title(self) -> str:
        """The call that led here in one line; `start` for the root."""
        return "start" if self.call is None else str(self.call.get("title", ""))


@dataclass(frozen=True, slots=True, kw_only=True)
class Diff(Shown):
    """What changed from one node to another.

    Attributes:
        files: The changed paths, each with `path`, `change` and, for text, a unified `diff`.
        raw: The whole answer: sessions and databases too.
    """

    files: list[Mapping[str, Any]]
    raw: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportRow(Shown):
    """The totals of one group of rollouts.

    Attributes:
        group: Value of the label, the task or the endpoint; None for rollouts without the label, and for a total.
        rollouts: Number of rollouts that made a call; 0 by endpoint.
        calls: Number of answered calls.
        hits: Calls answered from the tree.
        waits: Calls that shared another rollout's execution.
        misses: Calls that were executed and recorded.
        bypasses: Calls whose record serves their own rollout alone.
        hit_rate: Share of calls that no tool ran for, from 0 to 1.
        executed_s: Seconds that tools ran.
        saved_s: Seconds of tool time that hits and waits saved.
        replayed_s: Seconds of replays; None by endpoint for calls that were recorded before the store had it.
        restored_s: Seconds that getting sandboxes took; by endpoint as `replayed_s`.
        waited_s: Seconds that executed calls waited for other calls; by endpoint as `replayed_s`.
        p50_s: Median of the tools' seconds of all calls, had each been executed.
        p95_s: Their 95th percentile.
        paid_p50_s: Median of the tools' seconds of all calls as they were: 0 for a hit.
        paid_p95_s: Their 95th percentile.
        reward: Mean of the label `reward`; None if no rollout has one.
        rewarded: Number of rollouts that have one.
        executed_cost: Price of `executed_s`.
        saved_cost: Price of `saved_s`.
        executed_tokens: Tokens that models of video tools counted for executed calls.
        saved_tokens: Tokens that they would have counted again for hits and waits.
        executed_cpu_s: CPU seconds of executed calls, as far as they are known; None if none is.
        saved_cpu_s: CPU seconds that hits and waits saved, as far as they are known; None if none is.
        peak_bytes: The most memory that one call used at one time; None if it is not known of any.
        kept_bytes: By owner, bytes that kept states of the owner's tasks have added to the disk; None for others.
        disk_bytes: The most of these; None for no limit.
    """

    group: str | None
    rollouts: int
    calls: int
    hits: int
    waits: int
    misses: int
    bypasses: int
    hit_rate: float
    executed_s: float
    saved_s: float
    replayed_s: float | None
    p50_s: float
    p95_s: float
    paid_p50_s: float
    paid_p95_s: float
    reward: float | None
    executed_cost: float
    saved_cost: float
    executed_tokens: int
    saved_tokens: int
    restored_s: float | None = None
    waited_s: float | None = None
    rewarded: int = 0
    executed_cpu_s: float | None = None
    saved_cpu_s: float | None = None
    peak_bytes: int | None = None
    kept_bytes: int | None = None
    disk_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report(Shown):
    """What the cache did for groups of rollouts.

    Attributes:
        total: The totals of all groups.
        rows: The groups in their order.
        arms: The same calls without a cache, with a stateless one and with this one, as JSON objects.
        truncated: Whether groups were left out.
        calls: The calls whose executions took longest, and why they ran, as JSON objects.
    """

    total: ReportRow
    rows: list[ReportRow]
    arms: list[Mapping[str, Any]]
    truncated: bool
    calls: list[Mapping[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Totals since the proxy started.

    Attributes:
        hits: Calls answered from a tree.
        misses: Calls that were executed and recorded.
        waits: Calls that shared another rollout's execution.
        bypasses: Calls whose record serves their own rollout alone.
        executed_s: Seconds that tools ran.
        saved_s: Seconds of tool time that hits and waits saved.
        raw: All totals and budgets.
    """

    hits: int
    misses: int
    waits: int
    bypasses: int
    executed_s: float
    saved_s: float
    raw: Mapping[str, Any]


def outcome_of(cache_status: str) -> Outcome | None:
    """Return how a call was answered, given the response's `Cache-Status`; None if the proxy has set none."""
    cache, *parameters = (part.strip() for part in cache_status.split(";"))
    return next((_OUTCOMES[name] for name in _OUTCOMES if name in parameters), None) if cache == "forkpoint" else None


def how_answered(reply: Reply) -> dict[str, Any]:
    """Return the members of a `CallResult` that a response's headers tell."""
    header = reply.headers.get("server-timing", "")
    timing, amounts = dict(_DURATION.findall(header)), dict(_AMOUNT.findall(header))
    names = (("peak_bytes", "memory"), ("read_bytes", "read"), ("written_bytes", "written"))
    return {
        "outcome": outcome_of(reply.headers.get("cache-status", "")),
        "node": reply.headers.get("x-forkpoint-node"),
        "marks": tuple(reply.headers.get("x-forkpoint-marks", "").replace(",", " ").split()),
        **{f"{name}_s": float(timing.get(name, 0.0)) / 1000 for name in ("tool", "restore", "replay", "wait")},
        "cpu_s": float(timing["cpu"]) / 1000 if "cpu" in timing else None,
        **{member: int(amounts[name]) if name in amounts else None for member, name in names},
    }
