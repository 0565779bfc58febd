"""The report of a replay: answers, their sources and costs, and the differences between two runs. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from math import ceil
from typing import Any

TOTALS = (
    "calls", "hits", "waits", "misses", "bypasses", "executed_s", "saved_s", "replayed_calls", "replayed_s", "starts",
    "restores", "divergences", "errors",
)  # fmt: skip
"""Members of `GET /api/v1/stats` that a replay reads: counts and seconds since the proxy started."""


class Source(StrEnum):
    """Where an answer came from, as its `Cache-Status` header says."""

    HIT = "hit"
    WAIT = "wait"
    MISS = "miss"
    BYPASS = "bypass"


@dataclass(frozen=True, slots=True)
class ToolAnswer:
    """The result of a call as the agent sees it; `exit_code` is None if it timed out, or is no command."""

    stdout: str
    stderr: str
    exit_code: int | None
    status: int = 200


@dataclass(frozen=True, slots=True)
class CallId:
    """Identifies a recorded call by the names of the workload, and its position in the rollout, from 0."""

    task: str
    rollout: str
    index: int


@dataclass(frozen=True, slots=True)
class ReplayedCall:
    """The result of one replayed call: an answer or an error, with the `seconds` of refused attempts (429, 503) too."""

    shown: str
    seconds: float
    answer: ToolAnswer | None = None
    error: str | None = None
    source: Source | None = None
    refusals: int = 0


@dataclass(frozen=True, slots=True)
class ReplayRun:
    """The result of one pass over a workload; `spent` says by how much each of `TOTALS` grew."""

    cached: bool
    wall_s: float
    outcomes: Mapping[CallId, ReplayedCall]
    spent: Mapping[str, float]
    unsent: int = 0
    troubles: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of a run. Seconds are measured by the proxy; `median_ms` and `p95_ms` are what callers waited."""

    cached: bool
    calls: int
    hits: int
    waits: int
    misses: int
    bypasses: int
    replays: int
    errors: int
    refusals: int
    hit_rate: float
    executed_s: float
    saved_s: float
    median_ms: float
    p95_ms: float
    wall_s: float


@dataclass(frozen=True, slots=True)
class Difference:
    """A call with different answers in two runs."""

    call: CallId
    shown: str
    first: ToolAnswer
    second: ToolAnswer


@dataclass(frozen=True, slots=True)
class Comparison:
    """The comparison of two runs: how many calls both answered, and which of them differently."""

    compared: int
    differences: tuple[Difference, ...]

    @property
    def rate(self) -> float:
        """Share of compared calls that differ, from 0 to 1."""
        return len(self.differences) / self.compared if self.compared else 0.0


def figures(run: ReplayRun) -> Figures:
    """Return the figures of a run. Waits count towards the hit rate, because they executed nothing."""
    outcomes = run.outcomes.values()
    count = {source: sum(outcome.source is source for outcome in outcomes) for source in Source}
    seconds = sorted(outcome.seconds for outcome in outcomes if outcome.answer is not None)
    errors = sum(outcome.error is not None for outcome in outcomes)
    return Figures(
        cached=run.cached,
        calls=len(outcomes),
        hits=count[Source.HIT],
        waits=count[Source.WAIT],
        misses=count[Source.MISS],
        bypasses=count[Source.BYPASS],
        replays=round(run.spent["replayed_calls"]),
        errors=errors + run.unsent + len(run.troubles),
        refusals=sum(outcome.refusals for outcome in outcomes),
        hit_rate=(count[Source.HIT] + count[Source.WAIT]) / len(outcomes) if outcomes else 0.0,
        executed_s=run.spent["executed_s"],
        saved_s=run.spent["saved_s"],
        median_ms=percentile(seconds, 0.5) * 1e3,
        p95_ms=percentile(seconds, 0.95) * 1e3,
        wall_s=run.wall_s,
    )


def compare(first: ReplayRun, second: ReplayRun) -> Comparison:
    """Compare the answers to each call that both runs answered, in the order of the first run."""
    compared = 0
    differences: list[Difference] = []
    for call, outcome in first.outcomes.items():
        counterpart = second.outcomes.get(call)
        if outcome.answer is None or counterpart is None or counterpart.answer is None:
            continue
        compared += 1
        if outcome.answer != counterpart.answer:
            differences.append(Difference(call, outcome.shown, outcome.answer, counterpart.answer))
    return Comparison(compared, tuple(differences))


def errors_of(run: ReplayRun) -> list[str]:
    """Return the errors of a run, one per line; errors outside the calls come first."""
    lines = list(run.troubles)
    for call, outcome in run.outcomes.items():
        if outcome.error is not None:
            lines.append(f"{call.task} {call.rollout} call {call.index} ({outcome.shown}): {outcome.error}")
    if run.unsent:
        lines.append(f"{run.unsent} calls were not sent, because the proxy could not be reached any more")
    return lines


def percentile(ascending: Sequence[float], share: float) -> float:
    """Return a percentile by nearest rank; 0.0 for no values. The share is from 0 to 1."""
    return ascending[max(0, ceil(share * len(ascending)) - 1)] if ascending else 0.0


def read_source(cache_status: str) -> Source | None:
    """Return the source in a `Cache-Status` header (RFC 9211) of the proxy; None if there is none."""
    parameters = [part.strip() for part in cache_status.split(";")]
    if "collapsed" in parameters:
        return Source.WAIT
    known = {"hit": Source.HIT, "fwd=miss": Source.MISS, "fwd=bypass": Source.BYPASS}
    return next((known[parameter] for parameter in parameters if parameter in known), None)


def spent(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, float]:
    """Return by how much the proxy's totals grew between two readings. A total that is missing counts as 0."""
    return {name: after.get(name, 0) - before.get(name, 0) for name in TOTALS}


def as_json(runs: Mapping[str, ReplayRun], comparisons: Mapping[str, Comparison]) -> dict[str, Any]:
    """Return the whole report as JSON values: figures, errors, and each difference with both answers."""
    return {
        "runs": {
            name: {**asdict(figures(run)), "error_lines": errors_of(run), "spent": dict(run.spent)}
            for name, run in runs.items()
        },
        "comparisons": {
            name: {
                "compared": comparison.compared,
                "differing": len(comparison.differences),
                "rate": comparison.rate,
                "differences": [
                    asdict(each.call) | {"command": each.shown, "one": asdict(each.first), "other": asdict(each.second)}
                    for each in comparison.differences
                ],
            }
            for name, comparison in comparisons.items()
        },
    }
