"""Small files of a base, which is a stranger's, are read without being led elsewhere or held up."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from sandboxes.inspection import FrozenPath
from sandboxes.linux.file_copy import OPAQUE
from sandboxes.local import lower_view
from sandboxes.local.lower_view import lines_of, open_path


@pytest.mark.parametrize(
    "make",
    [lambda path: path.symlink_to("/etc/hostname"), os.mkfifo, Path.mkdir, lambda path: path.symlink_to("gone")],
    ids=["a link", "a FIFO", "a directory", "a broken link"],
)
def test_what_is_no_file_has_no_lines(tmp_path: Path, make: Callable[[Path], object]) -> None:
    """Such an image starts, and the sandbox itself says who its root is."""
    (tmp_path / "upper" / "etc").mkdir(parents=True)
    make(tmp_path / "upper" / "etc" / "passwd")
    assert lines_of([str(tmp_path / "upper")], "etc/passwd") == []


def test_topmost_file_counts(tmp_path: Path) -> None:
    for name in ("upper", "lower"):
        (tmp_path / name / "etc").mkdir(parents=True)
        (tmp_path / name / "etc" / "passwd").write_text(f"{name}:x:0:0\n")
    assert lines_of([str(tmp_path / name) for name in ("upper", "lower")], "etc/passwd") == ["upper:x:0:0", ""]


def content(found: FrozenPath) -> bytes | None:
    if found.file is None:
        return None
    with found.file as file:
        return file.read()


@pytest.fixture
def layers(tmp_path: Path) -> list[str]:
    """Three directories, the topmost first; the middle one removes `gone` and makes `d` anew."""
    top, middle, base = (tmp_path / name for name in ("top", "middle", "base"))
    for folder in (top / "d", middle / "d" / "sub", base / "d" / "sub", base / "gone"):
        folder.mkdir(parents=True)
    for file, text in {
        base / "d" / "old": "old", base / "d" / "sub" / "x": "x", base / "gone" / "y": "y", base / "file": "base",
        middle / "d" / "sub" / "new": "new", top / "file": "top", top / "d" / "z": "z",
    }.items():  # fmt: skip
        file.write_text(text)
    os.mknod(middle / "gone", 0o600 | stat.S_IFCHR, 0)
    os.setxattr(middle / "d", OPAQUE, b"y")
    return [str(folder) for folder in (top, middle, base)]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes whiteouts")
def test_view_is_that_of_a_mount(layers: list[str]) -> None:
    def names(path: str) -> list[str]:
        return list(open_path(layers, path).entries)

    assert names("") == ["d", "file"]
    assert (names("d"), names("d/sub")) == (["sub", "z"], ["new"])
    assert [content(open_path(layers, path)) for path in ("file", "d/z", "d/sub/new")] == [b"top", b"z", b"new"]
    gone = ("gone", "gone/y", "d/old", "d/sub/x", "file/x", "d/none", "x" * 300, "d/" * 300 + "x")
    assert [open_path(layers, path).entry.kind for path in gone] == ["gone"] * len(gone)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes devices")
def test_no_device_is_opened(tmp_path: Path) -> None:
    os.mknod(tmp_path / "zero", 0o666 | stat.S_IFCHR, os.makedev(1, 5))
    os.mkfifo(tmp_path / "pipe")
    found = [open_path([str(tmp_path)], name) for name in ("zero", "pipe")]
    assert [(each.entry.kind, each.file) for each in found] == [("other", None)] * 2


def test_long_list_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lower_view, "MAX_ENTRIES", 3)
    for name in "abcd":
        (tmp_path / name).write_text("")
    found = open_path([str(tmp_path)], "")
    assert found.truncated
    (tmp_path / "a").unlink()
    found = open_path([str(tmp_path)], "")
    assert (found.truncated, list(found.entries)) == (False, ["b", "c", "d"])
