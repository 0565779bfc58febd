"""Copies of layers: what merging and checkpoints write to the disk."""

import asyncio
import errno
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from sandboxes.errors import NotFreezableError
from sandboxes.guest.files import delta, row_table
from sandboxes.guest.files.manifest import Manifest
from sandboxes.host import layer_tar
from sandboxes.linux.file_copy import copy_entry
from sandboxes.local.layer_merge import has_entry
from sandboxes.local.layers import LayerMeta, Layers, ReadyUppers, Upper, copy_upper
from sandboxes.task_owner import TaskOwner
from tests.machine import assert_spread


@pytest.fixture
def layers(tmp_path: Path) -> Layers:
    opened = Layers(tmp_path)
    opened.open()
    return opened


def frozen(layers: Layers, upper: Upper) -> str:
    return layers.freeze(upper, LayerMeta(1, Manifest(b"", b""), links=""), row_table.pack([], 0, 0, complete=False))


def size_bytes(folder: Path) -> int:
    fd = os.open(folder, os.O_RDONLY)
    try:
        return delta.size_bytes(fd)
    finally:
        os.close(fd)


def sparse(path: Path, size: int) -> None:
    """Make a file with a hole of a size between two pieces of data."""
    with path.open("wb") as file:
        file.write(b"begin")
        file.seek(size)
        file.write(b"end")


def test_each_upper_has_a_place_of_its_own_on_ext4(layers: Layers, tmp_path: Path) -> None:
    """Files of one upper are not made among those that were just deleted of others."""
    assert_spread(layers.uppers, tmp_path)


def test_a_kill_before_its_description_leaves_no_layer(layers: Layers, tmp_path: Path) -> None:
    """It was placed, so that it could be mounted, and no state names it yet."""
    upper = layers.allocate()
    (upper.path / "diff/file").touch()
    table = row_table.pack([], 0, 0, complete=False)
    layers.place(upper, LayerMeta(1, Manifest(b"", b""), links=""), table)
    assert layers.missing([upper.id]) == [upper.id]
    Layers(tmp_path).open()
    assert not (layers.frozen / upper.id).exists()
    complete = frozen(layers, layers.allocate())
    Layers(tmp_path).open()
    assert not layers.missing([complete])


def test_uppers_are_ready_when_they_are_taken(layers: Layers) -> None:
    """What cannot be made ahead is made, or refused, when it is needed. Those that are left are returned at the end."""
    full, made = False, list[Upper]()

    def make() -> Upper:
        if full:
            raise OSError(errno.ENOSPC, "no room")
        made.append(layers.allocate())
        return made[-1]

    async def go() -> None:
        nonlocal full
        background = TaskOwner()
        uppers = ReadyUppers(make, background)
        first = uppers.take()
        assert made == [first]
        await background.wait()
        ahead = made[1:]
        assert len(ahead) > 1
        assert uppers.take() is ahead[0]
        full = True
        assert [uppers.take() for _ in ahead[1:]] == ahead[1:]
        with pytest.raises(OSError, match="no room"):
            uppers.take()
        await background.wait()
        full = False
        assert uppers.take() is made[-1]
        left = await uppers.close()
        assert len(left) > 1
        assert {*left} <= {*made[1 + len(ahead) :]}
        taken = uppers.take()
        await background.wait()
        assert taken is made[-1]
        assert await uppers.close() == []

    asyncio.run(go())


def written(layers: Layers, paths: Mapping[str, str | None]) -> str:
    """Make a layer of files with a text, and of directories, which have none."""
    upper = layers.allocate()
    for path, text in paths.items():
        if text is None:
            (upper.path / "diff" / path).mkdir()
        else:
            (upper.path / "diff" / path).write_text(text)
    rows = [(path.encode(), row_table.Row(row_table.FIXED, b"x" * 16)) for path in sorted(paths)]
    return layers.freeze(upper, LayerMeta(1, Manifest(b"", b""), links=""), row_table.pack(rows, 0, 0, complete=False))


def test_merging_copies_the_last_content_of_a_file_only(layers: Layers, monkeypatch: pytest.MonkeyPatch) -> None:
    copied = list[str]()

    def copy(name: str, *rest: Any) -> None:
        copied.append(name)
        copy_entry(name, *rest)

    monkeypatch.setattr("sandboxes.local.layer_merge.copy_entry", copy)
    ids = [
        written(layers, {"d": None, "d/often": "third", "file": "now"}),
        written(layers, {"d": None, "d/often": "second", "file": None, "file/inner": "gone"}),
        written(layers, {"d": None, "d/often": "first", "d/once": "only", "file": "before"}),
    ]
    merged = layers.frozen / layers.merge(ids, layers.allocate()) / "diff"
    assert sorted(copied) == ["file", "inner", "often", "once"]
    texts = {str(path.relative_to(merged)): path.read_text() for path in merged.rglob("*") if path.is_file()}
    assert texts == {"d/often": "third", "d/once": "only", "file": "now"}
    assert layers.size_bytes(merged.parent.name) == size_bytes(merged)


def test_merging_copies_what_a_directory_replaces(layers: Layers) -> None:
    """A directory over a file hides what is below the file, as the file does. So the merged one is opaque."""
    ids = [written(layers, {"d": None, "d/new": "1"}), written(layers, {"d": "a file"})]
    merged = layers.frozen / layers.merge(ids, layers.allocate()) / "diff"
    assert os.getxattr(merged / "d", "user.overlay.opaque") == b"y"


def test_merging_trusts_no_table(layers: Layers) -> None:
    """One that was damaged may name what its layer has not."""
    upper = layers.allocate()
    (upper.path / "diff/d").symlink_to("/etc")
    rows = [(path, row_table.Row(row_table.FIXED, b"x" * 16)) for path in (b"d", b"d/passwd", b"f")]
    top = layers.freeze(upper, LayerMeta(1, Manifest(b"", b""), links=""), row_table.pack(rows, 0, 0, complete=False))
    ids = [top, written(layers, {"f": "kept", "e": None})]
    merged = layers.frozen / layers.merge(ids, layers.allocate()) / "diff"
    assert (merged / "f").read_text() == "kept"
    assert not has_entry(layers.frozen / top / "diff", "d/passwd")


def test_merging_keeps_holes(layers: Layers) -> None:
    """Files of gigabytes that take no disk take none in the merged layer."""
    uppers = [layers.allocate() for _ in range(2)]
    for upper in uppers:
        sparse(upper.path / f"diff/{upper.id}", 3 << 30)
        (upper.path / "diff/nothing").touch()
        os.truncate(upper.path / "diff/nothing", 1 << 40)
    target = layers.allocate()
    merged = layers.frozen / layers.merge([frozen(layers, upper) for upper in uppers], target) / "diff"
    assert size_bytes(merged) < 100_000
    assert (merged / "nothing").stat().st_size == 1 << 40
    for upper in uppers:
        with (merged / upper.id).open("rb") as file:
            assert file.read(8) == b"begin\0\0\0"
            file.seek(3 << 30)
            assert file.read() == b"end"


def test_copying_of_a_live_upper_keeps_holes(layers: Layers) -> None:
    live, copy = layers.allocate(), layers.allocate()
    sparse(live.path / "diff/file", 3 << 30)
    copy_upper(live, copy)
    assert size_bytes(copy.path / "diff") < 100_000


def test_copying_of_deep_folders_is_refused(layers: Layers) -> None:
    live = layers.allocate()
    (live.path / "diff" / "/".join(["d"] * 300)).mkdir(parents=True)
    with pytest.raises(NotFreezableError):
        copy_upper(live, layers.allocate())


def test_export_of_large_holes_is_refused(layers: Layers) -> None:
    """A tar has holes as zeros, and a sandbox makes a thousand terabytes of them in a second."""
    upper = layers.allocate()
    for number in range(3):
        sparse(upper.path / f"diff/{number}", 500 << 20)
    layer = frozen(layers, upper)
    with pytest.raises(NotFreezableError, match="holes"):
        for _ in layer_tar.pack(layers.frozen / layer, layers.tables.of(layer)):
            pass


def test_attributes_of_programs_are_copied_and_marks_are_not(layers: Layers) -> None:
    """Overlayfs stores a program's `user.overlay.x` under another name, and its own origin marks beside it."""
    upper = layers.allocate()
    (upper.path / "diff/f").touch()
    for name in ("user.overlay.overlay.x", "user.overlay.origin", "user.mine"):
        os.setxattr(upper.path / "diff/f", name, b"1")
    merged = layers.merge([frozen(layers, upper), frozen(layers, layers.allocate())], layers.allocate())
    assert sorted(os.listxattr(layers.frozen / merged / "diff/f")) == ["user.mine", "user.overlay.overlay.x"]


def test_every_entry_counts(layers: Layers) -> None:
    """A million empty files take no blocks, but they take inodes: each counts like a block."""
    upper = layers.allocate()
    for number in range(100):
        (upper.path / f"diff/{number}").touch()
    assert size_bytes(upper.path / "diff") == 100 * delta.ENTRY_BYTES


def test_merging_covers_directories_links_and_owners(layers: Layers) -> None:
    lower, upper = layers.allocate(), layers.allocate()
    (lower.path / "diff/d/e").mkdir(parents=True)
    (lower.path / "diff/d/e/gone").touch()
    (lower.path / "diff/file").mkdir()
    (lower.path / "diff/file/below").touch()
    (upper.path / "diff/d/e").mkdir(parents=True, mode=0o700)
    os.setxattr(upper.path / "diff/d/e", "user.overlay.opaque", b"y")
    (upper.path / "diff/d/e/new").write_text("new")
    os.link(upper.path / "diff/d/e/new", upper.path / "diff/linked")
    (upper.path / "diff/file").write_text("file")
    os.utime(upper.path / "diff/d", ns=(1, 2))
    (upper.path / "diff/d").chmod(0o1710)
    merged = layers.merge([frozen(layers, upper), frozen(layers, lower)], layers.allocate())
    layers.sync([merged])
    top = layers.frozen / merged / "diff"
    assert sorted(str(path.relative_to(top)) for path in top.rglob("*")) == ["d", "d/e", "d/e/new", "file", "linked"]
    assert os.getxattr(top / "d/e", "user.overlay.opaque") == b"y"
    assert (top / "linked").stat().st_ino == (top / "d/e/new").stat().st_ino
    assert ((top / "d").stat().st_mtime_ns, (top / "d").stat().st_mode & 0o7777) == (2, 0o1710)
