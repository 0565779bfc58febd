"""The report of a replay: answers, their sources and costs, and the differences between two runs. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import ceil
from typing import Any

from forkpoint.results import Outcome

TOTALS = (
    "calls", "hits", "waits", "misses", "bypasses", "executed_s", "saved_s", "replayed_calls", "replayed_s", "starts",
    "restores", "divergences", "errors",
)  # fmt: skip
"""Members of `GET /api/v1/stats` that a replay reads: counts and seconds since the proxy started."""


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
    outcome: Outcome | None = None
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


def figures(run: ReplayRun) -> dict[str, float]:
    """Return the figures of a run: the proxy's seconds, and as `median_ms` and `p95_ms` what callers have waited."""
    calls = run.outcomes.values()
    count = Counter(call.outcome for call in calls)
    seconds = sorted(call.seconds for call in calls if call.answer is not None)
    errors = sum(call.error is not None for call in calls)
    return {
        "cached": run.cached, "calls": len(calls),
        "hits": count["hit"], "waits": count["wait"], "misses": count["miss"], "bypasses": count["bypass"],
        "replays": round(run.spent["replayed_calls"]), "errors": errors + run.unsent + len(run.troubles),
        "refusals": sum(call.refusals for call in calls),
        # Waits executed nothing.
        "hit_rate": (count["hit"] + count["wait"]) / len(calls) if calls else 0.0,
        "executed_s": run.spent["executed_s"], "saved_s": run.spent["saved_s"],
        "median_ms": percentile(seconds, 0.5) * 1e3, "p95_ms": percentile(seconds, 0.95) * 1e3, "wall_s": run.wall_s,
    }  # fmt: skip


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


def spent(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, float]:
    """Return by how much the proxy's totals grew between two readings. A total that is missing counts as 0."""
    return {name: after.get(name, 0) - before.get(name, 0) for name in TOTALS}


def as_json(runs: Mapping[str, ReplayRun], comparisons: Mapping[str, Comparison]) -> dict[str, Any]:
    """Return the whole report as JSON values: figures, errors, and each difference with both answers."""
    return {
        "runs": {
            name: {**figures(run), "error_lines": errors_of(run), "spent": dict(run.spent)}
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
