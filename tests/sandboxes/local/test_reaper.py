"""Directories that are removed in the background."""

import asyncio
import resource
from pathlib import Path

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


def test_what_cannot_be_removed_is_tried_again_at_the_end(tmp_path: Path) -> None:
    """A process without a free descriptor, for example, can open no directory."""

    async def go() -> None:
        background = TaskOwner()
        reaper = Reaper(background)
        (tmp_path / "a" / "b").mkdir(parents=True)
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        try:
            reaper.remove([tmp_path / "a"])
            await background.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert (tmp_path / "a").exists()
        reaper.close()
        await background.wait()

    asyncio.run(go())
    assert list(tmp_path.iterdir()) == []
