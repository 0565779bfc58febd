"""Divergence: when a replayed call counts as the same as its record, and when it does not.

A replay need not repeat everything: an answer that shows the time of day may differ and leave the same state. What
counts depends on what is known of the two states:

1. Both have a digest: the states must be equal, and the answers may differ. Files that it wrote in another order
   have the recorded order by then (`sandboxes.driver.expect`).
2. Neither has one (live processes run): the rest of the state (`witness`), the effect and the
   answer must be equal. Nothing may have come from outside the sandbox but what was recorded: a process may hold it.
3. Only one has a digest: the states differ.
"""

from collections.abc import Callable

from proxy.tree.tree import Record
from sandboxes.calls import Execution, ToolResult
from sandboxes.effects import Effect
from sandboxes.errors import SandboxError

ANSWER_DIFFERS = "it answered differently"
"""The reason that `divergence` gives if only the answers differ."""


def gap_s(record: Record) -> float:
    """Return how long background processes at a record's node had run before its call; 0 if none did."""
    came = record.source.origin
    # A digest means that nothing runs in the background, so nothing could happen between the two calls.
    if record.source.state is not None or came is None:
        return 0.0
    # The gap is from the end of the call that led here to the start of this one; a clock set back must not make it
    # negative.
    return max(0.0, record.recorded_at - record.seconds - came.recorded_at)


def require_conclusive(record: Record, execution: Execution) -> None:
    """Raise SandboxError if a replayed call ran out of time or memory; not for a private record, maybe cut short."""
    if not (execution.shareable or record.private):
        raise SandboxError("a replayed call did not get the time or memory that it had before. Retry.")


def divergence(
    record: Record, execution: Execution, recorded: Callable[[], ToolResult], steady: Callable[[bytes], bytes] = bytes
) -> str:
    """Return how a replayed call differs from its record; empty if it counts as the same.

    `recorded` is called only if the answers decide. `steady` returns the part of an answer that a replay must repeat.
    """
    # 1. and 3. Where digests exist they decide: equal states serve all later calls equally, whatever was answered.
    then, now = record.target.state, execution.state
    if then is not None and now is not None:
        if then.content != now.content:
            return "it left another state"
        # Only where the sandbox knows in which order the call wrote, so that the recorded order was possible.
        same = then.exact == now.exact or execution.course.order is None
        return "" if same else "it left files whose modification times have another order"
    if (then is None) != (now is None):
        return "only one of the two states has a digest: in the other, processes run"
    # A process may hold what came from outside in its memory, where nothing compares it.
    if then is None and execution.live:
        return "it received something from outside the sandbox that is not recorded"
    # 2. Without digests: everything that processes in the background do not write themselves.
    if record.target.witness != execution.witness:
        return "it left other files or another session"
    # Whether a background process changed meanwhile depends on the moment, not on the call.
    if (execution.effect ^ record.effect) & ~Effect.PROCESSES:
        return f"its effect was {execution.effect.names}, recorded {record.effect.names}"
    # Last, because `steady` parses both answers.
    return "" if same_answer(execution.result, recorded(), steady) else ANSWER_DIFFERS


def same_answer(now: ToolResult, then: ToolResult, steady: Callable[[bytes], bytes]) -> bool:
    """Return whether two answers have the same status, and the same body in the part that `steady` returns."""
    return now.status == then.status and (now.body == then.body or steady(now.body) == steady(then.body))
