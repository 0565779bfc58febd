"""How many spare containers wait, and when they are made. No container is started here."""

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from sandboxes.container import spares as module
from sandboxes.container.boxes import Box
from sandboxes.container.spares import Spares
from sandboxes.spec import Limits

KIND = ("image", Limits())


class Channel:
    lost = None


class Stock(Spares):
    """Spares whose containers are made when the gate is open."""

    def __init__(self, folder: Path) -> None:
        super().__init__(cast("Any", None), folder, spares=1)
        self.gate, self.making, self.made = asyncio.Event(), asyncio.Event(), 0

    @property
    def waiting(self) -> int:
        return len(self._spares[KIND])

    async def make(self, *_: object) -> Box:
        self.made += 1
        self.making.set()
        await self.gate.wait()
        return Box(str(self.made), "container", cast("Any", Channel()), Path())

    async def throw_away(self, box: Box) -> None:
        pass

    async def restocked(self) -> int:
        self.restock()
        await self.background.wait()
        return self.waiting


def test_as_many_wait_as_were_taken_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a burst as many containers wait as it took, eight times the usual number at most."""
    monkeypatch.setattr(module, "_BURST_S", 3600.0)

    async def go() -> None:
        stock = Stock(tmp_path)
        stock.gate.set()
        await stock.take(*KIND)
        assert await stock.restocked() == 1
        for _ in range(2):
            await stock.take(*KIND)
        assert await stock.restocked() == 3
        for _ in range(15):
            await stock.take(*KIND)
        assert await stock.restocked() == 8
        # As if the burst were long ago.
        stock._demands.clear()
        assert await stock.restocked() == 1

    asyncio.run(go())


def test_sandboxes_go_before_spares(tmp_path: Path) -> None:
    """While a sandbox waits for its container, Docker starts no spare."""

    async def go() -> None:
        stock = Stock(tmp_path)
        taking = asyncio.create_task(stock.take(*KIND))
        await stock.making.wait()
        stock.restock()
        assert stock._restocking is not None
        await asyncio.wait([stock._restocking], timeout=30)
        assert stock.made == 1
        stock.gate.set()
        await taking
        assert await stock.restocked() == 1

    asyncio.run(go())
