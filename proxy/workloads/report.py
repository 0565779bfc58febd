"""What a replay found: answers, where they came from, what they cost, and where two runs differ (pure)."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from math import ceil
from typing import Any

TOTALS = (
    "calls",
    "hits",
    "waits",
    "misses",
    "bypasses",
    "executed_s",
    "saved_s",
    "replayed_calls",
    "replayed_s",
    "starts",
    "restores",
    "divergences",
    "errors",
)
"""What a replay reads of `GET /api/v1/stats`: counts and seconds since the proxy started."""


class Source(StrEnum):
    """Where an answer came from, as its `Cache-Status` says."""

    HIT = "hit"
    WAIT = "wait"
    MISS = "miss"
    BYPASS = "bypass"


@dataclass(frozen=True, slots=True)
class ShellAnswer:
    """What a shell call gave, as the agent sees it. Two answers are the same if all three members are."""

    stdout: str
    stderr: str
    exit_code: int | None


@dataclass(frozen=True, slots=True)
class CallId:
    """One recorded call: its task and rollout as the workload names them, and its place in the rollout."""

    task: str
    rollout: str
    index: int


@dataclass(frozen=True, slots=True)
class ReplayedCall:
    """One call of a replay. seconds: what its caller waited, refusals included.

    Either answer or error is there. refusals: how often the proxy asked to come again later (429 or 503).
    timing: the `Server-Timing` entries, in ms.
    """

    shown: str
    seconds: float
    answer: ShellAnswer | None = None
    error: str | None = None
    source: Source | None = None
    timing: Mapping[str, float] = field(default_factory=dict)
    node: str | None = None
    refusals: int = 0


@dataclass(frozen=True, slots=True)
class ReplayRun:
    """One pass over a workload.

    spent: by how much each of TOTALS grew.
    unsent: calls of rollouts that ended early, because the proxy could not be reached.
    troubles: what went wrong outside the calls.
    """

    cached: bool
    wall_s: float
    outcomes: Mapping[CallId, ReplayedCall]
    spent: Mapping[str, float]
    unsent: int = 0
    troubles: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Figures:
    """The row of one run. Seconds are the proxy's own; call times are what the callers waited for an answer."""

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
    """One call that two runs answered differently."""

    call: CallId
    shown: str
    one: ShellAnswer
    other: ShellAnswer


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two runs beside one another. compared: the calls that both answered."""

    compared: int
    differences: tuple[Difference, ...]

    @property
    def rate(self) -> float:
        """Return differing / compared, 0 where nothing was compared."""
        return len(self.differences) / self.compared if self.compared else 0.0


def figures(run: ReplayRun) -> Figures:
    """Count one run. The hit rate is hits and waits over calls: neither ran anything."""
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


def compare(one: ReplayRun, other: ReplayRun) -> Comparison:
    """Compare stdout, stderr and exit code of each call that both runs answered, in the order of one."""
    compared = 0
    differences: list[Difference] = []
    for call, outcome in one.outcomes.items():
        counterpart = other.outcomes.get(call)
        if outcome.answer is None or counterpart is None or counterpart.answer is None:
            continue
        compared += 1
        if outcome.answer != counterpart.answer:
            differences.append(Difference(call, outcome.shown, outcome.answer, counterpart.answer))
    return Comparison(compared, tuple(differences))


def errors_of(run: ReplayRun) -> list[str]:
    """Return one line for each error of a run, the troubles outside its calls first."""
    lines = list(run.troubles)
    for call, outcome in run.outcomes.items():
        if outcome.error is not None:
            lines.append(f"{call.task} {call.rollout} call {call.index} ({outcome.shown}): {outcome.error}")
    if run.unsent:
        lines.append(f"{run.unsent} calls were not sent, because their rollouts lost the proxy")
    return lines


def percentile(ascending: Sequence[float], share: float) -> float:
    """Return the value below or at which share (0 to 1) of ascending lies, by nearest rank; 0.0 of nothing."""
    return ascending[max(0, ceil(share * len(ascending)) - 1)] if ascending else 0.0


def read_source(cache_status: str) -> Source | None:
    """Read `Cache-Status` (RFC 9211) as the proxy writes it; None if it says nothing that we know."""
    parameters = [part.strip() for part in cache_status.split(";")]
    if "collapsed" in parameters:
        return Source.WAIT
    known = {"hit": Source.HIT, "fwd=miss": Source.MISS, "fwd=bypass": Source.BYPASS}
    return next((known[parameter] for parameter in parameters if parameter in known), None)


def read_timing(server_timing: str) -> dict[str, float]:
    """Read the durations of a `Server-Timing` header, in ms. Entries without one are left out."""
    return {name: float(ms) for name, ms in re.findall(r"([\w-]+)\s*;\s*dur=(\d+(?:\.\d+)?)", server_timing)}


def spent(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, float]:
    """Return by how much the proxy's totals grew between two looks at them. Those that it does not count are 0."""
    return {name: after.get(name, 0) - before.get(name, 0) for name in TOTALS}


def as_json(runs: Mapping[str, ReplayRun], comparisons: Mapping[str, Comparison], *, skipped: int) -> dict[str, Any]:
    """Return everything as JSON members: figures, errors, and each difference with both answers whole."""
    return {
        "skipped_calls": skipped,
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
                    {
                        **asdict(difference.call),
                        "command": difference.shown,
                        "one": asdict(difference.one),
                        "other": asdict(difference.other),
                    }
                    for difference in comparison.differences
                ],
            }
            for name, comparison in comparisons.items()
        },
    }
