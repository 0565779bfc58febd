"""The rules of a cluster: who may answer a call, and which calls were answered (pure).

A member is one proxy of the cluster. It is the *ingress* of the calls that agents send to it, and the *owner* of some
tasks. Calls reach an owner through an ingress, which may be the owner itself.

1. **The log.** Each task has a log of numbered rows in a database. A row is written only if its number follows the last
   one. A member becomes the owner of a task by writing a row that says so. The number of that row is its *view*. An
   owner whose row is refused has been replaced, and drops the task. No clock takes part in this.
2. **One row at a time.** An owner has at most one row on its way (`Outbox`). Lines that come up meanwhile share the
   next row, so no line of a replaced owner can follow the row of its successor.
3. **Steps.** A record, and the step that a rollout takes by it (`Stepped`), are in the log before the call is answered.
   So a replaced owner answers nothing, and the log alone says where each rollout is.
4. **Calls that are made again.** A link may break and an owner may die after a step is in the log, and before its
   answer has arrived. The ingress then makes the call again under its number. The step names the call, so the owner,
   or the next one, gives the answer of that step once more (`Steps.answered`).
5. **Another ingress.** A call that comes through another ingress than the rollout's last one may be a late copy, whose
   agent has left. So the owner asks the ingress whether an agent still waits for it. The reply counts only if the
   rollout has taken no step since the question (`Steps.must_confirm`).
6. **Late copies.** Each call says which one is the oldest that its ingress may make again. What is older is a copy that
   was late on its way, and is refused (`Floors`). No owner needs what an earlier one has heard: calls name its view.
7. **Compaction.** Rows may be replaced by fewer ones that say the same (`replaceable`), at any time and by anybody.
   Numbers must stay unique for those who do not know of it. A replaced owner sends its next row under the number at
   which its successor began, so the rows that say who owns a task stay. A member that takes a task over may know a row
   as the last one that is replaced by now, so its row is written only behind the greatest number.

Leases (`Member.until` in the database) only say when another member may try to take a task over.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

Line = TypeVar("Line")

MAX_ANSWERED = 64
"""Most calls of a rollout whose steps are remembered: as many may be under way at once when their owner dies. A further
one is made again as a new call."""


class Position(NamedTuple):
    """Where a rollout is."""

    turn: int  # How many calls of the rollout were answered.
    node: int  # Number of the tree's node that it is at.


class StepId(NamedTuple):
    """A step of a call, the same for each copy of the call."""

    ingress: int
    boot: int
    number: int  # Number of the call among those of this start.
    step: int  # Number of the step among those of the call, from 0. Most calls take one.


class Stepped(NamedTuple):
    """A line of the log: a rollout has taken a step."""

    rollout: int  # Number of the rollout, unique in the cluster.
    position: Position
    record: int  # Number of the record that answers the call.
    call: StepId
    oldest: int  # Number of the oldest call that the ingress still waited for. It makes no earlier one again.
    outcome: int = 0  # How the call was answered, an `Outcome`.


class Ended(NamedTuple):
    """A line of the log: a rollout has ended."""

    rollout: int


class Floors:
    """Which calls of an ingress are late copies: it makes none again that is older than the oldest one it waits for."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[int, int]] = {}

    def note(self, ingress: int, boot: int, oldest: int) -> None:
        """Note which call was the oldest when an ingress sent another one."""
        self._of[ingress] = max(self._of.get(ingress, (0, 0)), (boot, oldest))

    def is_late(self, ingress: int, boot: int, number: int) -> bool:
        """Return whether a call is not waited for any more."""
        return (boot, number) < self._of.get(ingress, (0, 0))


class Steps:
    """The last steps of a task's running rollouts, as its log has them."""

    def __init__(self, lines: Iterable[Stepped | Ended] = ()) -> None:
        self._of: dict[int, dict[StepId, Stepped]] = {}
        for line in lines:
            self.take(line)

    def __len__(self) -> int:
        """Return how many rollouts have taken a step."""
        return len(self._of)

    def take(self, line: Stepped | Ended) -> None:
        """Take the next line."""
        if isinstance(line, Ended):
            self._of.pop(line.rollout, None)
            return
        steps, call = self._of.setdefault(line.rollout, {}), line.call
        # A step that was written and not taken is written again: the last line of a call counts.
        steps.pop(call, None)
        for known in tuple(steps):
            if known.ingress == call.ingress and (known.boot, known.number) < (call.boot, line.oldest):
                del steps[known]
        if len(steps) >= MAX_ANSWERED:
            del steps[next(iter(steps))]
        steps[call] = line

    def last(self, rollout: int) -> Stepped | None:
        """Return the last step of a rollout."""
        steps = self._of.get(rollout)
        return None if steps is None else steps[next(reversed(steps))]

    def answered(self, rollout: int, call: StepId, *, is_again: bool = False) -> int | None:
        """Return the record that has answered a call; None for a new one, as what an agent repeats behind a step is."""
        step = self._of.get(rollout, {}).get(call)
        return None if step is None or (is_again and step is not self.last(rollout)) else step.record

    def must_confirm(self, rollout: int, ingress: int, turn: int, confirmed: int | None) -> bool:
        """Return whether an ingress must confirm that an agent waits for a new call; `confirmed`: when it last did."""
        last = self.last(rollout)
        # A call that was answered since makes an earlier confirmation worthless: the agent may have sent it elsewhere.
        return last is not None and last.call.ingress != ingress and confirmed != turn

    def lines(self) -> Iterator[Stepped]:
        """Yield the lines that say the same."""
        for steps in self._of.values():
            yield from steps.values()


def replaceable(rows: Iterable[tuple[int, bool]]) -> list[int]:
    """Return the numbers of the rows that a compaction may replace: those that do not say who owns the task."""
    return [number for number, is_own in rows if not is_own]


@dataclass(slots=True)
class Outbox(Generic[Line]):
    """The lines of one task that wait for the log, of which one row is on its way at most."""

    row: int  # Number of the last row that is known to be in the log.
    waiting: list[Line] = field(default_factory=list)  # Lines of the next row.
    sent: list[Line] = field(default_factory=list)  # Lines of the row that is on its way.

    def next_row(self) -> int | None:
        """Begin the next row and return its number; None if a row is on its way, or if there is no line."""
        # One row at a time, so that rows are in the log without gaps.
        if self.sent or not self.waiting:
            return None
        self.sent, self.waiting = self.waiting, []
        return self.row + 1

    def written(self) -> None:
        """Note that the row on its way is in the log."""
        self.row, self.sent = self.row + 1, []
