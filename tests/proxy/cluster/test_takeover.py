"""The next owner of a task reads its log."""

from collections.abc import Iterable
from hashlib import sha256

import pytest

from proxy.cluster import takeover
from proxy.cluster.lines import Deleted, ForgottenRows, Kept, Line, Unkept, encode
from proxy.cluster.postgres.database import LogRow, rows_digest
from proxy.cluster.protocol import Ended, Position, StepId, Stepped
from proxy.cluster.takeover import Compaction, TaskLogReading, compaction_of
from proxy.storage.copies import (
    EndedCopy,
    FindingCopy,
    MasksCopy,
    NodeCopy,
    NoteCopy,
    RecordCopy,
    RolloutCopy,
    StepCopy,
    TaskCopy,
    TreeCopy,
)

TASK = TaskCopy("t", None, 1.0)
TREE = TreeCopy(1, "t", "key", "{}", 10, None, None, 1.0)


def record(number: int, source: int, key: bytes, target: int) -> RecordCopy:
    return RecordCopy(
        number, 1, source, key, target, 1, 0.1, 1.0, False, True, None, True, b"e", b"c", b"{}", b"", b"200 \n"
    )  # fmt: skip


def stepped(rollout: int, turn: int, node: int) -> Stepped:
    """Return a step of a call that the ingress does not make again once it makes the next one."""
    return Stepped(rollout, Position(turn, node), 1, StepId(1, 1, turn, 0), turn)


def rollout(number: int) -> RolloutCopy:
    return RolloutCopy(number, "t", f"r{number}", 1, 10, 10, 0, None, 1.0, "{}")


def read_log(rows: Iterable[LogRow]) -> TaskLogReading:
    reading = TaskLogReading()
    reading.take_rows(rows)
    return reading


def test_a_rollout_is_where_its_last_step_led() -> None:
    """One that has ended is there as such, with the labels that it got later, whatever position these came with."""
    rows = [
        LogRow(1, 1, None),
        LogRow(2, 1, encode([TASK, TREE, rollout(5), rollout(6), rollout(7), stepped(7, 1, 11)])),
        LogRow(3, 1, encode([stepped(6, 2, 11), stepped(6, 3, 12), record(1, 10, b"k", 11)])),
        LogRow(4, 1, encode([TREE._replace(exact=b"e", content=b"c"), Ended(7)])),
        LogRow(5, 1, encode([rollout(7)._replace(labels='{"reward": "1"}'), Ended(7)])),
    ]
    reading = read_log(rows)
    assert reading.last == 5
    copies = reading.copies()
    assert TREE._replace(exact=b"e", content=b"c") in copies
    placed = {copy.rollout: (copy.calls, copy.node) for copy in copies if isinstance(copy, RolloutCopy)}
    assert placed == {5: (0, 10), 6: (3, 12)}
    ended = [copy.rollout for copy in copies if isinstance(copy, EndedCopy)]
    assert ended == [rollout(7)._replace(calls=1, node=11, labels='{"reward": "1"}')]
    assert read_log([LogRow(1, 1, encode([*reading.rest()]))]).copies() == [
        copy for copy in copies if not isinstance(copy, RecordCopy | StepCopy)
    ]
    assert [copy for copy in copies if isinstance(copy, StepCopy)] == [
        StepCopy(7, 0, 1, 0), StepCopy(6, 1, 1, 0), StepCopy(6, 2, 1, 0),
    ]  # fmt: skip


def test_latest_notes_of_running_rollouts() -> None:
    """What protocols remember comes with its rollout, as it was written last; it ends with it."""
    first, latest, other = (
        NoteCopy(5, name, value) for name, value in (("docker", "1"), ("docker", "2"), ("e2b", "3"))
    )
    rows = [LogRow(1, 1, encode([rollout(5), rollout(6), first, NoteCopy(6, "e2b", "4"), other, latest, Ended(6)]))]
    notes = [copy for copy in read_log(rows).copies() if isinstance(copy, NoteCopy)]
    assert sorted(notes) == [latest, other]


def test_later_record_of_a_call_answers() -> None:
    """A call that ran again has two records, and only one of them under its key."""
    rows = [LogRow(1, 1, encode([TREE, record(1, 10, b"k" * 32, 11), record(2, 10, b"k" * 32, 12)]))]
    _, first, second = read_log(rows).copies()
    assert isinstance(first, RecordCopy)
    assert isinstance(second, RecordCopy)
    assert (second.record, second.key, second.private) == (2, b"k" * 32, False)
    assert first.key != second.key
    assert first.private


def test_latest_finding_of_a_record_comes_behind_it() -> None:
    """The next owner withholds what this one has withheld."""
    known, first = record(1, 10, b"k" * 32, 11), FindingCopy(1, 1, "files", False, False, 2.0)
    latest = first._replace(quarantined=True)
    rows = [LogRow(1, 1, encode([TREE, known, first])), LogRow(2, 1, encode([latest]))]
    assert read_log(rows).copies() == [TREE, known, latest]


def test_forgotten_records_answer_no_later_owner() -> None:
    """Nor do their nodes come back, whatever else the log says of them, and after a compaction too."""
    first, second, third = record(1, 10, b"k" * 32, 11), record(2, 11, b"l" * 32, 12), record(3, 10, b"m" * 32, 13)
    pinned, aside = NodeCopy(12, "", True), NodeCopy(13, "it was forgotten", False)
    said: list[Line] = [TREE, first, second, third, pinned, Kept(12, "state", 1), aside, MasksCopy("t", "{}")]
    rows = [LogRow(1, 1, encode(said)), LogRow(2, 1, encode([ForgottenRows([11, 12], [1, 2])]))]
    reading = read_log(rows)
    assert reading.copies() == [TREE, third, aside, MasksCopy("t", "{}")]
    assert reading.of(Kept) == {}
    log, how = {row.row: row for row in rows}, Compaction(reading)
    assert compacted(log, reading, how).copies() == reading.copies()


def test_records_of_an_import_count_with_its_tree() -> None:
    """An import whose member died leaves no part of a tree. The tree that it replaces goes when it is there."""
    one, two = record(5, 20, b"k" * 32, 21), record(6, 21, b"l" * 32, 20)
    began: list[Line] = [TASK, TREE, one._replace(tree=2), two._replace(tree=2)]
    assert read_log([LogRow(1, 1, encode(began))]).copies() == [TASK, TREE]
    tree = TREE._replace(tree=2, root=20)
    ended: list[Line] = [ForgottenRows([TREE.root], []), tree]
    copies = read_log([LogRow(1, 1, encode(began)), LogRow(2, 1, encode(ended))]).copies()
    # The second one leads back to the root, which is there without it.
    led_back = two._replace(tree=2, is_first=False, exact=None, content=None)
    assert copies == [TASK, tree, one._replace(tree=2), led_back]


def test_a_compacted_log_says_the_same() -> None:
    """Rows that say who owns the task stay, and the greatest number does."""
    lines: list[list[Line]] = [
        [TASK, TREE, rollout(5), rollout(6), stepped(5, 1, 10), NoteCopy(6, "e2b", "1")],
        [record(1, 10, b"k" * 32, 11), stepped(5, 2, 11), Kept(11, "first", 1)],
        [record(2, 10, b"k" * 32, 12), FindingCopy(1, 1, "files", True, False, 2.0), Ended(6)],
        [Kept(12, "second", 1), Unkept(11), NoteCopy(5, "e2b", "2")],
    ]
    bodies = [None, *(encode(line) for line in lines[:2]), None, *(encode(line) for line in lines[2:])]
    log = {row: LogRow(row, 1, body) for row, body in enumerate(bodies, 1)}
    one = read_log(log.values())
    how = compaction_of(one)
    assert how is not None
    assert (how.gone, how.left) == ([2, 3, 5, 6], 1)
    other = compacted(log, one, how)
    assert list(log) == [1, 4, 6]
    assert other.copies() == one.copies()
    # Nothing would be won now.
    assert compaction_of(other) is None


def compacted(log: dict[int, LogRow], before: TaskLogReading, how: Compaction) -> TaskLogReading:
    """Compact a log. After each step it says the same."""
    for gone, digest, body in how.steps():
        assert digest == rows_digest(sha256(log[row].body or b"").digest() for row in gone)
        for row in gone[:-1]:
            del log[row]
        log[gone[-1]] = LogRow(gone[-1], 1, body)
        after = read_log(log.values())
        assert after.last == before.last
        assert sorted(after.copies(), key=repr) == sorted(before.copies(), key=repr)
        assert (list(after.steps.lines()), after.of(Kept)) == (list(before.steps.lines()), before.of(Kept))
    assert len(log) == how.left + sum(row.body is None for row in log.values())
    return after


def test_large_log_is_compacted_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step writes about a chunk, and what was written by an earlier compaction is not written again."""
    monkeypatch.setattr(takeover, "CHUNK_BYTES", 2000)
    log = {1: LogRow(1, 1, None), 2: LogRow(2, 1, encode([TASK, TREE, rollout(5)]))}
    beginnings: list[Line] = [rollout(6), Kept(7, "n", 1)]
    ends: list[Line] = [Ended(6), Unkept(7)]
    for number in range(3, 40):
        lines: list[Line] = [record(number, 10, b"k%d" % number, 11), stepped(5, number, 11)]
        # What ends later than it begins must not be there in between.
        lines += beginnings if number == 5 else ends if number == 35 else []
        log[number] = LogRow(number, 1, encode(lines))
    first = read_log(log.values())
    how = compaction_of(first)
    assert how is not None
    assert len(list(how.steps())) == how.left + 1 > 3
    again = compacted(log, first, how)
    for number in range(40, 60):
        log[number] = LogRow(number, 1, encode([record(number, 10, b"k%d" % number, 11), Kept(number, "n", 1)]))
    again = read_log(log.values())
    later = compaction_of(again)
    assert later is not None
    assert len(list(later.steps())) < later.left
    compacted(log, again, later)


@pytest.mark.parametrize("behind", [0, 2, 8])
def test_a_deleted_task_is_gone_in_each_step_of_a_compaction(monkeypatch: pytest.MonkeyPatch, behind: int) -> None:
    """What it was made of does not come back, not even records that have a row to themselves."""
    monkeypatch.setattr(takeover, "CHUNK_BYTES", 900)
    new = TREE._replace(root=20)
    log = {1: LogRow(1, 1, None), 2: LogRow(2, 1, encode([TASK, TREE, rollout(5), Kept(11, "n", 1)]))}
    for number in range(3, 12):
        log[number] = LogRow(number, 1, encode([record(number, 10, b"k%d" % number, 11)]))
    log[12] = LogRow(12, 1, encode([record(12, 10, b"old", 11), Deleted(), record(13, 20, b"new", 21), TASK, new]))
    for number in range(14, 14 + behind):
        log[number] = LogRow(number, 1, encode([record(number, 20, b"k%d" % number, 21)]))
    before = read_log(log.values())
    assert [copy.record for copy in before.copies() if isinstance(copy, RecordCopy)] == list(range(13, 14 + behind))
    assert (before.rollouts, before.of(Kept), before.of(TreeCopy)) == ({}, {}, {1: new})
    how = compaction_of(before)
    assert how is not None
    again = compacted(log, before, how)
    assert (again.dead, again.ends) == (0, [])
    log[30] = LogRow(30, 1, encode([Deleted()]))
    assert read_log(log.values()).copies() == []


def test_empty_log() -> None:
    """A task that nobody owned has nothing."""
    reading = read_log([])
    assert (reading.last, reading.copies()) == (0, [])
