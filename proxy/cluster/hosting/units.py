"""Storage units of states on their way between two members: each is sent once, and known by the SHA-256 of its bytes.

A state names its units as their sender does. The receiver looks each digest up among the units that it has, and asks
for the others. A unit that its sender has never packed has no digest yet: it is new, so the receiver cannot have it.
The receiver's driver checks every unit that arrives as it checks those of an imported file.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from proxy.cluster.hosting.messages import Conversation, HostingError, Lacks, Unit
from proxy.cluster.hosting.transfers import DamagedUnitError, receive_unit, send_unit
from proxy.telemetry.counters import HostingCounters
from sandboxes.driver import FrozenState
from sandboxes.portability import NotPortableError, Porter, SharingUnpacking, Unpacking

MAX_KNOWN = 100_000
"""Most units whose digests are remembered, 300 bytes each. A unit that is forgotten is sent again."""


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
            sent = await send_unit(conversation, self.porter, unit.name)
            self._counts.bytes_sent += sent.size_bytes
            self._note(sent)

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
                arrived[place] = await receive_unit(conversation, unpacking, units[place], self._folder)
                self._counts.bytes_received += arrived[place].size_bytes
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
