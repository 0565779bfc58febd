"""A segment shows every step that was written, and damage is never taken for an end."""

from hypothesis import given
from hypothesis import strategies as st

from proxy.storage.journal_segments import SEGMENT_BYTES, STEP_BYTES, JournalEntry, checksum, pack_step, read_segment

steps = st.lists(
    st.builds(JournalEntry, st.integers(1, 9), st.integers(0, 2**32 - 1), st.integers(0, 2**60), st.integers(0, 3)),
    max_size=20,
)


def segment(taken: list[JournalEntry], number: int = 3) -> bytearray:
    """Return a segment as the journal writes it."""
    data, previous = bytearray(SEGMENT_BYTES), 0
    for index, step in enumerate(taken):
        body, start = pack_step(step, previous), index * STEP_BYTES
        data[start : start + STEP_BYTES] = body + checksum(body, number, start)
        previous = step.rollout
    return data


@given(steps)
def test_every_step_is_read_back(taken: list[JournalEntry]) -> None:
    reading = read_segment(bytes(segment(taken)), 3)
    assert (reading.steps, reading.damage, reading.lost, reading.unknown) == (taken, "", set(), False)


@given(steps.filter(bool), st.data())
def test_a_flipped_bit_names_its_rollout(taken: list[JournalEntry], data: st.DataObject) -> None:
    """Steps behind the damage stay valid, and the next one names the rollout that lost its step."""
    content = segment(taken)
    at = data.draw(st.integers(0, len(taken) * STEP_BYTES - 1))
    content[at] ^= 1 << data.draw(st.integers(0, 7))
    reading, hurt = read_segment(bytes(content), 3), at // STEP_BYTES
    assert reading.steps == taken[:hurt] + taken[hurt + 1 :]
    assert reading.damage
    if hurt < len(taken) - 1:
        assert (reading.lost, reading.unknown) == ({taken[hurt].rollout}, False)
    else:
        assert (reading.lost, reading.unknown) == (set(), True)


@given(steps.filter(bool), st.integers(1, STEP_BYTES - 4))
def test_a_torn_last_step_is_no_damage(taken: list[JournalEntry], written: int) -> None:
    """The process is killed while it writes a step: the checksum, which comes last, is missing."""
    content = segment(taken)
    start = (len(taken) - 1) * STEP_BYTES
    content[start + written : start + STEP_BYTES] = bytes(STEP_BYTES - written)
    reading = read_segment(bytes(content), 3)
    assert (reading.steps, reading.damage) == (taken[:-1], "")


@given(steps.filter(bool), st.integers(0, SEGMENT_BYTES - 1))
def test_a_cut_among_steps_is_damage(taken: list[JournalEntry], size: int) -> None:
    size = min(size, 2 * len(taken) * STEP_BYTES)
    reading = read_segment(bytes(segment(taken)[:size]), 3)
    whole = size >= (len(taken) + 1) * STEP_BYTES
    assert bool(reading.damage) == reading.unknown == (not whole)


def test_a_stale_block_is_damage() -> None:
    """A block of another segment, or of another place, does not pass for this one's."""
    taken = [JournalEntry(1, turn, 7, 0) for turn in range(3)]
    assert read_segment(bytes(segment(taken, 3)), 4).damage
    content = segment(taken)
    content[STEP_BYTES : 2 * STEP_BYTES] = content[:STEP_BYTES]
    assert read_segment(bytes(content), 3).damage


def test_a_hole_between_steps_is_damage() -> None:
    content = segment([JournalEntry(5, turn, 7, 0) for turn in range(4)])
    content[STEP_BYTES : 2 * STEP_BYTES] = bytes(STEP_BYTES)
    reading = read_segment(bytes(content), 3)
    assert (len(reading.steps), reading.lost) == (3, {5})
