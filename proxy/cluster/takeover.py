"""What a log says of a task, read by its next owner (pure)."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

from proxy.cluster.lines import Deleted, ForgottenRows, Kept, Line, Unkept, decode, encode
from proxy.cluster.postgres.database import LogRow, rows_digest
from proxy.cluster.protocol import Ended, Stepped, Steps, replaceable
from proxy.storage import copies as stored
from proxy.tree.keys import CallKey, withdrawn_key

LatestLine = TypeVar("LatestLine")

CHUNK_BYTES = 1 << 20
"""Bytes of a row that a compaction writes, unless a line is larger. Each is one statement, which has `PATIENCE_S`: with
4 MB, some were given up on a machine with ten busy processes for each core."""


_LATEST: dict[type[Any], Callable[[Any], Any]] = {
    stored.TaskCopy: itemgetter(0), stored.TreeCopy: itemgetter(0), stored.FindingCopy: itemgetter(0),
    stored.NoteCopy: itemgetter(0, 1), stored.NodeCopy: itemgetter(0), stored.MasksCopy: itemgetter(0),
    Kept: itemgetter(0),
}  # fmt: skip
"""Kinds of lines of which the latest one counts, each with what a line is about."""


@dataclass(slots=True)
class TaskLogReading:
    """A task as its log has it."""

    last: int = 0  # Number of the last row; 0 without rows.
    rows: int = 0  # How many rows do not say who owns the task.
    latest: dict[type[Any], dict[Any, Any]] = field(default_factory=lambda: {kind: {} for kind in _LATEST})
    # Its records and steps, in the order in which they were written.
    records: list[stored.RecordCopy | stored.StepCopy] = field(default_factory=list)
    dead: int = 0  # How many of them were written before the task was deleted last.
    rollouts: dict[int, stored.RolloutCopy] = field(default_factory=dict)  # Those that run, as they began.
    ended: dict[int, stored.RolloutCopy] = field(
        default_factory=dict
    )  # Those that have ended, at their last positions.
    # Numbers of the nodes and of the records that were deleted. None is given out again.
    forgotten: tuple[set[int], set[int]] = field(default_factory=lambda: (set(), set()))
    steps: Steps = field(default_factory=Steps)  # The last steps of its rollouts.
    ends: list[Line] = field(default_factory=list)  # Lines that say what has ended, in order.
    turns: dict[tuple[int, int], stored.StepCopy] = field(default_factory=dict)  # The last of each rollout and turn.
    layout: list["RowLayout"] = field(default_factory=list)  # What each row holds, in order.

    def of(self, kind: type[LatestLine]) -> dict[Any, LatestLine]:
        """Return the lines of a kind of which the latest one counts, by what they are about."""
        return self.latest[kind]

    def take_rows(self, rows: Iterable[LogRow]) -> None:
        """Take the next rows. Raises LogError: a row is not what a member of this version writes."""
        for row in rows:
            first, others = len(self.records), 0
            for line in decode(row.body or b""):
                self.take(line)
                others += not isinstance(line, stored.RecordCopy | stored.StepCopy)
            size_bytes = None if row.body is None else len(row.body)
            digest = sha256(row.body or b"").digest()
            self.layout.append(RowLayout(row.row, size_bytes, digest, first, len(self.records), others))
            self.last = row.row
            self.rows += row.body is not None

    def take(self, line: Line) -> None:
        """Take the next line."""
        match line:
            case stored.RecordCopy():
                self.records.append(line)
            case stored.StepCopy():
                self._take_step(line)
            case stored.RolloutCopy():
                self._take_rollout(line)
            case Stepped():
                self.steps.take(line)
                self._take_step(stored.StepCopy(line.rollout, line.position.turn - 1, line.record, line.outcome))
            case Ended() | Unkept() | ForgottenRows() | Deleted():
                self._take_end(line)
            case _:
                self.latest[type(line)][_LATEST[type(line)](line)] = line

    def _take_rollout(self, line: stored.RolloutCopy) -> None:
        known = self.ended.pop(line.rollout, line)
        # The labels of one that has ended were changed, in a store that may lag.
        self.rollouts[line.rollout] = (
            line._replace(calls=known.calls, node=known.node) if known.calls > line.calls else line
        )

    def _take_step(self, step: stored.StepCopy) -> None:
        # A compaction repeats the last steps of running rollouts behind those that it keeps.
        if self.turns.get(step[:2]) != step:
            self.turns[step[:2]] = step
            self.records.append(step)

    def _take_end(self, line: Ended | Unkept | ForgottenRows | Deleted) -> None:
        match line:
            case Ended():
                self.ends.append(line)
                if (rollout := self.rollouts.pop(line.rollout, None)) is not None:
                    self.ended[line.rollout] = self._placed(rollout)
                self.steps.take(line)
            case Unkept():
                self.ends.append(line)
                self.of(Kept).pop(line.node, None)
            case ForgottenRows():
                for known, gone in zip(self.forgotten, line, strict=True):
                    known.update(gone)
                for node in line.nodes:
                    self.of(stored.NodeCopy).pop(node, None)
                    self.of(Kept).pop(node, None)
                trees = self.of(stored.TreeCopy)
                self.latest[stored.TreeCopy] = {
                    n: tree for n, tree in trees.items() if tree.root not in self.forgotten[0]
                }
            case Deleted():
                self.dead, self.ends, self.steps, self.forgotten = len(self.records), [line], Steps(), (set(), set())
                for lines in (*self.latest.values(), self.rollouts, self.ended, self.turns):
                    lines.clear()

    def rest(self) -> Iterator[Line]:
        """Yield lines that a reader takes for the same as all that were taken and are no records or steps."""
        if any(self.forgotten):
            yield ForgottenRows(*map(sorted, self.forgotten))
        for kind, lines in self.latest.items():
            yield from self._notes() if kind is stored.NoteCopy else lines.values()
        yield from self.rollouts.values()
        for number, rollout in self.ended.items():
            yield from (rollout, Ended(number))
        yield from self.steps.lines()

    def copies(self) -> list[stored.Copy]:
        """Return the rows of the store."""
        ended = (
            stored.EndedCopy(rollout) for rollout in self.ended.values() if rollout.tree in self.of(stored.TreeCopy)
        )
        records = self._records()
        known = {record.record for record in records}
        findings = (finding for finding in self.of(stored.FindingCopy).values() if finding.record in known)
        return [
            *self.of(stored.TaskCopy).values(), *self.of(stored.TreeCopy).values(), *records, *findings,
            *self.of(stored.NodeCopy).values(), *map(self._placed, self.rollouts.values()), *ended, *self._notes(),
            *self.of(stored.MasksCopy).values(), *(step for step in self.turns.values() if step.record in known),
        ]  # fmt: skip

    def _notes(self) -> Iterator[stored.NoteCopy]:
        return (note for note in self.of(stored.NoteCopy).values() if note.rollout in self.rollouts)

    def _placed(self, rollout: stored.RolloutCopy) -> stored.RolloutCopy:
        last = self.steps.last(rollout.rollout)
        return rollout if last is None else rollout._replace(calls=last.position.turn, node=last.position.node)

    def _records(self) -> list[stored.RecordCopy]:
        """Return the records. A call that was executed again has two, of which the later one answers.

        An owner executes a call again if its record is damaged on its disk. Records of a tree without a line belong to
        an import that did not come to its end.
        """
        gone, trees = self.forgotten[1], self.of(stored.TreeCopy)
        written = [each for each in self.records[self.dead :] if isinstance(each, stored.RecordCopy)]
        there = [each for each in written if each.record not in gone and each.tree in trees]
        latest = {(record.tree, record.source, record.key): record.record for record in there}
        digests = {record.target: record[12:14] for record in reversed(written) if record.is_first}
        reached, records = {tree.root for tree in trees.values()}, list[stored.RecordCopy]()
        for record in there:
            if latest[record.tree, record.source, record.key] != record.record:
                key = withdrawn_key(CallKey(record.key), record.record)
                record = record._replace(key=key, private=True)  # noqa: PLW2901 - the same record under another key
            is_first = record.target not in reached
            exact, content = digests.get(record.target, (None, None)) if is_first else (None, None)
            records.append(record._replace(is_first=is_first, exact=exact, content=content))
            reached.add(record.target)
        return records


class RowLayout(NamedTuple):
    """What a row of a log holds."""

    row: int
    size_bytes: int | None  # The bytes of its lines; None if it says who owns the task.
    sha256: bytes  # The SHA-256 of its lines.
    first: int  # How many records and steps the log has before it.
    end: int  # How many the log has up to its end.
    others: int  # How many of its lines are neither.


class Replacement(NamedTuple):
    """Rows that are replaced by one."""

    gone: list[int]  # Their numbers. The new row has the last one.
    digest: bytes
    body: bytes  # The lines of the new row.


class Compaction:
    """How a log is compacted: rows are replaced by fewer ones, step by step. After each step the log says the same.

    1. The last row gets all other lines than records and steps, as they are after the whole log. They replace the
       earlier ones. It also says what has ended, because earlier rows still say that it began.
    2. Each other segment of rows becomes one row with its records and steps, of about `CHUNK_BYTES`. What an earlier
       compaction has written stays as it is. So no step writes much, and all of them write each record a constant
       number of times.
    3. The last row is written again, without what has ended.
    """

    def __init__(self, reading: TaskLogReading) -> None:
        """Plan the steps for a log that was read to its end."""
        self._reading, self._segments = reading, list[list[RowLayout]]()
        # Numbers of the rows that are replaced.
        self.gone = replaceable((each.row, each.size_bytes is None) for each in reading.layout)
        numbers, size_bytes = set(self.gone), 0
        for each in reading.layout:
            if each.row in numbers:
                size_bytes += each.size_bytes or 0
                if not self._segments or size_bytes > CHUNK_BYTES:
                    self._segments.append([])
                    size_bytes = each.size_bytes or 0
                self._segments[-1].append(each)
        self.left = len(self._segments)  # How many rows are left of them.
        self.lines = len(reading.records) - reading.dead + sum(1 for _ in reading.rest())  # How many lines these have.

    def steps(self) -> Iterator[Replacement]:
        """Yield the steps, in their order. 15 us a record."""
        *before, last = self._segments
        ends = self._reading.ends if before else []
        if self._reading.dead < last[0].first:
            # The row that says so is replaced after those before it, as the segments are in order.
            ends = [line for line in ends if not isinstance(line, Deleted)]
        first = self._step(last, ends, self._reading.rest())
        yield first
        for segment in before:
            if len(segment) > 1 or segment[0].others or segment[0].first < self._reading.dead:
                yield self._step(segment)
        if ends:
            again = self._step(last, (), self._reading.rest())
            yield Replacement(first.gone[-1:], rows_digest([sha256(first.body).digest()]), again.body)

    def _step(self, segment: list[RowLayout], ends: Iterable[Line] = (), rest: Iterable[Line] = ()) -> Replacement:
        records = self._reading.records[max(segment[0].first, self._reading.dead) : segment[-1].end]
        # What has ended was before these records, if the task was deleted.
        body = encode(chain(ends, records, rest))
        return Replacement([each.row for each in segment], rows_digest(each.sha256 for each in segment), body)


def compaction_of(reading: TaskLogReading) -> Compaction | None:
    """Return how a log is compacted; None if that would not halve its rows."""
    how = Compaction(reading)
    return None if 2 * how.left > len(how.gone) else how
