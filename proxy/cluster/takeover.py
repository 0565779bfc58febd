"""What a log says of a task, read by its next owner (pure)."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from proxy.cluster.database import LogRow
from proxy.cluster.lines import Kept, Line, Unkept, decode
from proxy.cluster.protocol import Ended, Entered, Position
from proxy.storage.copies import Copy, FindingCopy, NoteCopy, RecordCopy, RolloutCopy, TaskCopy, TreeCopy
from proxy.tree.keys import CallKey, private_key


@dataclass(slots=True)
class TaskLogReading:
    """A task as its log has it.

    Attributes:
        last: Number of the last row; 0 without rows.
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
        for line in decode(row.body or b""):
            reading.take(line)
    return reading
