"""Reports: hit rate, tool time and rewards of groups of rollouts, read from the steps on disk.

The steps say which record answered which call, and a record says how long its tool ran. So each figure can be computed
at any time, and no call counts anything for a report. Damaged rows are left out of every figure, and counted.

`read_part` reads the store of one worker; `report_of` makes the report of all parts, because medians need each call.
"""

import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import orjson
from pydantic import ConfigDict, TypeAdapter

from forkpoint.results import ReportRow
from proxy.control.slow_calls import slowest, slowest_calls
from proxy.control.views.report import Arm, ReportView, SlowCall
from proxy.storage.blobs import blob_of
from proxy.storage.records import answer_of, same_calls
from proxy.storage.rollouts import label_path, label_value, labels_condition
from proxy.storage.schema import is_whole
from proxy.tree.call_totals import CallTotals
from proxy.tree.labels import REWARD
from proxy.tree.rollout import Outcome

MAX_ROWS = 1000
"""Most groups of one report. Agents choose labels, so their number has no other bound."""
MAX_NAMES = 100
"""Most labels that a report names."""
BY_TASK, BY_ENDPOINT = "task", "endpoint"
"""What rollouts can be grouped by beside labels. A label of these names cannot be."""
_LABEL = label_value("r.labels", ":by")
_EXECUTED = frozenset({Outcome.MISS, Outcome.BYPASS})
_OVERHEADS = ("restored_s", "replayed_s", "waited_s")
_WHOLE_ROLLOUT, _WHOLE_STEP, _WHOLE_RECORD = is_whole("rollouts", "r"), is_whole("steps", "s"), is_whole("records", "c")


@dataclass(frozen=True, slots=True)
class ReportRequest:
    """What to report."""

    by: str = "run"  # `task`, `endpoint`, or the name of a label.
    labels: Mapping[str, str] = field(default_factory=dict)  # Only rollouts with all of these labels.
    task: str | None = None  # Only rollouts of this task; None for all.
    price_per_hour: float = 0.0  # Price of one hour of tool time.
    # The tasks whose rollouts count; None for all. A member of a cluster has steps of tasks that others own now, too.
    own: Sequence[str] | None = None


@dataclass(slots=True)
class _Group:
    """One group while it is summed: seconds are (value, number of calls) of all calls, and of those as they were."""

    # The sum of finite rewards may be infinite, which JSON cannot say.
    __pydantic_config__ = ConfigDict(ser_json_inf_nan="constants")
    totals: CallTotals = field(default_factory=CallTotals)
    seconds: list[tuple[float, int]] = field(default_factory=list)
    paid: list[tuple[float, int]] = field(default_factory=list)
    executed_tokens: int = 0
    saved_tokens: int = 0
    rollouts: int = 0
    rewarded: int = 0
    rewards: float = 0.0
    overheads: dict[str, float] | None = None
    executed_cpu_s: float | None = None
    saved_cpu_s: float | None = None
    peak_bytes: int | None = None

    def add(
        self, outcome: Outcome, seconds: float, calls: int, cpu_s: float | None = None, peak_bytes: int | None = None
    ) -> None:
        """Add calls that one record answered in one way, and what its execution used."""
        cpu_s = None if cpu_s is None else cpu_s * calls
        if outcome in _EXECUTED:
            self.executed_cpu_s = _sum(self.executed_cpu_s, cpu_s)
        else:
            self.saved_cpu_s = _sum(self.saved_cpu_s, cpu_s)
        self.peak_bytes = _most(self.peak_bytes, peak_bytes)
        self.totals.answered(outcome, seconds * calls, calls)
        self.seconds.append((seconds, calls))
        self.paid.append((0.0 if outcome is Outcome.HIT else seconds, calls))

    def add_tokens(self, outcome: Outcome, tokens: int) -> None:
        if outcome in _EXECUTED:
            self.executed_tokens += tokens
        else:
            self.saved_tokens += tokens

    def add_group(self, other: "_Group") -> None:
        """Add another group: one of the same name, or any for the total."""
        self.totals.merge(other.totals)
        for name in ("seconds", "paid", "executed_tokens", "saved_tokens", "rollouts", "rewarded", "rewards"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.executed_cpu_s = _sum(self.executed_cpu_s, other.executed_cpu_s)
        self.saved_cpu_s = _sum(self.saved_cpu_s, other.saved_cpu_s)
        self.peak_bytes = _most(self.peak_bytes, other.peak_bytes)
        if other.overheads is not None:
            mine = self.overheads or dict.fromkeys(_OVERHEADS, 0.0)
            self.overheads = {name: mine[name] + other.overheads[name] for name in _OVERHEADS}

    def row(self, name: str | None, price_per_hour: float, kept: Sequence[tuple[int, float | None]] = ()) -> ReportRow:
        totals, limits = self.totals, [most for _, most in kept if most is not None]
        return ReportRow(
            group=name, rollouts=self.rollouts, **totals.as_dict(), **(self.overheads or dict.fromkeys(_OVERHEADS)),
            p50_s=quantile(self.seconds, 0.5), p95_s=quantile(self.seconds, 0.95),
            paid_p50_s=quantile(self.paid, 0.5), paid_p95_s=quantile(self.paid, 0.95),
            reward=self.rewards / self.rewarded if self.rewarded else None, rewarded=self.rewarded,
            executed_cost=totals.executed_s / 3600 * price_per_hour, saved_cost=totals.saved_s / 3600 * price_per_hour,
            executed_tokens=self.executed_tokens, saved_tokens=self.saved_tokens,
            executed_cpu_s=self.executed_cpu_s, saved_cpu_s=self.saved_cpu_s, peak_bytes=self.peak_bytes,
            kept_bytes=sum(used for used, _ in kept) if kept else None,
            disk_bytes=round(sum(limits)) if limits else None,
        )  # fmt: skip


@dataclass(slots=True)
class ReportPart:
    """What one store has for a report. Its calls are in no other part, nor are the rollouts that count in it."""

    request: ReportRequest
    groups: list[tuple[str | None, _Group]]  # By name; None for rollouts without the label.
    rollouts: int  # Number of rollouts.
    # What a cache that repeats the first answer to a call of a task would have done: calls that it executes, seconds
    # of their tools, and wrong answers.
    repeated: tuple[int, float, int]
    damaged: int  # Rollouts and calls that are left out.
    calls: list[SlowCall]  # Those whose executions took longest.
    label_names: list[str]  # The labels that the rollouts have.
    # By owner: the bytes that the kept states of its tasks have added to the disk, and the most; None for no limit.
    kept: dict[str, tuple[int, float | None]] = field(default_factory=dict)

    def packed(self) -> bytes:
        """Return the part as JSON."""
        return _as_json().dump_json(self)

    @staticmethod
    def unpacked(data: bytes) -> "ReportPart":
        """Return a part that was packed."""
        return _as_json().validate_json(data)


@cache
def _as_json() -> TypeAdapter[ReportPart]:
    return TypeAdapter(ReportPart)


def report_of(parts: Sequence[ReportPart]) -> ReportView:
    """Return the report of all parts, which have the same request."""
    request, total, groups = parts[0].request, _Group(), dict[str | None, _Group]()
    for name, group in (each for part in parts for each in part.groups):
        groups.setdefault(name, _Group()).add_group(group)
        total.add_group(group)
    total.rollouts = sum(part.rollouts for part in parts)
    names = sorted(groups, key=_order)
    return ReportView(
        by=request.by, labels=dict(request.labels), task=request.task, price_per_hour=request.price_per_hour,
        total=total.row(None, request.price_per_hour),
        rows=[
            groups[name].row(name, request.price_per_hour, [p.kept[name] for p in parts if name and name in p.kept])
            for name in names[:MAX_ROWS]
        ],
        truncated=len(names) > MAX_ROWS, arms=_arms(parts, total), damaged=sum(part.damaged for part in parts),
        calls=slowest(call for part in parts for call in part.calls),
        label_names=sorted({name for part in parts for name in part.label_names})[:MAX_NAMES],
    )  # fmt: skip


def read_part(connection: sqlite3.Connection, request: ReportRequest) -> ReportPart:
    """Read what a store has for a report, once its journal is folded. Call it in a thread."""
    where, values = _condition(request)
    groups: dict[str | None, _Group] = defaultdict(_Group)
    damaged = _damaged_rollouts(connection, request)
    if request.by == BY_ENDPOINT:
        damaged += _add_by_endpoint(connection, where, values, groups)
        for name, *spent in connection.execute(_overheads_by_endpoint(where), values):
            groups[name].overheads = dict(zip(_OVERHEADS, spent, strict=True))
    else:
        group, values["by"] = ("r.task", "") if request.by == BY_TASK else (_LABEL, label_path(request.by))
        for name, outcome, seconds, calls, whole, _, *used in connection.execute(_calls(group, where), values):
            if whole:
                groups[name].add(Outcome(outcome), seconds or 0.0, calls, *used)
            damaged += 0 if whole else calls
        for row in connection.execute(_rollouts(group, where), values):
            sums = groups[row[0]]
            sums.rollouts, sums.rewarded, sums.rewards = row[1], row[2], row[3] or 0.0
            sums.overheads = dict(zip(_OVERHEADS, row[4:], strict=True))
    _add_tokens(connection, request.by, where, values, groups)
    (rollouts,) = connection.execute(f"SELECT COUNT(*) FROM rollouts r WHERE {where}", values).fetchone()
    calls = sum(group.totals.calls for group in groups.values())
    repeated = _repeated(connection, where, values, calls)
    slow = slowest_calls(connection, where, values, _EXECUTED)
    names = connection.execute(
        f"SELECT DISTINCT j.key FROM rollouts r, json_each(r.labels) j WHERE {where} ORDER BY 1 LIMIT {MAX_NAMES}",
        values,
    )
    labels = [name for (name,) in names]
    return ReportPart(request, list(groups.items()), rollouts, repeated, damaged, slow, labels)


def _condition(request: ReportRequest) -> tuple[str, dict[str, Any]]:
    # Only rollouts of clients (`RolloutStore.of_task`), and only those that made a call.
    labelled, chosen = labels_condition(request.labels, "r.labels")
    parts, values = ["r.name NOT LIKE '~%' AND r.calls > 0", *labelled], dict[str, Any](chosen)
    if request.own is not None:
        parts.append("r.task IN (SELECT value FROM json_each(:own))")
        values["own"] = orjson.dumps(request.own).decode()
    if request.task is not None:
        parts.append("r.task = :task")
        values["task"] = request.task
    # Last: it calls Python for each row that is left.
    return " AND ".join([*parts, _WHOLE_ROLLOUT]), values


def _damaged_rollouts(connection: sqlite3.Connection, request: ReportRequest) -> int:
    """Return how many rollouts are damaged. Whether their labels would have chosen them is not known."""
    where, values = ("TRUE", ()) if request.task is None else ("r.task = ?", (request.task,))
    sql = f"SELECT COUNT(*) FROM rollouts r WHERE {where} AND NOT {_WHOLE_ROLLOUT}"
    return int(connection.execute(sql, values).fetchone()[0])


def _calls(group: str, where: str) -> str:
    """Return the query of equal calls: group, outcome, seconds, count, all whole or not, call, CPU and peak."""
    # Grouped before the records are joined, so that a record is checked once and not for each step.
    return (
        f"SELECT g.name, g.outcome, c.seconds, g.calls, g.whole AND (c.id IS NULL OR {_WHOLE_RECORD}), c.call, "
        f"c.cpu_s, c.peak_bytes FROM (SELECT {group} AS name, s.outcome, s.record, COUNT(*) AS calls, "
        f"{_WHOLE_STEP} AS whole FROM rollouts r JOIN steps s ON s.rollout = r.id WHERE {where} "
        "GROUP BY 1, 2, 3, 5) g LEFT JOIN records c ON c.id = g.record"
    )


def _rollouts(group: str, where: str) -> str:
    reward = f"CAST({label_value('r.labels', repr(label_path(REWARD)))} AS REAL)"
    return (
        f"SELECT {group}, COUNT(*), COUNT({reward}), SUM({reward}), SUM(r.restore_s), SUM(r.replay_s), "
        f"SUM(r.wait_s) FROM rollouts r WHERE {where} GROUP BY 1"
    )


def _overheads_by_endpoint(where: str) -> str:
    return (
        "SELECT o.endpoint, SUM(o.restore_s), SUM(o.replay_s), SUM(o.wait_s) FROM rollouts r "
        f"JOIN overheads o ON o.rollout = r.id WHERE {where} AND {is_whole('overheads', 'o')} GROUP BY 1"
    )


def _add_by_endpoint(
    connection: sqlite3.Connection, where: str, values: Mapping[str, Any], groups: dict[str | None, _Group]
) -> int:
    """Add calls by the endpoint that received them; return how many are left out because a row is damaged."""
    damaged, endpoints = 0, dict[int, str | None]()
    for _, outcome, seconds, calls, whole, call, *used in connection.execute(_calls("''", where), values).fetchall():
        if whole and call is not None and call not in endpoints:
            endpoints[call] = _endpoint(connection, call)
        # The endpoint of a call that was forgotten since is not known.
        endpoint = endpoints[call] if whole and call is not None else None
        if whole and (call is None or endpoint is not None):
            groups[endpoint].add(Outcome(outcome), seconds or 0.0, calls, *used)
        else:
            damaged += calls
    return damaged


def _add_tokens(
    connection: sqlite3.Connection, by: str, where: str, values: Mapping[str, Any], groups: dict[str | None, _Group]
) -> None:
    """Add the tokens of models. Only answers of video tools carry them, so no others are read."""
    group = {BY_TASK: "r.task", BY_ENDPOINT: "c.call"}.get(by, _LABEL)
    sql = (
        f"SELECT {group}, s.outcome, c.answer, COUNT(*) FROM rollouts r JOIN trees t ON t.id = r.tree "
        f"JOIN steps s ON s.rollout = r.id JOIN records c ON c.id = s.record WHERE {where} AND {_WHOLE_STEP} "
        f"AND {_WHOLE_RECORD} AND json_extract(t.spec, '$.driver') = 'video' GROUP BY 1, s.outcome, c.answer"
    )
    known: dict[int, int] = {}
    for name, outcome, answer, calls in connection.execute(sql, values).fetchall():
        if answer not in known:
            known[answer] = _tokens(connection, answer)
        if known[answer]:
            owner = _endpoint(connection, name) if by == BY_ENDPOINT else name
            groups[owner].add_tokens(Outcome(outcome), known[answer] * calls)


def _tokens(connection: sqlite3.Connection, answer: int) -> int:
    data = blob_of(connection, answer)
    return 0 if data is None else answer_of(data).model_tokens


def _endpoint(connection: sqlite3.Connection, call: int) -> str | None:
    data = blob_of(connection, call)
    return None if data is None else str(orjson.loads(data)["endpoint"])


def _repeated(
    connection: sqlite3.Connection, where: str, values: Mapping[str, Any], calls: int
) -> tuple[int, float, int]:
    """Return what a cache that executes a call once for each task would have done; see `ReportPart.repeated`."""
    sql = (
        "WITH made AS MATERIALIZED (SELECT g.task, c.*, g.calls FROM (SELECT r.task, s.record, COUNT(*) AS calls "
        f"FROM rollouts r JOIN steps s ON s.rollout = r.id WHERE {where} AND {_WHOLE_STEP} GROUP BY 1, 2) g "
        f"JOIN records c ON c.id = g.record WHERE {_WHOLE_RECORD}) "
        "SELECT task, same, upload, answer, seconds, calls "
        f"FROM made JOIN ({same_calls('SELECT call FROM made')}) asks ON asks.id = made.call ORDER BY made.id"
    )
    first: dict[tuple[str, int, int | None], int] = {}
    known, wrong, tool_s = 0, 0, 0.0
    for task, call, upload, answer, seconds, count in connection.execute(sql, values):
        key = task, call, upload
        if key not in first:
            first[key], tool_s = answer, tool_s + seconds
        wrong += count if answer != first[key] else 0
        known += count
    # Steps whose records were forgotten since count as executed.
    return len(first) + calls - known, tool_s, wrong


def _sum(first: float | None, second: float | None) -> float | None:
    return second if first is None else first + (second or 0.0)


def _most(first: int | None, second: int | None) -> int | None:
    return second if first is None else max(first, second or 0)


def _arms(parts: Sequence[ReportPart], total: _Group) -> list[Arm]:
    totals, calls = total.totals, total.totals.calls
    executed, tool_s, wrong = (sum(values) for values in zip(*(part.repeated for part in parts), strict=True))
    return [
        _arm("none", calls, totals.executed_s + totals.saved_s, calls, 0),
        _arm("stateless", int(executed), tool_s, calls, int(wrong)),
        _arm("stateful", totals.outcomes[Outcome.MISS] + totals.outcomes[Outcome.BYPASS], totals.executed_s, calls, 0),
    ]


def _arm(cache: str, executed: int, tool_s: float, calls: int, wrong: int) -> Arm:
    rate = 1 - executed / calls if calls else 0.0
    return Arm(cache=cache, executed=executed, tool_s=tool_s, hit_rate=rate, wrong=wrong)


def quantile(weighted: Iterable[tuple[float, int]], share: float) -> float:
    """Return the smallest value that at least this share of the weight does not exceed; 0 for no values."""
    ordered = sorted(weighted)
    wanted = share * sum(weight for _, weight in ordered)
    seen = 0
    for value, weight in ordered:
        seen += weight
        if seen >= wanted:
            return value
    return 0.0


def _order(name: str | None) -> tuple[int, float, str]:
    """Order groups: numbers first in their order, then texts, and rollouts without the label last."""
    if name is None:
        return 2, 0.0, ""
    try:
        return 0, float(name), name
    except ValueError:
        return 1, 0.0, name
