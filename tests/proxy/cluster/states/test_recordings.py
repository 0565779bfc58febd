"""What hosts outside have sent is in the store before a call is answered; the next owner has it before it replays."""

import asyncio
from pathlib import Path

import pytest

from proxy.cluster.lines import Kept
from proxy.storage.copies import RecordCopy
from sandboxes.errors import SandboxError
from tests.machine import until
from tests.proxy.cluster.states.owners import BreakableStore, Log, owner
from tests.proxy.transfer.rig import ReachingDriver

SENT = [f"echo {number} >> f" for number in range(2)]


def drivers(folder: Path, count: int) -> list[ReachingDriver]:
    made = [ReachingDriver(folder / f"egress-{number}") for number in range(count)]
    for driver in made:
        driver.folder.mkdir()
    return made


async def kept(log: Log) -> None:
    """Wait until the store has all states: the next owner's rollouts come to these by hits."""
    await until(lambda: len(log.lines(Kept)) == len(log.lines(RecordCopy)) + 1)


def test_next_owner_has_the_recordings(tmp_path: Path) -> None:
    """Also the one after it, and those of a call that this one has executed."""
    log, objects = Log(), BreakableStore()
    first, second, third = drivers(tmp_path, 3)

    async def go() -> None:
        first.record(1, b"from outside")
        async with owner(tmp_path, 1, log, objects, driver=first) as one:
            await one.walk("a", SENT[:1])
            await kept(log)
        async with owner(tmp_path, 2, log, objects, driver=second) as two:
            # A hit needs no sandbox, so nothing is fetched.
            await two.walk("b", SENT[:1])
            assert second.files() == {}
            second.record(2, b"more")
            await two.walk("c", [*SENT, "cat f"])
        async with owner(tmp_path, 3, log, objects, driver=third) as three:
            await three.walk("d", ["cat f"])
        assert (len(first.files()), third.files()) == (1, second.files())
        assert first.files().items() < third.files().items()
        assert (second.recounted, third.recounted) == (1, 1)

    asyncio.run(go())


def test_call_is_not_recorded_without_its_recordings(tmp_path: Path) -> None:
    """The store fails: the call gets an error. It is made again when the store is back."""
    log, objects = Log(), BreakableStore()
    (driver,) = drivers(tmp_path, 1)

    async def go() -> None:
        async with owner(tmp_path, 1, log, objects, driver=driver) as one:
            driver.record(1, b"from outside")
            objects.fails = True
            with pytest.raises(SandboxError, match="not in the store"):
                await one.walk("a", SENT)
            assert log.lines(RecordCopy) == []
            objects.fails = False
            await one.walk("b", SENT)
            assert len(log.lines(RecordCopy)) == len(SENT)

    asyncio.run(go())


def test_no_sandbox_starts_without_recordings(tmp_path: Path) -> None:
    """The store fails after a takeover: nothing is replayed, because hosts would be asked again. Hits are answered."""
    log, objects = Log(), BreakableStore()
    first, second = drivers(tmp_path, 2)

    async def go() -> None:
        first.record(1, b"from outside")
        async with owner(tmp_path, 1, log, objects, driver=first) as one:
            await one.walk("a", SENT)
            await kept(log)
        async with owner(tmp_path, 2, log, objects, driver=second) as two:
            objects.fails = True
            await two.walk("b", SENT)
            with pytest.raises(SandboxError, match="not in the store"):
                await two.walk("c", [*SENT, "cat f"])
            assert second.executed == []
            objects.fails = False
            await two.walk("d", [*SENT, "cat f"])
            assert second.files() == first.files()

    asyncio.run(go())


def test_recording_of_the_later_view_counts(tmp_path: Path) -> None:
    """An owner that was replaced may write after the next one has read; nothing depends on that."""
    log, objects = Log(), BreakableStore()
    first, second, third = drivers(tmp_path, 3)

    async def go() -> None:
        async with owner(tmp_path, 1, log, objects, driver=first) as one:
            await one.walk("a", SENT[:1])
            states, tree = one.states, (await one.engine.tasks.open("task")).tree
        async with owner(tmp_path, 2, log, objects, driver=second) as two:
            second.record(1, b"right")
            await two.walk("b", SENT)
        first.record(1, b"late")
        ((name, late),) = first.files().items()
        name = name.removeprefix("scope-")
        await objects.put(states.path(f"recordings/{tree.id}/{states.owned.view}/{name}"), late)
        async with owner(tmp_path, 3, log, objects, driver=third) as three:
            await three.walk("c", ["cat f"])
        assert third.files() == second.files()

    asyncio.run(go())
