"""The journal: what was written is read back after any end, is folded once, and what is missing is never overlooked."""

import asyncio
import tempfile
from collections.abc import Collection
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.storage import journal as module
from proxy.storage.journal import Journal
from proxy.storage.journal_segments import STEP_BYTES, JournalEntry

steps = st.lists(
    st.builds(JournalEntry, st.integers(1, 9), st.integers(0, 2**32 - 1), st.integers(0, 2**60), st.integers(0, 3))
)


class FakeStore:
    """Remembers what a journal asks of the store."""

    def __init__(self) -> None:
        self.marks: dict[str, str] = {}
        self.folded: list[JournalEntry] = []
        self.lost: list[tuple[Collection[int] | None, str]] = []

    def recover(self, taken: list[JournalEntry]) -> dict[int, str]:
        self.folded += taken
        return {}

    def lose(self, rollouts: Collection[int] | None, why: str) -> int:
        self.lost.append((rollouts, why))
        return 1

    def mark(self, name: str) -> str | None:
        return self.marks.get(name)

    def put_mark(self, name: str, value: str, *, durable: bool) -> None:  # noqa: ARG002
        self.marks[name] = value


def written(directory: Path, taken: list[JournalEntry], store: FakeStore, *, sync: bool = False) -> Journal:
    journal = Journal(directory, store.folded.extend, store, store, sync=sync)
    journal.open()
    for step in taken:
        journal.append(step)
    return journal


def reopened(directory: Path, store: FakeStore) -> Journal:
    journal = Journal(directory, store.folded.extend, store, store)
    journal.open()
    return journal


@given(steps)
def test_a_killed_process_loses_no_step(taken: list[JournalEntry]) -> None:
    """What was appended before a kill is folded at the next start."""
    store = FakeStore()
    with tempfile.TemporaryDirectory() as directory:
        # Nobody closes it: that is what a kill looks like.
        written(Path(directory), taken, store)
        assert Journal(Path(directory), store.folded.extend, store, store).open().steps == len(taken)
    assert store.folded == taken
    assert store.lost == []


TAKEN = [JournalEntry(rollout, turn, 7, 0) for turn in range(4) for rollout in (1, 2)]


@pytest.mark.parametrize("kept", [0, 1, 60, 5 * STEP_BYTES, 8 * STEP_BYTES - 60])
def test_a_cut_segment_loses_all_rollouts(tmp_path: Path, kept: int) -> None:
    """A segment is cut among its steps. Nobody can say whose steps are missing, so all running rollouts are lost."""
    written(tmp_path, TAKEN, store := FakeStore())
    (path,) = tmp_path.glob("*.steps")
    path.write_bytes(path.read_bytes()[:kept])
    reopened(tmp_path, store)
    assert [rollouts for rollouts, _ in store.lost] == [None]
    assert path.with_suffix(".damaged").exists()


def test_a_flipped_byte_loses_one_rollout(tmp_path: Path) -> None:
    written(tmp_path, TAKEN, store := FakeStore())
    (path,) = tmp_path.glob("*.steps")
    content = bytearray(path.read_bytes())
    content[STEP_BYTES + 3] ^= 16
    path.write_bytes(content)
    reopened(tmp_path, store)
    assert [rollouts for rollouts, _ in store.lost] == [{2}]
    assert path.with_suffix(".damaged").exists()


def test_a_missing_segment_loses_all_rollouts(tmp_path: Path) -> None:
    written(tmp_path, TAKEN, store := FakeStore())
    (path,) = tmp_path.glob("*.steps")
    path.unlink()
    reopened(tmp_path, store)
    assert [rollouts for rollouts, _ in store.lost] == [None]
    reopened(tmp_path, store)
    assert len(store.lost) == 1, "the loss is reported once"


def test_an_orderly_end_expects_no_segment(tmp_path: Path) -> None:
    written(tmp_path, TAKEN, store := FakeStore()).close()
    assert list(tmp_path.glob("*.steps")) == []
    reopened(tmp_path, store)
    assert store.lost == []


@pytest.mark.parametrize("sync", [False, True])
def test_after_a_machine_crash_positions_are_lost(tmp_path: Path, sync: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without waiting for the disk, the last steps of any rollout may be missing after the machine stopped."""
    written(tmp_path, TAKEN, store := FakeStore(), sync=sync)
    monkeypatch.setattr(module, "boot_id", lambda: "another boot")
    reopened(tmp_path, store)
    assert [rollouts for rollouts, _ in store.lost] == ([] if sync else [None])


def test_a_reboot_after_an_orderly_end_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, TAKEN, store := FakeStore()).close()
    monkeypatch.setattr(module, "boot_id", lambda: "another boot")
    reopened(tmp_path, store)
    assert store.lost == []


def test_a_folded_segment_is_deleted(tmp_path: Path) -> None:
    """Each step is folded once, and then its segment is deleted."""
    taken = [JournalEntry(1, turn, 7, 0) for turn in range(2500)]
    journal = written(tmp_path, taken[:1200], store := FakeStore())
    asyncio.run(journal.trickle())
    for step in taken[1200:]:
        journal.append(step)
    journal.close()
    assert store.folded == taken
    assert list(tmp_path.iterdir()) == []


def test_a_failed_fold_is_tried_again(tmp_path: Path) -> None:
    """A fold that fails keeps its steps for the next fold."""
    folded: list[JournalEntry] = []
    broken = [True]

    def fold(some: list[JournalEntry]) -> None:
        if broken:
            raise OSError(28, "full")
        folded.extend(some)

    journal = Journal(tmp_path, fold, store := FakeStore(), store)
    journal.open()
    journal.append(JournalEntry(1, 0, 7, 0))
    with pytest.raises(OSError, match="full"):
        journal.fold()
    journal.append(JournalEntry(1, 1, 8, 0))
    broken.clear()
    journal.close()
    assert folded == [JournalEntry(1, 0, 7, 0), JournalEntry(1, 1, 8, 0)]


def test_a_full_segment_is_followed_by_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SEGMENT_BYTES", 10 * STEP_BYTES)
    store = FakeStore()
    written(tmp_path, [JournalEntry(1, turn, 7, 0) for turn in range(25)], store)
    reopened(tmp_path, store)
    assert [step.turn for step in store.folded] == list(range(25))
    assert store.lost == []
