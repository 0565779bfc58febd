"""Walks and removals of trees that an agent has made as deep, as wide and as oddly named as it could."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sandboxes.linux import trees
from sandboxes.linux.files import remove_entry, remove_path, remove_tree

NEST = (
    "import os, sys\nfor i in range(int(sys.argv[2])):\n os.mkdir(sys.argv[1]); os.chdir(sys.argv[1])\nopen('f', 'w')"
)
"""Nests directories in each other, as an agent's program does: without a path that the kernel could refuse."""


def nest(folder: Path, levels: int, name: str = "d") -> None:
    subprocess.run([sys.executable, "-c", NEST, name, str(levels)], cwd=folder, check=True)


def walked(folder: Path) -> list[str]:
    fd = os.open(folder, os.O_RDONLY)
    try:
        return [f"{each.path}{entry.name}" for each in trees.folders(fd) for entry in each.entries]
    finally:
        os.close(fd)


@pytest.mark.parametrize(("levels", "name"), [(1_500, "d"), (30_000, "d"), (300, "n" * 255)])
def test_tree_of_any_depth_is_removed(tmp_path: Path, levels: int, name: str) -> None:
    (tmp_path / "deep").mkdir()
    nest(tmp_path / "deep", levels, name)
    assert remove_tree(tmp_path / "deep")
    assert list(tmp_path.iterdir()) == []


def test_tree_of_any_width_is_removed(tmp_path: Path) -> None:
    """There are more directories in one than a removal takes at once, and names that are no text."""
    for number in range(2_500):
        (tmp_path / f"wide/{number}/in").mkdir(parents=True)
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/wide/\xff\n\xfe")).mkdir()
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/wide/\x80")).touch()
    assert remove_tree(tmp_path / "wide")
    assert list(tmp_path.iterdir()) == []


def test_removal_ignores_modes(tmp_path: Path) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/f").touch()
    for folder in ("a/b", "a"):
        (tmp_path / folder).chmod(0)
    assert remove_tree(tmp_path / "a")


def test_removal_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept/f").touch()
    (tmp_path / "gone").mkdir()
    (tmp_path / "gone/link").symlink_to(tmp_path / "kept")
    (tmp_path / "top").symlink_to(tmp_path / "kept")
    assert remove_tree(tmp_path / "gone")
    remove_path(str(tmp_path / "top"))
    assert (tmp_path / "kept/f").exists()


def test_removal_leaves_only_what_is_stuck(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that the kernel refuses to remove is left with its directories; everything else goes."""
    for name in ("a/stuck/f", "a/stuck/g", "a/other/f", "z"):
        (tmp_path / "top" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "top" / name).touch()
    unlink, rest = os.unlink, tmp_path / "top/a/stuck"

    def refuse(name: str, *, dir_fd: int) -> None:
        if name == "g":
            raise PermissionError(1, "immutable")
        unlink(name, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", refuse)
    assert not remove_tree(tmp_path / "top")
    assert [path for path in (tmp_path / "top").rglob("*") if path.is_file()] == [rest / "g"]


def test_removal_of_a_moved_directory_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory that is moved while it is open has another parent, which is none of the removal's business."""
    (tmp_path / "top/a/b").mkdir(parents=True)
    (tmp_path / "top/a/b/f").touch()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/kept").touch()
    unlink = os.unlink

    def move(name: str, *, dir_fd: int) -> None:
        if name == "f":
            (tmp_path / "top/a/b").rename(tmp_path / "elsewhere/b")
        unlink(name, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", move)
    top = os.open(tmp_path, os.O_RDONLY)
    with pytest.raises(OSError, match="was moved"):
        remove_entry("top", top)
    os.close(top)
    assert (tmp_path / "elsewhere/kept").exists()


def test_walk_yields_folders_before_their_entries(tmp_path: Path) -> None:
    for name in ("b/f", "a/c/f", "a/f", "z"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert walked(tmp_path) == ["a", "b", "z", "a/c", "a/f", "a/c/f", "b/f"]


@pytest.mark.parametrize(("levels", "name", "fits"), [(256, "d", True), (257, "d", False), (13, "n" * 255, False)])
def test_walk_of_deep_tree_ends(tmp_path: Path, levels: int, name: str, fits: bool) -> None:
    nest(tmp_path, levels, name)
    if fits:
        assert len(walked(tmp_path)) == levels + 1
    else:
        with pytest.raises(trees.TreeTooDeepError):
            walked(tmp_path)


def test_walk_enters_no_link(tmp_path: Path) -> None:
    """A link in the place of a directory, at any level of the path, leads nowhere."""
    (tmp_path / "outside/in").mkdir(parents=True)
    (tmp_path / "top").mkdir()
    (tmp_path / "top/link").symlink_to("../outside")
    top = os.open(tmp_path / "top", os.O_RDONLY)
    try:
        assert [trees.open_below(top, path) for path in ("link", "link/in/", "../outside", "/etc")] == [None] * 4
    finally:
        os.close(top)
