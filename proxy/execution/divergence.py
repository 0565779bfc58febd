"""Divergence: when a replayed call counts as the same as its record, and when it does not."""

from collections.abc import Callable

from proxy.tree.tree import Record
from sandboxes.calls import Execution, ToolResult
from sandboxes.effects import Effect
from sandboxes.errors import SandboxError

ANSWER_DIFFERS = "it answered differently"
"""The reason that `differs` gives when only the answers differ."""


def gap_s(record: Record) -> float:
    """Return the seconds for which what lived at a record's node had run before its call; 0 where nothing lived."""
    came = record.source.origin
    if record.source.state is not None or came is None:
        return 0.0
    return max(0.0, record.recorded_at - record.seconds - came.recorded_at)


def require_its_due(record: Record, execution: Execution) -> None:
    """Raise where a replayed call's time was up, or memory was short: that says nothing of what was recorded.

    Raises:
        SandboxError: so it was.
    """
    if not (execution.shareable or record.private):
        raise SandboxError("a replayed call did not get the time or memory that it had before. Ask again.")


def differs(
    record: Record, execution: Execution, recorded: ToolResult, steady: Callable[[bytes], bytes] = bytes
) -> str:
    """Say how a replayed call differs from its record; empty where it does not (pure).

    steady: returns what of an answer must come again.

    The state decides where both have a digest: an answer may show the time of day and leave the same state. Without
    digests (live processes, too much changed) the answer must be the same, and what else of the state can be compared.
    """
    then, now = record.target.state, execution.state
    if then is not None and now is not None:
        return "" if then.content == now.content else "it left another state"
    if (then is None) != (now is None):
        return "only one of the two states has a digest: something lives, or too much changed, in the other"
    if record.target.witness != execution.witness:
        return "it left other files or another session"
    # Whether a process that lives did something meanwhile depends on the moment.
    if (execution.effect ^ record.effect) & ~Effect.PROCESSES:
        return f"its effect was {execution.effect.names}, recorded {record.effect.names}"
    return "" if same_answer(execution.result, recorded, steady) else ANSWER_DIFFERS


def same_answer(now: ToolResult, then: ToolResult, steady: Callable[[bytes], bytes]) -> bool:
    """Return whether two answers have the same status, and the same body in what steady returns of it."""
    return now.status == then.status and (now.body == then.body or steady(now.body) == steady(then.body))
