"""Pages that a checkpoint shares with the one that its processes come from: only the others are kept anew.

CRIU can take pages from the images of an earlier checkpoint, its parent in the directory `parent` (criu.org,
"Incremental dumps"), where an entry of a pagemap has the flag PE_PARENT. Such entries are made after the dump, by
comparing pages, so nothing is tracked while processes run. The parent's files, and those of its own parent, are linked
into `parent`: each checkpoint is whole by itself, and the disk has room for a page once the last checkpoint with it is
gone.

Format (CRIU's images/pagemap.proto): a magic number of eight bytes, and then messages of protobuf, each after its
length in 32 bits. The first has the number of the file of pages; any other is a range: its address (1), the number of
its pages (5, in older versions 2) and flags (4).
"""

import math
import mmap
import os
import struct
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from sandboxes.linux.files import remove_tree

PARENT = "parent"
"""The directory of the parent's images within a checkpoint's. The name is CRIU's."""
_PAGE = mmap.PAGESIZE
_MAGIC_BYTES = 8
_ADDRESS, _OLD_COUNT, _FLAGS, _COUNT = 1, 2, 4, 5
_PE_PARENT, _PE_PRESENT = 1, 4
_NEW = ".new"
_AT_ONCE = 64 * _PAGE
"""Bytes that are compared at once, before single pages are."""
MOST_PARENTS = 20
"""How many parents lie behind one another. Each holds some ten files, and CRIU looks pages up in each of them."""
_WORTH = 0.9
"""The largest share of the pages that may be new. With more, the checkpoint stays by itself, as a parent of others.
An estimate: each parent costs a restore some milliseconds."""


@dataclass(frozen=True, slots=True)
class Range:
    """Pages that follow each other, at an address; `fields` is the message."""

    address: int
    pages: int
    fields: dict[int, int] = field(compare=False)

    @property
    def end(self) -> int:
        """The address behind the last page."""
        return self.address + self.pages * _PAGE

    @property
    def flags(self) -> int:
        """Where the pages are. Images of old versions have no flags: the pages are in the image."""
        return self.fields.get(_FLAGS, _PE_PRESENT)


def share(images: Path, base: Path) -> bool:
    """Take the pages of a checkpoint that are in the base too from there; return whether that was worth it."""
    # A base that is gone, or that is no checkpoint of the same processes, shares nothing. If it fails, the images are
    # as they were.
    if not base.is_dir():
        return False
    try:
        written = _shared(images, base)
    except (OSError, ValueError):
        # The base is damaged or just being deleted, or the disk is full.
        for left in images.glob(f"*{_NEW}"):
            left.unlink()
        remove_tree(images / PARENT)
        return False
    # Only now: until here the images are as they were.
    for new in written:
        new.rename(new.with_suffix(".img"))
    return bool(written)


def _shared(images: Path, base: Path) -> list[Path]:
    """Link the base's images, and write what is new; return the files that take the places of the checkpoint's."""
    if _depth(base) >= MOST_PARENTS:
        # A chain begins anew at its first checkpoint, which has most of the pages still.
        while (base / PARENT).is_dir():
            base /= PARENT
    shared: list[tuple[Path, bytes, list[Range]]] = []
    total = kept = 0
    with ExitStack() as stack:
        for path in sorted(images.glob("pagemap-*.img")):
            head, ranges = read(path)
            if any(part.flags & (_PE_PARENT | _PE_PRESENT) != _PE_PRESENT for part in ranges):
                return []
            split = list(_split(ranges, _opened(_pages_of(path, head), stack), *_places(base, path.name, stack)))
            total += sum(part.pages for part in ranges)
            kept += sum(part.pages for part in split if part.flags & _PE_PRESENT)
            shared.append((path, head, split))
        if kept > total * _WORTH:
            return []
        _link(base, images / PARENT)
        return [new for path, head, split in shared for new in _write(path, head, split, stack)]


def read(path: Path) -> tuple[bytes, tuple[Range, ...]]:
    """Return the begin of a pagemap up to its ranges, and the ranges. Raises ValueError for a file that is none."""
    return _checked(path.read_bytes(), path.name)


def _checked(data: bytes, name: str) -> tuple[bytes, tuple[Range, ...]]:
    try:
        return _parsed(data)
    except (struct.error, IndexError, KeyError) as error:
        raise ValueError(f"{name} is no pagemap: {error!r}") from error


# The pagemaps of all parents are read for each checkpoint, and parsing them takes the most time.
@lru_cache(maxsize=512)
def _parsed(data: bytes) -> tuple[bytes, tuple[Range, ...]]:
    messages, first, at = list[dict[int, int]](), 0, _MAGIC_BYTES
    while at < len(data):
        (length,) = struct.unpack_from("=I", data, at)
        at += 4
        if not first:
            first = at + length
        else:
            messages.append(_fields(data[at : at + length]))
        at += length
    return data[:first], tuple(Range(m[_ADDRESS], m.get(_COUNT) or m[_OLD_COUNT], m) for m in messages)


class _Stretch(NamedTuple):
    """Pages from `begin` to `end` in memory, which lie from `at` on in the pages of a checkpoint or its n-th parent."""

    begin: int
    end: int
    parent: int
    at: int


def _places(folder: Path, name: str, stack: ExitStack) -> tuple[Sequence[_Stretch], list[int]]:
    """Return where a process's pages lie, and the open files of the checkpoint's pages and of all its parents'."""
    pagemaps, files = list[bytes](), list[int]()
    while (path := folder / name).exists():
        pagemaps.append(path.read_bytes())
        head, _ = _checked(pagemaps[-1], name)
        files.append(_opened(_pages_of(path, head), stack))
        folder /= PARENT
    return _stretches(tuple(pagemaps)), files


# The next checkpoint of the chain has these parents and one more: without the cache, each would look through all again.
@lru_cache(maxsize=64)
def _stretches(pagemaps: tuple[bytes, ...]) -> tuple[_Stretch, ...]:
    """Return where the pages lie, in the order of their addresses, by the pagemaps of a checkpoint and its parents."""
    places, at = list[_Stretch](), 0
    below = _stretches(pagemaps[1:]) if pagemaps else ()
    for part in _parsed(pagemaps[0])[1] if pagemaps else ():
        if part.flags & _PE_PRESENT:
            places.append(_Stretch(part.address, part.end, 0, at))
            at += part.end - part.address
        elif part.flags & _PE_PARENT:
            for begin, end, parent, begins_at in _within(below, part.address, part.end):
                places.append(_Stretch(begin, end, parent + 1, begins_at))
    return tuple(places)


def _within(places: Sequence[_Stretch], begin: int, end: int) -> Iterator[_Stretch]:
    # The last that begins at or before the address. A tuple, because a function as the key would be called for each.
    at = max(0, bisect_right(places, (begin, math.inf)) - 1)
    while at < len(places) and (place := places[at]).begin < end:
        if place.end > begin:
            start = max(place.begin, begin)
            yield _Stretch(start, min(place.end, end), place.parent, place.at + start - place.begin)
        at += 1


def _split(ranges: Iterable[Range], file: int, places: Sequence[_Stretch], files: Sequence[int]) -> Iterator[Range]:
    at = 0
    for part in ranges:
        same = [(part.address, part.address)]
        for place in _within(places, part.address, part.end):
            for begin, end in _equal(place, files[place.parent], file, at + place.begin - part.address):
                if begin == same[-1][1]:
                    begin, _ = same.pop()  # noqa: PLW2901 - one longer run
                same.append((begin, end))
        before = part.address
        for begin, end in (*same, (part.end, part.end)):
            if before < begin:
                yield _range(part, before, begin, part.flags)
            if begin < end:
                yield _range(part, begin, end, _PE_PARENT)
            before = end
        at += part.end - part.address


def _equal(place: _Stretch, known_in: int, file: int, at: int) -> Iterator[tuple[int, int]]:
    """Yield the begins and ends of pages that are equal to those from `at` on in a file."""
    # Most of a long run is equal, and a loop over its pages takes ten times as long as a comparison of them all.
    for done in range(0, place.end - place.begin, _AT_ONCE):
        length = min(_AT_ONCE, place.end - place.begin - done)
        known, now = os.pread(known_in, length, place.at + done), os.pread(file, length, at + done)
        if known == now:
            yield place.begin + done, place.begin + done + length
            continue
        for offset in range(0, length, _PAGE):
            if known[offset : offset + _PAGE] == now[offset : offset + _PAGE]:
                yield place.begin + done + offset, place.begin + done + offset + _PAGE


def _range(part: Range, begin: int, end: int, flags: int) -> Range:
    pages = (end - begin) // _PAGE
    counts = {number: pages for number in (_OLD_COUNT, _COUNT) if number in part.fields}
    return replace(part, address=begin, pages=pages, fields={**part.fields, **counts, _ADDRESS: begin, _FLAGS: flags})


def _write(path: Path, head: bytes, ranges: list[Range], stack: ExitStack) -> tuple[Path, Path]:
    """Write a pagemap, and those of its pages that are in no parent, beside the old ones; return both files."""
    pages, at = _opened(_pages_of(path, head), stack), 0
    kept, pagemap = _pages_of(path, head).with_suffix(_NEW), path.with_suffix(_NEW)
    with kept.open("wb") as file:
        for part in ranges:
            if part.flags & _PE_PRESENT:
                file.write(os.pread(pages, part.end - part.address, at))
            at += part.end - part.address
    messages = [_message(part.fields) for part in ranges]
    pagemap.write_bytes(head + b"".join(struct.pack("=I", len(message)) + message for message in messages))
    return kept, pagemap


def _link(base: Path, target: Path) -> None:
    target.mkdir()
    for path in (*base.glob("pagemap-*.img"), *base.glob("pages-*.img")):
        os.link(path, target / path.name)
    if (base / PARENT).is_dir():
        _link(base / PARENT, target / PARENT)


def _depth(images: Path) -> int:
    return 1 + _depth(images / PARENT) if (images / PARENT).is_dir() else 0


def _pages_of(pagemap: Path, head: bytes) -> Path:
    return pagemap.parent / f"pages-{_fields(head[_MAGIC_BYTES + 4 :])[1]}.img"


def _opened(path: Path, stack: ExitStack) -> int:
    return stack.enter_context(path.open("rb")).fileno()


def _fields(message: bytes) -> dict[int, int]:
    fields, at = {}, 0
    while at < len(message):
        key, at = _number(message, at)
        fields[key >> 3], at = _number(message, at)
    return fields


def _number(data: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        number |= (data[at] & 0x7F) << shift
        shift += 7
        at += 1
        if data[at - 1] < 0x80:
            return number, at


def _message(fields: dict[int, int]) -> bytes:
    message = bytearray()
    for number, value in sorted(fields.items()):
        for part in (number << 3, value):
            rest = part
            while rest > 0x7F:
                message.append(rest & 0x7F | 0x80)
                rest >>= 7
            message.append(rest)
    return bytes(message)
