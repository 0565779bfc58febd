"""What follows from a step besides its answer: counts, sandboxes made ready, spans, and its overhead."""

from collections.abc import Callable
from dataclasses import dataclass

from proxy.execution.tracing import Traces
from proxy.execution.warm_forks import WarmForks
from proxy.storage.rollouts import Overhead
from proxy.telemetry.counters import Counters
from proxy.telemetry.timing import AnswerTimes, Timing
from proxy.tree.rollout import Outcome, Rollout
from proxy.tree.tree import Record


@dataclass(frozen=True, slots=True)
class Answer:
    """The record that answers a call, how the record was obtained, and where the time went."""

    record: Record
    outcome: Outcome
    timing: Timing


class StepNotes:
    """Passes each step on: to the counters, the warm forks and the traces."""

    def __init__(
        self,
        counts: Counters,
        warm: WarmForks,
        model_tokens: Callable[[Record], int],
        traces: Traces | None = None,
    ) -> None:
        """Create the notes of all rollouts; `model_tokens` are the tokens behind a record's answer."""
        self._counts, self._warm, self._traces = counts, warm, traces
        self._model_tokens = model_tokens
        self._overheads: dict[tuple[int, str], Overhead] = {}
        self.times = AnswerTimes()  # When the calls of the latest rollouts were answered.

    def add(self, rollout: Rollout, record: Record, outcome: Outcome, timing: Timing | None) -> None:
        """Note a step that a rollout has taken. `timing` is None for a hit, which took no time beside the tool's."""
        self._counts.answered(outcome, record.seconds)
        if rollout.run:
            self._counts.runs.answered(rollout.run, outcome, record.seconds)
        # Reports count the same (`proxy.control.reports`). Such an answer has just been read, so it is in memory.
        if rollout.tree.spec.driver == "video" and outcome in (Outcome.HIT, Outcome.WAIT):
            self._counts.model_tokens_saved += self._model_tokens(record)
        self.times.note(rollout.id, rollout.calls - 1, rollout.used_at)
        self._warm.note_step(rollout)
        if self._traces is not None:
            self._traces.answered(rollout, record, outcome, timing)
        if timing is not None and timing.endpoint:
            key = rollout.id, timing.endpoint
            spent = self._overheads.get(key, Overhead(0.0, 0.0, 0.0))
            self._overheads[key] = Overhead(
                spent.restore_s + timing.restore_s, spent.replay_s + timing.replay_s, spent.wait_s + timing.wait_s
            )

    def take_overheads(self) -> dict[tuple[int, str], Overhead]:
        """Return what calls took beside their tools since the last time, by number of their rollout and endpoint."""
        taken, self._overheads = self._overheads, {}
        return taken
