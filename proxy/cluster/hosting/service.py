"""Hosting as a whole: what the engine asks of other members, and what they ask of this one."""

import asyncio
from collections.abc import Callable, Collection
from contextlib import suppress

from proxy.cluster.hosting.host import Host
from proxy.cluster.hosting.messages import NotHosted
from proxy.cluster.hosting.placement import Placement
from proxy.cluster.hosting.units import Units
from proxy.cluster.link.channels import LinkChannel
from proxy.cluster.link.data import ExpectedData, open_data
from proxy.cluster.link.frames import Hello
from proxy.cluster.member import Member
from proxy.cluster.messages import RoomAnswer
from proxy.cluster.postgres.database import Peer
from proxy.engine import LAST_FREEZES_S, Engine
from proxy.lifecycle import BackgroundWork
from sandboxes.ipc.codec import pack_message, with_members
from sandboxes.pool.room import available_bytes
from sandboxes.pool.roster import Slot
from sandboxes.portability import porter_of

DRIVERS = ("local", "sqlite")
"""Drivers whose sandboxes may run on other members. The others need what only their machine has: images of a Docker
daemon, a PostgreSQL server, prepared videos, or servers that know the address of their proxy."""

RECLAIM_EVERY_S = 0.25
"""Interval at which this member looks whether own calls wait for room that others use, in seconds."""


class Hosting:
    """Sandboxes of this member on others, and of others here."""

    def __init__(self, engine: Engine, member: Member, data: ExpectedData) -> None:
        """Connect an engine that is not open yet with the other members, if its settings allow it.

        Args:
            engine: The engine.
            member: This member.
            data: The data connections that this member takes.
        """
        self._engine, self._member = engine, member
        self._folder = engine.settings.data / "cluster" / "hosting"
        self._units: dict[str, Units] = {}
        counts = engine.counts.hosting
        reserve_bytes = engine.settings.memory_reserve_bytes
        self._host = Host(
            engine.drivers, engine.pool, self._units, counts, lambda: available_bytes() >= reserve_bytes, data
        )
        self._placement = Placement(
            engine.drivers, self._units, counts, self._peers, member.ask, member.links.call, open_data
        )
        if engine.settings.hosting == "on":
            porters = {name: porter_of(engine.drivers.get(name)) for name in DRIVERS}
            budget = engine.settings.hosting_bytes
            self._units |= {
                name: Units(porter, self._folder, counts, budget_bytes=budget)
                for name, porter in porters.items()
                if porter is not None
            }
            engine.restorer.maker.elsewhere = self._placement.restore
            engine.lifecycle.background.append(BackgroundWork("hosting", RECLAIM_EVERY_S, self._reclaim))

    @property
    def room(self) -> RoomAnswer:
        """What this member answers when another one asks for its room."""
        room = self._host.room
        return room if self._units and not self._member.is_leaving else with_members(room, room=0)

    async def serve(self, hello: Hello, order: bytes, begin: Callable[[], LinkChannel]) -> bytes:
        """Host a sandbox of another member, for its whole life; see `Host.serve`."""
        if not self._units or self._member.is_leaving:
            return pack_message(NotHosted("this member hosts no sandboxes", unfit=False))
        return await self._host.serve(hello, order, begin)

    async def _peers(self) -> list[Peer]:
        return [peer for peer in await self._member.database.alive() if peer.number != self._member.number]

    def open(self) -> None:
        """Remove what a kill left of units that arrived."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for file in self._folder.iterdir():
            file.unlink()

    async def give_back(self, hello: Hello, names: Collection[str]) -> int:
        """Close idle sandboxes that run on a member which needs their room; return how many were closed.

        One that is all that is left of a state stays, if its state cannot be brought home.
        """
        places = {(hello.member, name) for name in names}
        slots = [slot for slot in self._away() if getattr(slot.sandbox, "place", None) in places]
        return await self._engine.last_ways.close(slots, within_s=LAST_FREEZES_S)

    async def _reclaim(self) -> None:
        """Ask for the room of sandboxes of others that own calls wait for; of all of them, if this member leaves."""
        wanted = len(self._engine.pool.roster) if self._member.is_leaving else self._engine.pool.waiting
        if wanted:
            await self._host.reclaim(wanted, self._member.ask)

    def _away(self) -> list[Slot]:
        return [slot for slot in self._engine.pool.roster.slots if slot.elsewhere]

    async def aclose(self) -> None:
        """Bring the last states home, while the other members can still be reached, and let others take theirs."""
        self._member.is_leaving = True
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_FREEZES_S):
                await self._reclaim()
        await self._engine.last_ways.close(self._away(), within_s=LAST_FREEZES_S, even_unkept=True)
        for units in self._units.values():
            units.close()
