"""Directories that are removed in the background."""

import asyncio
from pathlib import Path

import pytest

from sandboxes.linux.files import remove_tree
from sandboxes.local import reaper as reaper_module
from sandboxes.local.reaper import Reaper
from sandboxes.task_owner import TaskOwner


def test_everything_is_removed_before_the_owner_ends(tmp_path: Path) -> None:
    """Also what comes while the first directories are removed; a missing directory is no error."""

    async def go() -> None:
        background = TaskOwner()
        reaper = Reaper(background)
        for name in ("a", "b", "c"):
            (tmp_path / name / "deep" / "er").mkdir(parents=True)
            reaper.remove([tmp_path / name, tmp_path / "missing"])
        reaper.close()
        await asyncio.sleep(0)
        (tmp_path / "late").mkdir()
        reaper.remove([tmp_path / "late"])
        await background.wait()

    asyncio.run(go())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("ending", [True, False])
def test_what_cannot_be_removed_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, ending: bool
) -> None:
    """A process without a free descriptor, for example, can open no directory. By itself, or at the end."""
    tries: list[Path] = []

    def remove_later(path: Path) -> bool:
        tries.append(path)
        return len(tries) > 1 and remove_tree(path)

    monkeypatch.setattr(reaper_module, "remove_tree", remove_later)
    monkeypatch.setattr(reaper_module, "_AGAIN_S", (30.0 if ending else 0.0,))

    async def go() -> None:
        background = TaskOwner()
        reaper = Reaper(background)
        (tmp_path / "a" / "b").mkdir(parents=True)
        reaper.remove([tmp_path / "a"])
        if ending:
            reaper.close()
        await background.wait()

    asyncio.run(go())
    assert list(tmp_path.iterdir()) == []


def test_what_overlayfs_leaves_is_removed_without_a_walk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A `work` directory with anything else in it is walked."""
    works, walked = [tmp_path / "usual", tmp_path / "unusual"], list[Path]()
    for work in works:
        (work / "work/incompat/volatile").mkdir(parents=True)
        (work / "work/incompat/volatile/dirty").touch()
    (works[1] / "work/#1").touch()

    def walk(path: Path) -> bool:
        walked.append(path)
        return remove_tree(path)

    monkeypatch.setattr("sandboxes.local.reaper.remove_tree", walk)

    async def go() -> None:
        background = TaskOwner()
        reaper = Reaper(background)
        reaper.remove(works)
        reaper.close()
        await background.wait()

    asyncio.run(go())
    assert walked == works[1:]
    assert list(tmp_path.iterdir()) == []
