"""Pages that a checkpoint shares with an earlier one: CRIU's format, written by hand."""

import os
import random
import struct
from pathlib import Path
from typing import Any

import pytest

from snapshots.criu import page_sharing
from snapshots.criu.page_sharing import MOST_PARENTS, PARENT, share

PAGE = 4096
MAGIC = struct.pack("=II", 0x54564319, 0x56084025)
Memory = dict[int, bytes]
"""Pages by their number."""


def number(value: int) -> bytes:
    data = b""
    while value > 0x7F:
        data += bytes([value & 0x7F | 0x80])
        value >>= 7
    return data + bytes([value])


def message(*fields: tuple[int, int]) -> bytes:
    data = b"".join(number(name << 3) + number(value) for name, value in fields)
    return struct.pack("=I", len(data)) + data


def written(folder: Path, memory: Memory, *, pages_id: int = 3, flags: int = 6) -> Path:
    """Write the images of one process, as CRIU does: a range for pages that follow each other."""
    folder.mkdir()
    ranges: list[list[int]] = []
    for page in sorted(memory):
        if ranges and sum(ranges[-1]) == page:
            ranges[-1][1] += 1
        else:
            ranges.append([page, 1])
    entries = [message((1, begin * PAGE), (2, count), (4, flags)) for begin, count in ranges]
    (folder / "pagemap-7.img").write_bytes(MAGIC + message((1, pages_id)) + b"".join(entries))
    (folder / f"pages-{pages_id}.img").write_bytes(b"".join(memory[page] for page in sorted(memory)))
    return folder


def memory_of(folder: Path) -> Memory:
    """Read the memory as CRIU does: what is in the parent is looked up there."""
    head, ranges = page_sharing.read(folder / "pagemap-7.img")
    data = page_sharing._pages_of(folder / "pagemap-7.img", head).read_bytes()
    parent = memory_of(folder / PARENT) if (folder / PARENT).is_dir() else {}
    memory, at = {}, 0
    for part in ranges:
        for page in range(part.address // PAGE, part.address // PAGE + part.pages):
            if part.flags & 1:
                memory[page] = parent[page]
            else:
                memory[page] = data[at : at + PAGE]
                at += PAGE
    assert at == len(data)
    return memory


def filled(*pages: int, seed: int = 0) -> Memory:
    return {page: random.Random(f"{page} {seed}").randbytes(PAGE) for page in pages}  # noqa: S311


@pytest.mark.parametrize("seed", range(20))
def test_any_chain_of_checkpoints_gives_back_each_memory(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311
    memory, base, kept = filled(*chance.sample(range(60), 40)), None, []
    for turn in range(MOST_PARENTS + 4):
        for page in chance.sample(sorted(memory), 4):
            del memory[page]
        memory |= filled(*chance.sample(range(60), 6), seed=chance.choice([0, turn]))
        images = written(tmp_path / str(turn), memory, pages_id=turn + 1)
        if base is not None:
            share(images, base)
        base = images
        kept.append((images, dict(memory)))
    assert any((images / PARENT).is_dir() for images, _ in kept)
    for images, expected in kept:
        assert memory_of(images) == expected


def test_only_new_pages_are_kept_and_what_is_left_stays_whole_without_its_parent(tmp_path: Path) -> None:
    memory = filled(*range(100))
    base = written(tmp_path / "base", memory)
    changed = memory | filled(5, 6, 50, seed=1)
    images = written(tmp_path / "images", changed)
    assert share(images, base)
    assert (images / "pages-3.img").stat().st_size == 3 * PAGE
    for path in base.iterdir():
        path.unlink()
    assert memory_of(images) == changed


def test_what_has_little_in_common_stays_by_itself(tmp_path: Path) -> None:
    base = written(tmp_path / "base", filled(*range(10)))
    images = written(tmp_path / "images", filled(*range(10), seed=1))
    before = {path.name: path.read_bytes() for path in images.iterdir()}
    assert not share(images, base)
    assert {path.name: path.read_bytes() for path in images.iterdir()} == before


def test_a_base_that_is_gone_is_no_parent(tmp_path: Path) -> None:
    assert not share(written(tmp_path / "images", filled(*range(10))), tmp_path / "gone")


def test_a_long_chain_begins_anew_at_its_first_checkpoint(tmp_path: Path) -> None:
    memory = filled(*range(10))
    base = written(tmp_path / "0", memory)
    for turn in range(1, MOST_PARENTS + 2):
        memory |= filled(turn % 2, seed=turn)
        images = written(tmp_path / str(turn), memory, pages_id=turn)
        assert share(images, base)
        assert memory_of(images) == memory
        if turn <= MOST_PARENTS:
            assert (images / f"pages-{turn}.img").stat().st_size == PAGE, "parents of the parent have the others"
        base = images
    assert not (base / PARENT / PARENT).exists()
    # What has changed since the first checkpoint.
    assert (base / f"pages-{MOST_PARENTS + 1}.img").stat().st_size == 2 * PAGE


@pytest.mark.parametrize("damage", [b"\0", b"\xff" * 40])
def test_a_damaged_base_leaves_the_images_as_they_were(tmp_path: Path, damage: bytes) -> None:
    base = written(tmp_path / "base", filled(*range(10)))
    (base / "pagemap-7.img").write_bytes((base / "pagemap-7.img").read_bytes() + damage)
    images = written(tmp_path / "images", filled(*range(10)))
    before = sorted(images.rglob("*"))
    assert not share(images, base)
    assert (memory_of(images), sorted(images.rglob("*"))) == (filled(*range(10)), before)


@pytest.mark.parametrize("failing", ["link", "_write"])
def test_a_failing_disk_leaves_the_images_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """The base is deleted while its files are linked, or the disk is full: a part of a parent could not be restored."""
    base, images = (written(tmp_path / name, filled(*range(10))) for name in ("base", "images"))
    before = sorted(images.rglob("*"))

    def fails(*arguments: Any, **_: Any) -> None:
        if failing == "link" and "pages" not in str(arguments[0]):
            whole(*arguments)
            return
        (images / "pages-3.new").touch()
        raise FileNotFoundError(arguments[0])

    owner = os if failing == "link" else page_sharing
    whole = getattr(owner, failing)
    monkeypatch.setattr(owner, failing, fails)
    assert not share(images, base)
    assert (memory_of(images), sorted(images.rglob("*"))) == (filled(*range(10)), before)
