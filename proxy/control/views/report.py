"""The view of a report: what the cache did for groups of rollouts. Pure."""

from typing import Literal

from pydantic import BaseModel

from forkpoint.results import ReportRow


class SlowCall(BaseModel):
    """A call of a task, summed over all states at which it was made.

    Attributes:
        executed: How often it was executed.
        saved: How often a hit or a wait saved its execution.
        executed_s: Seconds that the tool ran for the executions.
        saved_s: Seconds that hits and waits saved.
        executed_cpu_s: CPU seconds of the executions; null if they are not known of any.
        saved_cpu_s: CPU seconds that hits and waits saved; null if they are not known of any.
        peak_bytes: The most memory that one execution used at one time; null if it is not known of any.
        states: The number of states in which it was executed.
        differing: The number of these in which executions had different answers, or led to different states.
        reason: Why it was executed rather than known: `differs` if it spoils itself, or as for a single call.
        remedy: What helps; empty if nothing does.
    """

    task: str
    title: str
    executed: int
    saved: int
    executed_s: float
    saved_s: float
    executed_cpu_s: float | None
    saved_cpu_s: float | None
    peak_bytes: int | None
    states: int
    differing: int
    reason: Literal["new-call", "other-state", "private", "quarantined", "differs"]
    remedy: str


class Arm(BaseModel):
    """What one kind of cache does with the report's calls.

    Attributes:
        cache: `none` executes every call. `stateless` knows a call of its task, whatever happened before it; it is
            computed from the records. `stateful` is what this proxy did.
        executed: Calls that are executed.
        tool_s: Seconds that tools run for them, without restores and replays.
        hit_rate: Share of calls that are not executed, from 0 to 1.
        wrong: Calls whose answer is not the recorded one. The stateful arm counts none: audits look for those.
    """

    cache: str
    executed: int
    tool_s: float
    hit_rate: float
    wrong: int


class ReportView(BaseModel):
    """A report.

    Attributes:
        labels: Labels that all of the rollouts have.
        task: The only task; null for all.
        rows: The groups; numbers are in their order, and texts in alphabetical order.
        arms: The same calls without a cache, with a stateless one, and with this one.
        calls: The calls whose executions took longest in sum, the slowest first, and why they ran; at most 20.
        label_names: Names of the labels that the rollouts have, in alphabetical order; at most 100.
        damaged: Rollouts and calls that are left out of all figures, because rows of the store are damaged.
    """

    by: str
    labels: dict[str, str]
    task: str | None
    price_per_hour: float
    total: ReportRow
    rows: list[ReportRow]
    truncated: bool
    arms: list[Arm]
    calls: list[SlowCall] = []
    label_names: list[str] = []
    damaged: int = 0
