"""What a log says of a task, read by its next owner (pure)."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from proxy.cluster.lines import Kept, Line, Unkept, decode, encode
from proxy.cluster.postgres.database import LogRow
from proxy.cluster.protocol import Ended, Entered, Position, replaceable
from proxy.storage.copies import Copy, FindingCopy, NoteCopy, RecordCopy, RolloutCopy, TaskCopy, TreeCopy
from proxy.tree.keys import CallKey, private_key

CHUNK_BYTES = 4 << 20
"""Bytes of a row that a compaction writes, unless a line is larger. PostgreSQL holds a row in memory several times."""


@dataclass(slots=True)
class TaskLogReading:
    """A task as its log has it.

    Attributes:
        last: Number of the last row; 0 without rows.
        rows: How many rows do not say who owns the task.
        task: The task; None for a task of which no line was written.
        trees: Its trees by number.
        records: Its records, in the order in which they were written.
        findings: What was noticed of its records, by record.
        rollouts: Its running rollouts by number.
        notes: What protocols remember of them, by rollout and protocol.
        entered: Lines that name the ingress and the position of each running rollout, in order.
        kept: The states that the store has, by node.
    """

    last: int = 0
    rows: int = 0
    task: TaskCopy | None = None
    trees: dict[int, TreeCopy] = field(default_factory=dict)
    records: list[RecordCopy] = field(default_factory=list)
    findings: dict[int, FindingCopy] = field(default_factory=dict)
    rollouts: dict[int, RolloutCopy] = field(default_factory=dict)
    notes: dict[tuple[int, str], NoteCopy] = field(default_factory=dict)
    entered: dict[int, Entered] = field(default_factory=dict)
    kept: dict[int, Kept] = field(default_factory=dict)

    def take(self, line: Line) -> None:
        """Take the next line."""
        match line:
            case TaskCopy():
                self.task = line
            case TreeCopy():
                self.trees[line.tree] = line
            case RecordCopy():
                self.records.append(line)
            case FindingCopy():
                self.findings[line.record] = line
            case RolloutCopy():
                self.rollouts[line.rollout] = line
            case NoteCopy():
                self.notes[line.rollout, line.protocol] = line
            case Entered():
                self.entered[line.rollout] = line
            case Ended():
                self.rollouts.pop(line.rollout, None)
                self.entered.pop(line.rollout, None)
            case Kept() | Unkept():
                self._take_state(line)

    def _take_state(self, line: Kept | Unkept) -> None:
        if isinstance(line, Kept):
            self.kept[line.node] = line
        else:
            self.kept.pop(line.node, None)

    def lines(self) -> Iterator[Line]:
        """Yield lines that a reader takes for the same as all that were taken."""
        yield from () if self.task is None else (self.task,)
        yield from self.trees.values()
        yield from self.records
        yield from self.findings.values()
        yield from self.rollouts.values()
        yield from (note for note in self.notes.values() if note.rollout in self.rollouts)
        yield from self.entered.values()
        yield from self.kept.values()

    def copies(self, reported: Mapping[int, Position]) -> list[Copy]:
        """Return the rows of the store.

        Args:
            reported: Positions of rollouts, by number, that are later than those of the log.
        """
        rollouts = []
        for number, rollout in self.rollouts.items():
            known = self.entered.get(number)
            position = Position(rollout.calls, rollout.node) if known is None else known.position
            position = max(position, reported.get(number, position))
            rollouts.append(rollout._replace(node=position.node, calls=position.turn))
        task = [] if self.task is None else [self.task]
        notes = [note for note in self.notes.values() if note.rollout in self.rollouts]
        return [*task, *self.trees.values(), *self._records(), *self.findings.values(), *rollouts, *notes]

    def _records(self) -> list[RecordCopy]:
        """Return the records. A call that was executed again has two, of which the later one answers.

        An owner executes a call again if its record is damaged on its disk.
        """
        latest = {(record.tree, record.source, record.key): record.record for record in self.records}
        return [
            record
            if latest[record.tree, record.source, record.key] == record.record
            else record._replace(key=private_key(CallKey(record.key), record.record, 0), private=True)
            for record in self.records
        ]


def read_log(rows: Iterable[LogRow]) -> TaskLogReading:
    """Return what the rows of a task's log say.

    Raises:
        LogError: A row is not what a member of this version writes.
    """
    reading = TaskLogReading()
    for row in rows:
        reading.last = row.row
        reading.rows += row.body is not None
        for line in decode(row.body or b""):
            reading.take(line)
    return reading


class Compaction(NamedTuple):
    """How a log is compacted.

    Attributes:
        gone: Numbers of the rows that are replaced.
        rows: Numbers and bodies of the rows that replace them. Their numbers are the last ones of `gone`.
        lines: How many lines they have.
    """

    gone: list[int]
    rows: list[tuple[int, bytes]]
    lines: int


def compact(log: Sequence[LogRow]) -> Compaction | None:
    """Return how a log is compacted; None if that would not halve its rows. 15 us a record.

    Raises:
        LogError: A row is not what a member of this version writes.
    """
    gone = replaceable((row.row, row.body is None) for row in log)
    chunks, lines = [bytearray()], 0
    for line in read_log(log).lines():
        encoded = encode([line])
        if chunks[-1] and len(chunks[-1]) + len(encoded) > CHUNK_BYTES:
            chunks.append(bytearray())
        chunks[-1] += encoded
        lines += 1
    if 2 * len(chunks) > len(gone):
        return None
    return Compaction(gone, list(zip(gone[-len(chunks) :], map(bytes, chunks), strict=True)), lines)
