"""The view of a report: what the cache did for groups of rollouts. Pure."""

from typing import Literal

from pydantic import BaseModel

from proxy.control.views.resources import CallTotalsView


class ReportRow(CallTotalsView):
    """The totals of one group of rollouts.

    Attributes:
        group: What the rollouts have in common: the value of the label, the task or the endpoint; null for rollouts
            without the label.
        replayed_s: Seconds that bringing sandboxes to the rollouts' states took. By endpoint, those of calls since the
            store has them by endpoint; null if there was none.
        restored_s: Seconds that getting sandboxes took; by endpoint as `replayed_s`.
        waited_s: Seconds that executed calls waited for other calls; by endpoint as `replayed_s`.
        p50_s: Median of the tools' seconds of all calls, had each been executed.
        paid_p50_s: Median of the tools' seconds of all calls as they were: 0 for a hit.
        reward: Mean of the label `reward`; null if no rollout has one.
        executed_cost: Price of `executed_s`.
        saved_cost: Price of `saved_s`.
        executed_tokens: Tokens that models of video tools counted for misses and bypasses.
        saved_tokens: Tokens that they would have counted again for hits and waits.
        executed_cpu_s: CPU seconds of executed calls, as far as they are known; null if none is.
        saved_cpu_s: CPU seconds that hits and waits saved, as far as they are known; null if none is.
        peak_bytes: The most memory that one call used at one time; null if it is not known of any.
        kept_bytes: By owner, the bytes that kept states of the owner's tasks have added to the disk; null for others.
        disk_bytes: The most of these; null for no limit.
    """

    group: str | None
    rollouts: int = 0
    replayed_s: float | None = None
    restored_s: float | None = None
    waited_s: float | None = None
    p50_s: float = 0.0
    p95_s: float = 0.0
    paid_p50_s: float = 0.0
    paid_p95_s: float = 0.0
    reward: float | None = None
    rewarded: int = 0
    executed_cost: float = 0.0
    saved_cost: float = 0.0
    executed_tokens: int = 0
    saved_tokens: int = 0
    executed_cpu_s: float | None = None
    saved_cpu_s: float | None = None
    peak_bytes: int | None = None
    kept_bytes: int | None = None
    disk_bytes: int | None = None


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
