"""The segments of the journal on disk: how a step is written, and what a segment still shows after any end (pure).

A segment is a file of slots of 32 bytes, filled from the front; unused slots are zero. A slot holds a step, the number
of the rollout whose step was written just before, and a checksum. What reading can meet:

1. Unused slots up to the end: nothing was lost.
2. A last slot without a checksum. The process was killed while it wrote the slot, whose response was never sent. The
   slot is dropped. A slot lies within one sector of a disk, so a loss of power leaves no other half-written slot.
3. Any other slot that does not match its checksum, or an unused slot before a used one: damage. The slot behind it
   names the rollout that lost a step. Without a slot behind it the rollout is not known.
4. A file of another size, whose last slot is used: damage. What stood behind it is not known.
"""

import struct
import zlib
from dataclasses import dataclass, field
from typing import NamedTuple

_STEP = struct.Struct("<QQIQ")
_CHECKSUM = struct.Struct("<I")
STEP_BYTES = _STEP.size + _CHECKSUM.size
"""Size of a slot: rollout, record, turn, outcome with the previous rollout, checksum. It divides a disk's sector."""
SEGMENT_BYTES = 1 << 20
"""Size of a segment in bytes: 32,768 steps. Smaller ones would be rotated within a fold interval under load."""
_UNUSED = bytes(STEP_BYTES)


class JournalEntry(NamedTuple):
    """One step of a rollout."""

    rollout: int
    turn: int  # Which of the rollout's calls this was, from 0.
    record: int  # Number of the record that answered the call.
    outcome: int  # How the call was answered; an `Outcome`.


@dataclass(slots=True)
class SegmentReading:
    """What a segment shows: its whole steps, in order."""

    steps: list[JournalEntry] = field(default_factory=list)
    damage: str = ""  # What is wrong with the file; empty if nothing is.
    lost: set[int] = field(default_factory=set)  # Numbers of rollouts that lost a step.
    unknown: bool = False  # Whether steps of other rollouts may be lost too.


def pack_step(step: JournalEntry, previous: int) -> bytes:
    """Return a slot without its checksum; previous is the rollout of the step before, 0 for none."""
    # A rollout's number is far below 2**56, so it shares eight bytes with the outcome.
    return _STEP.pack(step.rollout, step.record, step.turn, previous << 8 | step.outcome)


def checksum(body: bytes, segment: int, start: int) -> bytes:
    """Return the checksum of a slot: it also covers where the slot is, so that a stale block does not match."""
    # Never zero, because zero says that the slot was not completed.
    return _CHECKSUM.pack(zlib.crc32(body, (segment * SEGMENT_BYTES + start) & 0xFFFFFFFF) or 1)


def read_segment(data: bytes, segment: int, *, size_bytes: int = SEGMENT_BYTES) -> SegmentReading:
    """Return what the content of a segment shows. `size_bytes` is the file's size when it was made."""
    reading = SegmentReading()
    used_bytes = len(data.rstrip(b"\0"))
    slots = [data[start : start + STEP_BYTES] for start in range(0, used_bytes, STEP_BYTES)]
    bad = 0
    for index, slot in enumerate(slots):
        body = slot[: _STEP.size]
        if slot[_STEP.size :] == checksum(body, segment, index * STEP_BYTES):
            rollout, record, turn, rest = _STEP.unpack(body)
            if bad:
                # Of several bad slots in a row only the last one is named.
                reading.lost.add(rest >> 8)
                reading.unknown |= bad > 1
                bad = 0
            reading.steps.append(JournalEntry(rollout, turn, record, rest & 0xFF))
            continue
        bad += 1
        torn = index == len(slots) - 1 and bad == 1 and not any(slot[_STEP.size :]) and len(data) == size_bytes
        if torn:
            return reading
        reading.damage = reading.damage or f"step {index} of journal segment {segment} is damaged"
    if len(data) != size_bytes and data[-STEP_BYTES:] != _UNUSED:
        reading.damage = reading.damage or f"journal segment {segment} is cut: it has {len(data)} bytes"
        reading.unknown = True
    reading.unknown |= bad > 0
    return reading
