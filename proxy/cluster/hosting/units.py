"""Storage units of states on their way between two members: each is sent once, and known by the SHA-256 of its bytes.

A state names its units as their sender does. The receiver looks each digest up among the units that it has, and asks
for the others. A unit that its sender has never packed has no digest yet: it is new, so the receiver cannot have it.
The receiver's driver checks every unit that arrives as it checks those of an imported file.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from uuid import uuid4

from proxy.cluster.hosting.messages import Conversation, HostingError, Lacks, Piece, Unit, UnitEnd
from proxy.telemetry.counters import HostingCounters
from sandboxes.driver import FrozenState
from sandboxes.errors import NotFreezableError
from sandboxes.portability import NotPortableError, Porter, SharingUnpacking, Unpacking

PIECE_BYTES = 1 << 20
"""Size of the pieces that a unit is sent in, in bytes. Smaller ones cost more turns of the event loop."""
MAX_KNOWN = 100_000
"""Most units whose digests are remembered, 300 bytes each. A unit that is forgotten is sent again."""


class DamagedUnitError(Exception):
    """A unit did not arrive as it was packed, or the driver refuses it or its state."""


@dataclass(frozen=True, slots=True)
class _HeldUnit:
    part: str
    size_bytes: int
    until: ExitStack


class Units:
    """What one driver of this member has packed or received, and what it keeps for states that may come next.

    Attributes:
        porter: The part of the driver that exports and imports.
        held_bytes: Bytes of units that are kept although no state of this member needs them.
    """

    def __init__(self, porter: Porter, folder: Path, counts: HostingCounters, *, budget_bytes: int) -> None:
        """Know nothing yet.

        Args:
            porter: The part of the driver that exports and imports.
            folder: Where units are kept while they arrive.
            counts: Where the bytes of units are counted.
            budget_bytes: Most bytes of units that are kept for other members' states.
        """
        self.porter, self._folder, self._budget_bytes = porter, folder, budget_bytes
        self._counts = counts
        self.held_bytes = 0
        self._by_part: OrderedDict[str, Unit] = OrderedDict()
        self._by_digest: dict[str, str] = {}
        self._held: OrderedDict[str, _HeldUnit] = OrderedDict()

    def of(self, frozen: FrozenState) -> list[Unit]:
        """Return the units of a state of this member."""
        return [self._by_part.get(part) or Unit(part, "", 0) for part in frozen.parts]

    # -- sending -----------------------------------------------------------------------------------------------------

    async def send_lacking(self, conversation: Conversation, units: Sequence[Unit]) -> None:
        """Send what the other end says that it lacks of the units of a state.

        Raises:
            HostingError: See `send`, or the other end asks for a unit that the state does not have.
        """
        lacks = (await conversation.expect(Lacks)).message
        assert isinstance(lacks, Lacks)
        await self.send(conversation, chosen(units, lacks))

    async def send(self, conversation: Conversation, units: Sequence[Unit]) -> None:
        """Send units of this member.

        Raises:
            HostingError: The other end has ended the conversation, or a unit cannot be read. It is told so.
        """
        for unit in units:
            digest, size = sha256(), 0
            try:
                pieces = self.porter.pack(unit.name)
                while data := await asyncio.to_thread(_next, pieces):
                    digest.update(data)
                    size += len(data)
                    await conversation.send(Piece(), data)
            except (OSError, ValueError, NotFreezableError) as error:
                await conversation.send(UnitEnd(""))
                raise HostingError(f"a unit of a state cannot be read: {error}") from error
            self._counts.bytes_sent += size
            self._note(Unit(unit.name, digest.hexdigest(), size))
            await conversation.send(UnitEnd(digest.hexdigest()))

    # -- receiving ---------------------------------------------------------------------------------------------------

    async def receive(
        self, conversation: Conversation, frozen: FrozenState, units: Sequence[Unit], *, hold: bool
    ) -> tuple[FrozenState, ExitStack]:
        """Receive a state, after asking for the units that this member lacks.

        Args:
            conversation: What brings the units.
            frozen: The state as its sender has it.
            units: Its units, in the order of its parts.
            hold: Whether to keep its units for states that come later, within the budget.

        Returns:
            The state as this member's driver has it. Its units are not collected before the stack is closed.

        Raises:
            DamagedUnitError: A unit is damaged, or the driver refuses it or the state.
            HostingError: The other end has ended the conversation.
            OSError: The machine cannot store a unit.
        """
        with ExitStack() as stack:
            unpacking: Unpacking = stack.enter_context(self.porter.unpacking())
            lacking = [place for place, unit in enumerate(units) if not self._use(unpacking, unit)]
            await conversation.send(Lacks(lacking))
            arrived = dict(enumerate(units))
            for place in lacking:
                arrived[place] = await self._receive_unit(conversation, unpacking, units[place])
            try:
                state = await asyncio.to_thread(unpacking.state, frozen)
            except NotPortableError as error:
                raise DamagedUnitError(str(error)) from error
            if isinstance(unpacking, SharingUnpacking):
                for unit in arrived.values():
                    here = Unit(unpacking.name_here(unit.name), unit.sha256, unit.size_bytes)
                    self._note(here)
                    if hold:
                        self._hold(here)
            return state, stack.pop_all()
        raise AssertionError("the context swallows no errors")

    def keep(self, frozen: FrozenState) -> None:
        """Keep the units of a state that other members have now, for states that come later."""
        for part in frozen.parts:
            if (unit := self._by_part.get(part)) is not None:
                self._hold(unit)

    def close(self) -> None:
        """Keep nothing more."""
        while self._held:
            self._let_go()

    def _use(self, unpacking: Unpacking, unit: Unit) -> bool:
        """Use a unit that this member has; return False if it has it not."""
        part = self._by_digest.get(unit.sha256) if unit.sha256 else None
        if part is None or not isinstance(unpacking, SharingUnpacking):
            return False
        try:
            unpacking.use(unit.name, part)
        except NotPortableError:
            self._forget(part)
            return False
        return True

    async def _receive_unit(self, conversation: Conversation, unpacking: Unpacking, unit: Unit) -> Unit:
        path, size = self._folder / uuid4().hex, 0
        with path.open("w+b") as file:
            # Without a name, so that a kill leaves nothing.
            path.unlink()
            while not isinstance(end := (envelope := await conversation.expect(Piece, UnitEnd)).message, UnitEnd):
                await asyncio.to_thread(file.write, envelope.body)
                size += len(envelope.body)
            if not end.sha256 or unit.sha256 not in ("", end.sha256):
                raise DamagedUnitError(f"the unit {unit.name} has another digest than its sender says")
            file.seek(0)
            try:
                # The driver compares the digest.
                await asyncio.to_thread(unpacking.part, unit.name, file, end.sha256)
            except NotPortableError as error:
                raise DamagedUnitError(f"the unit {unit.name} cannot be used: {error}") from error
        self._counts.bytes_received += size
        return Unit(unit.name, end.sha256, size)

    # -- what is known and kept --------------------------------------------------------------------------------------

    def _note(self, unit: Unit) -> None:
        self._by_part[unit.name] = unit
        self._by_digest[unit.sha256] = unit.name
        while len(self._by_part) > MAX_KNOWN:
            self._forget(next(iter(self._by_part)))

    def _forget(self, part: str) -> None:
        unit = self._by_part.pop(part)
        if self._by_digest.get(unit.sha256) == part:
            del self._by_digest[unit.sha256]

    def _hold(self, unit: Unit) -> None:
        """Keep a unit from being collected; those that were used least recently go."""
        if unit.name in self._held:
            self._held.move_to_end(unit.name)
            return
        with ExitStack() as stack:
            unpacking = stack.enter_context(self.porter.unpacking())
            if not isinstance(unpacking, SharingUnpacking):
                return
            try:
                unpacking.use(unit.name, unit.name)
            except NotPortableError:
                return
            self._held[unit.name] = _HeldUnit(unit.name, unit.size_bytes, stack.pop_all())
        self.held_bytes += unit.size_bytes
        while self.held_bytes > self._budget_bytes and self._held:
            self._let_go()

    def _let_go(self) -> None:
        _, held = self._held.popitem(last=False)
        self.held_bytes -= held.size_bytes
        held.until.close()


def chosen(units: Sequence[Unit], lacks: Lacks) -> list[Unit]:
    """Return the units that the receiver of a state lacks.

    Raises:
        HostingError: The state does not have so many.
    """
    if not all(0 <= place < len(units) for place in lacks.places):
        raise HostingError("a state does not have such a unit")
    return [units[place] for place in lacks.places]


def _next(pieces: Iterator[bytes]) -> bytes:
    """Return the next bytes of what a driver packs, about a piece; nothing at the end. Blocking."""
    data = bytearray()
    for piece in pieces:
        data += piece
        if len(data) >= PIECE_BYTES:
            break
    return bytes(data)
