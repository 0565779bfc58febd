"""The rules of a cluster: who may answer a call, and what is known of a rollout's position (pure).

A member is one proxy of the cluster. It is the *ingress* of the calls that agents send to it, and the *owner* of some
tasks. Calls reach an owner through an ingress, which may be the owner itself.

1. **The log.** Each task has a log of numbered rows in a database. A row is written only if its number follows the last
   one. A member becomes the owner of a task by writing a row that says so. The number of that row is its *view*. An
   owner whose row is refused has been replaced, and drops the task. No clock takes part in this.
2. **One row at a time.** An owner has at most one row on its way (`Outbox`). Lines that come up meanwhile share the
   next row, so no line of a replaced owner can follow the row of its successor.
3. **Misses.** A record is in the log before its answer is sent. A record never changes, so any answer from a record of
   the log is right, whichever member sends it. Only positions can be wrong.
4. **Positions.** A hit is not written to the log. The log names the ingress of each rollout (`Entered`), and an ingress
   keeps the position of its rollouts on its disk before it passes an answer on. So the log and one ingress together
   know the position, whatever happened to the owner.
5. **Takeover.** A new owner reads the log and asks each ingress that the log names. Until an ingress has reported, its
   rollouts wait: the owner cannot know what they were answered. An ingress that has reported accepts no answer of an
   older view any more; it asks again for what is not answered.
6. **Another ingress.** A rollout's call may come through another ingress than the one that the log names. It may be a
   late copy of a call whose agent has left, so the owner asks the ingress whether an agent still waits for the call.
   It then writes the new ingress, with the position *before* the call, and only then answers.
7. **Copies.** Links may break, and then calls are sent again under the same number. An owner takes a number once.
8. **Leaving.** An ingress that leaves tells the owners the positions that it has passed on. An owner writes those that
   it has too to the log, which then names no ingress for these rollouts (`NOBODY`). A rollout keeps its ingress if one
   of its calls still runs, or if an answer may be on its way.
9. **Compaction.** Rows may be replaced by fewer ones that say the same (`replaceable`), at any time and by anybody.
   Numbers must stay unique for those who do not know of it. A replaced owner sends its next row under the number at
   which its successor began, so the rows that say who owns a task stay. A member that takes a task over may know a row
   as the last one that is replaced by now, so its row is written only behind the greatest number.

Leases (`Member.until` in the database) only say when another member may try to take a task over.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, NamedTuple, TypeVar

Line = TypeVar("Line")

NOBODY = -1
"""The ingress of a rollout whose position is in the log. Members have numbers from 1."""


class Position(NamedTuple):
    """Where a rollout is. Later positions of one rollout compare as greater.

    Attributes:
        turn: How many calls of the rollout were answered.
        node: Number of the tree's node that it is at.
    """

    turn: int
    node: int


class Entered(NamedTuple):
    """A line of the log: from here on an ingress knows the position of a rollout.

    Attributes:
        rollout: Number of the rollout, unique in the cluster.
        ingress: Number of the ingress; `NOBODY` if the position is that of the log.
        position: Where the rollout was before its first call through this ingress.
    """

    rollout: int
    ingress: int
    position: Position


class Ended(NamedTuple):
    """A line of the log: a rollout has ended.

    Attributes:
        rollout: Number of the rollout.
    """

    rollout: int


class Admission(Enum):
    """What an owner does with a call."""

    SERVE = "serve"
    """Answer it."""
    HOLD = "hold"
    """Wait: the ingress that knows the rollout's position has not reported it."""
    CONFIRM = "confirm"
    """Ask the ingress whether an agent still waits for the call, and admit it again with the turn of that moment."""
    ENTER = "enter"
    """Write the line `Entered` of this ingress to the log, then answer."""


class OwnedTask:
    """What the owner of a task knows of the positions of its rollouts.

    Attributes:
        view: Number of the row that made this member the owner.
        entered: The latest line of each running rollout, by its number. Its position is that of the log, or a later
            one that an ingress has reported.
        unheard: Numbers of the ingresses that have not reported yet.
    """

    def __init__(self, view: int, lines: Iterable[Entered | Ended] = ()) -> None:
        """Read the log, up to the row of this view."""
        self.view = view
        self.entered: dict[int, Entered] = {}
        for line in lines:
            if isinstance(line, Entered):
                self.entered[line.rollout] = line
            else:
                self.entered.pop(line.rollout, None)
        self.unheard = {line.ingress for line in self.entered.values()} - {NOBODY}

    def hear(self, ingress: int, reported: Mapping[int, Position]) -> list[Entered]:
        """Take the report of an ingress that accepts no answer of an older view any more.

        Args:
            ingress: Number of the ingress.
            reported: The positions that it has, by rollout. It has none of a rollout that it never passed an answer to.

        Returns:
            The rollouts of this ingress, at their true positions; empty if the ingress had reported already.
        """
        # A report may come twice, and calls may have been answered since the first.
        if ingress not in self.unheard:
            return []
        self.unheard.discard(ingress)
        settled = []
        for line in self.entered.values():
            if line.ingress == ingress:
                # Positions only grow. An ingress that passed nothing on knows none: then the log is right.
                position = max(line.position, reported.get(line.rollout, line.position))
                settled.append(line._replace(position=position))
        self.entered |= {line.rollout: line for line in settled}
        return settled

    def admit(self, rollout: int, ingress: int, turn: int, confirmed: int | None = None) -> Admission:
        """Decide about a call.

        Args:
            rollout: Number of the rollout.
            ingress: Number of the ingress that the call came through.
            turn: How many calls of the rollout this owner has answered or found answered.
            confirmed: The value of `turn` when the ingress had to confirm that an agent waits for this call, if
                it has confirmed; None if it has not.
        """
        line = self.entered.get(rollout)
        # 1. The rollout is new to the log.
        if line is None:
            return Admission.ENTER
        # 2. An earlier owner may have answered calls that only this ingress knows of.
        if line.ingress in self.unheard:
            return Admission.HOLD
        # 3. The log names this ingress, so the next owner would ask it.
        if line.ingress == ingress:
            return Admission.SERVE
        # A call that was answered since makes an earlier confirmation worthless: the agent may have sent it elsewhere.
        return Admission.ENTER if confirmed == turn else Admission.CONFIRM

    def enter(self, line: Entered) -> None:
        """Note that a rollout's calls come through this ingress from now on. The line must be on its way to the log."""
        self.entered[line.rollout] = line

    def left(self, rollout: int, ingress: int, position: Position, reported: Position | None) -> Entered | None:
        """Let an ingress leave a rollout, of which no call is admitted and not answered.

        Args:
            rollout: Number of the rollout.
            ingress: Number of the ingress.
            position: Where the rollout is, as this owner knows it.
            reported: The position that the ingress has passed on last; None if it has passed none on.

        Returns:
            The line to write; None if the ingress has to stay. An answer that is on its way to it may be lost with the
            link, and its call is then sent again: a next owner must know that the answer was not passed on.
        """
        line = self.entered.get(rollout)
        # Only the ingress that the log names can leave, and only if its report is known.
        if line is None or line.ingress != ingress or ingress in self.unheard:
            return None
        # The owner is ahead of what the ingress has passed on: an answer is on its way.
        if max(line.position, reported or line.position) != position:
            return None
        line = Entered(rollout, NOBODY, position)
        self.enter(line)
        return line

    def end(self, rollout: int) -> None:
        """Note that a rollout has ended."""
        self.entered.pop(rollout, None)


def replaceable(rows: Iterable[tuple[int, bool]]) -> list[int]:
    """Return the numbers of the rows that a compaction may replace.

    Args:
        rows: Numbers of rows, each with whether the row says who owns the task.
    """
    return [number for number, is_own in rows if not is_own]


class IngressTask:
    """What an ingress knows of one task.

    Attributes:
        view: The latest view that it has heard of; 0 for none.
        positions: The latest position that it passed on to an agent, by rollout.
    """

    def __init__(self, view: int = 0, positions: Mapping[int, Position] | None = None) -> None:
        self.view, self.positions = view, dict(positions or {})

    def adopt(self, view: int) -> bool:
        """Accept no answer of an older view any more; return False if this view itself is older."""
        if view < self.view:
            return False
        self.view = view
        return True

    def accept(self, view: int, positions: Mapping[int, Position]) -> bool:
        """Take the answer of an owner, with the positions that it led to; return False if it must not be passed on."""
        if not self.adopt(view):
            return False
        # Answers may arrive in another order than they were made.
        for rollout, position in positions.items():
            self.positions[rollout] = max(position, self.positions.get(rollout, position))
        return True


class CopyKind(Enum):
    """What an owner makes of a call by its number."""

    NEW = "new"
    """It was not taken yet."""
    COPY = "copy"
    """It was taken: its answer is, or will be, the answer of the first copy."""
    LATE = "late"
    """Its ingress has its answer and does not wait for it any more."""


class TakenCalls:
    """Which calls of an ingress an owner has taken. The ingress numbers them in order, anew after each start.

    Attributes:
        boot: Start of the ingress, a number that grows from start to start.
    """

    def __init__(self, boot: int) -> None:
        self.boot = boot
        self._answered_below = 0
        self._taken: set[int] = set()

    def take(self, number: int, *, oldest: int) -> CopyKind:
        """Take a call.

        Args:
            number: Number of the call.
            oldest: Number of the oldest call that the ingress still waits for. Earlier ones are forgotten.
        """
        below = self._answered_below
        if oldest > below:
            self._answered_below = oldest
            # Whichever is less: what is taken, or the numbers in between, most of which may be those of other tasks.
            if len(self._taken) < oldest - below:
                self._taken = {taken for taken in self._taken if taken >= oldest}
            else:
                self._taken.difference_update(range(below, oldest))
        # A copy that was held up on its way, while the ingress got the answer of another one.
        if number < self._answered_below:
            return CopyKind.LATE
        if number in self._taken:
            return CopyKind.COPY
        self._taken.add(number)
        return CopyKind.NEW

    def release(self, number: int) -> None:
        """Forget a call that was taken and came to nothing, so that a copy of it is taken as new."""
        self._taken.discard(number)


@dataclass(slots=True)
class Outbox(Generic[Line]):
    """The lines of one task that wait for the log, of which one row is on its way at most.

    Attributes:
        row: Number of the last row that is known to be in the log.
        waiting: Lines of the next row.
        sent: Lines of the row that is on its way.
    """

    row: int
    waiting: list[Line] = field(default_factory=list)
    sent: list[Line] = field(default_factory=list)

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
