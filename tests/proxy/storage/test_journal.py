"""The journal: what was written is read back after any end, and is folded once."""

import asyncio
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.storage import journal as module
from proxy.storage.journal import STEP_BYTES, Journal, JournalEntry, read_steps

steps = st.lists(
    st.builds(JournalEntry, st.integers(0, 9), st.integers(0, 2**32 - 1), st.integers(0, 2**60), st.integers(0, 3))
)


def written(directory: Path, taken: list[JournalEntry]) -> Journal:
    journal = Journal(directory, lambda _: None)
    journal.open()
    for step in taken:
        journal.append(step)
    return journal


@given(steps)
def test_a_killed_process_loses_no_step(taken: list[JournalEntry]) -> None:
    """What was appended before a kill is folded at the next start."""
    folded: list[JournalEntry] = []
    with tempfile.TemporaryDirectory() as directory:
        # Nobody closes it: that is what a kill looks like.
        written(Path(directory), taken)
        assert Journal(Path(directory), folded.extend).open() == len(taken)
    assert folded == taken


@given(steps, st.data())
def test_reading_stops_at_a_torn_entry(taken: list[JournalEntry], data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as directory:
        written(Path(directory), taken)
        content = bytearray(next(Path(directory).glob("*.steps")).read_bytes())
    at = data.draw(st.integers(0, max(0, len(taken) * STEP_BYTES - 1)))
    content[at] ^= 1 << data.draw(st.integers(0, 7))
    assert list(read_steps(bytes(content)))[: at // STEP_BYTES] == taken[: at // STEP_BYTES]
    assert len(list(read_steps(bytes(content)))) <= at // STEP_BYTES if taken else True


def test_a_folded_segment_is_deleted(tmp_path: Path) -> None:
    """Each step is folded once, and then its segment is deleted."""
    folded: list[JournalEntry] = []
    journal = Journal(tmp_path, folded.extend)
    journal.open()
    taken = [JournalEntry(1, turn, 7, 0) for turn in range(2500)]
    for step in taken[:1200]:
        journal.append(step)
    asyncio.run(journal.trickle())
    for step in taken[1200:]:
        journal.append(step)
    journal.close()
    assert folded == taken
    assert list(tmp_path.iterdir()) == []


def test_a_failed_fold_is_tried_again(tmp_path: Path) -> None:
    """A fold that fails keeps its steps for the next fold."""
    folded: list[JournalEntry] = []
    broken = [True]

    def fold(some: list[JournalEntry]) -> None:
        if broken:
            raise OSError(28, "full")
        folded.extend(some)

    journal = Journal(tmp_path, fold)
    journal.open()
    journal.append(JournalEntry(1, 0, 7, 0))
    with pytest.raises(OSError, match="full"):
        journal.fold()
    journal.append(JournalEntry(1, 1, 8, 0))
    broken.clear()
    journal.close()
    assert folded == [JournalEntry(1, 0, 7, 0), JournalEntry(1, 1, 8, 0)]


def test_a_full_segment_is_followed_by_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SEGMENT_BYTES", 10 * STEP_BYTES)
    written(tmp_path, [JournalEntry(1, turn, 7, 0) for turn in range(25)])
    folded: list[JournalEntry] = []
    assert Journal(tmp_path, folded.extend).open() == 25
    assert [step.turn for step in folded] == list(range(25))
