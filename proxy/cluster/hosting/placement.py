"""Placement: which member runs a sandbox that this member has no room for.

1. Few members are asked for their room, drawn by chance, at most every `FRESH_S`. So their number does not matter.
2. Members that have the units of the state come first, then those with less load for each processor.
3. The host decides. If it has no room by now, or the environment means something else there, the next one is asked. If
   none takes the sandbox, it waits for room on this machine, as without a cluster.
"""

import asyncio
import random
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NoReturn

import orjson
import structlog

from proxy.cluster.hosting.messages import (
    Conversation,
    Hosted,
    HostingError,
    HostOrder,
    NotHosted,
    unpacked,
)
from proxy.cluster.hosting.remote_sandbox import RemoteSandbox
from proxy.cluster.hosting.units import Units
from proxy.cluster.link.channels import LinkChannel
from proxy.cluster.link.data import TOKEN_BYTES
from proxy.cluster.link.opener import LinkLostError, MemberFailedError
from proxy.cluster.messages import HostQuestion, Message, RoomAnswer, RoomQuestion
from proxy.cluster.postgres.connection import DatabaseError
from proxy.cluster.postgres.database import Peer
from proxy.telemetry.counters import HostingCounters
from sandboxes.driver import Driver, FrozenState
from sandboxes.errors import SandboxError, SpecError
from sandboxes.ipc.codec import IpcMessage, encode, pack_message
from sandboxes.pool.pool import NoRoomElsewhereError
from sandboxes.spec import EnvironmentSpec

log = structlog.get_logger()

FRESH_S = 0.5
"""How long an answer about room is used, in seconds. Halved, owners ask twice as often; doubled, more are refused."""
DRAWN = 4
"""How many members are asked at once. The best of a few is nearly as good as the best of all."""
PEERS_S = 2.0
"""How long the list of members is used, in seconds."""
UNFIT_S = 60.0
"""How long a member is not asked again for an environment that means something else there, in seconds."""


@dataclass(slots=True)
class _Candidate:
    """What this member knows of another one.

    Attributes:
        peer: The other one, at its present start.
        room: How many sandboxes it would start; counted down with each one that it starts.
        load: Running processes for each of its processors.
        asked_at: When it was asked, on the monotonic clock.
        parts: Parts of states of this member that were sent to it.
        unfit: Environments that mean something else there, each with the time until which this is believed.
        sending: Held while parts are sent that others may wait for.
    """

    peer: Peer
    room: int = 0
    load: float = 0.0
    asked_at: float = -1e9
    parts: set[str] = field(default_factory=set)
    unfit: dict[str, float] = field(default_factory=dict)
    sending: asyncio.Lock = field(default_factory=asyncio.Lock)

    def note_closed(self) -> None:
        """Note that the member has closed a sandbox, so that it has room for another one."""
        self.room += 1


class Placement:
    """Finds hosts for sandboxes of this member."""

    def __init__(
        self,
        drivers: Mapping[str, Driver],
        units: Mapping[str, Units],
        counts: HostingCounters,
        peers: Callable[[], Awaitable[list[Peer]]],
        ask: Callable[[int, Message], Awaitable[Message | None]],
        call: Callable[[Peer, bytes], Awaitable[bytes | LinkChannel]],
        open_data: Callable[[Peer, bytes], Awaitable[socket.socket]],
    ) -> None:
        """Know no members yet.

        Args:
            drivers: The drivers by name.
            units: The storage units of the drivers whose sandboxes may run elsewhere.
            counts: Where sandboxes are counted.
            peers: Returns the members whose leases hold, without this one.
            ask: Asks a member by its number.
            call: Asks a member for a channel.
            open_data: Opens a data connection with a token.
        """
        self._drivers, self._units = drivers, units
        self._peers, self._ask, self._call, self._open_data = peers, ask, call, open_data
        self._known: dict[int, _Candidate] = {}
        self._looked_at = -1e9
        self._asking = asyncio.Lock()
        self._counts = counts

    async def restore(self, spec: EnvironmentSpec, frozen: FrozenState) -> RemoteSandbox:
        """Restore a sandbox on another member.

        Raises:
            NoRoomElsewhereError: No member takes it.
        """
        units = self._units.get(spec.driver)
        # What programs in a sandbox were given from outside is recorded by the driver of one machine.
        if units is None or spec.egress is not None or not units.porter.carries(frozen.kind):
            raise NoRoomElsewhereError
        try:
            identity = await self._drivers[spec.driver].identity(spec)
        except (SpecError, SandboxError, OSError) as error:
            # What is wrong with the environment shows when it is restored here.
            raise NoRoomElsewhereError from error
        for candidate in await self._ranked(identity, frozen.parts):
            try:
                return await self._start_at(candidate, spec, identity, frozen, units)
            except (HostingError, LinkLostError, MemberFailedError) as error:
                candidate.room = 0
                log.info("a member does not take a sandbox", member=candidate.peer.name, reason=str(error))
        self._counts.unplaced += 1
        raise NoRoomElsewhereError

    # -- whom to ask -------------------------------------------------------------------------------------------------

    async def _ranked(self, identity: str, parts: Iterable[str]) -> list[_Candidate]:
        """Return the members that may take a sandbox, the best one first."""
        await self._look()
        now, needed = time.monotonic(), frozenset(parts)
        willing = [each for each in self._known.values() if each.room > 0 and each.unfit.get(identity, 0.0) < now]
        return sorted(willing, key=lambda each: (len(needed - each.parts), each.load, -each.room))

    async def _look(self) -> None:
        """Learn which members have room, unless it is known."""
        async with self._asking:
            now = time.monotonic()
            if now - self._looked_at > PEERS_S:
                try:
                    alive = {peer.number: peer for peer in await self._peers()}
                except DatabaseError:
                    return
                self._looked_at = now
                # A member that was started again has none of what was sent to it.
                known = {number: each for number, each in self._known.items() if alive.get(number) == each.peer}
                self._known = {number: known.get(number) or _Candidate(peer) for number, peer in alive.items()}
            stale = [each for each in self._known.values() if now - each.asked_at > FRESH_S]
            # No secret: only the load is spread by it.
            drawn = random.sample(stale, min(DRAWN, len(stale)))
            await asyncio.gather(*map(self._ask_for_room, drawn))

    async def _ask_for_room(self, candidate: _Candidate) -> None:
        candidate.asked_at = time.monotonic()
        answer = await self._ask(candidate.peer.number, RoomQuestion())
        known = answer if isinstance(answer, RoomAnswer) else RoomAnswer(0, 0.0)
        candidate.room, candidate.load = known.room, known.load

    # -- one host ----------------------------------------------------------------------------------------------------

    async def _start_at(
        self, candidate: _Candidate, spec: EnvironmentSpec, identity: str, frozen: FrozenState, units: Units
    ) -> RemoteSandbox:
        """Start a sandbox at a member.

        Raises:
            HostingError: The member does not take it, or the conversation broke.
            LinkLostError, MemberFailedError: See `Link.ask`.
        """
        candidate.room -= 1
        if candidate.parts.issuperset(frozen.parts):
            return await self._order(candidate, spec, identity, frozen, units)
        # Many rollouts may begin at one state: its units travel once.
        async with candidate.sending:
            return await self._order(candidate, spec, identity, frozen, units)

    async def _order(
        self, candidate: _Candidate, spec: EnvironmentSpec, identity: str, frozen: FrozenState, units: Units
    ) -> RemoteSandbox:
        written, payload = spec.model_dump_json().encode(), orjson.dumps(frozen.payload)
        state, named = frozen.state, units.of(frozen)
        exact, content = (None, None) if state is None else (state.exact, state.content)
        token = secrets.token_bytes(TOKEN_BYTES)
        order = HostOrder(token, spec.driver, identity, frozen.kind, exact, content, named, len(written), time.time())
        answer = await self._call(candidate.peer, encode(HostQuestion(pack_message(order, written + payload))))
        if not isinstance(answer, LinkChannel):
            self._note_refusal(candidate, identity, unpacked(answer).message)
        conversation = Conversation(answer, partial(self._open_data, candidate.peer, token))
        try:
            await units.send_lacking(conversation, named)
            candidate.parts.update(frozen.parts)
            started = (await conversation.expect(Hosted, NotHosted)).message
            if not isinstance(started, Hosted):
                self._note_refusal(candidate, identity, started)
        except BaseException:
            conversation.channel.abort()
            raise
        self._counts.placed += 1
        return RemoteSandbox(
            conversation, started, candidate.peer, units, spec.driver, candidate.note_closed,
            is_live=frozen.state is None,
        )  # fmt: skip

    def _note_refusal(self, candidate: _Candidate, identity: str, answer: IpcMessage) -> NoReturn:
        """Remember why a member refused.

        Raises:
            HostingError: Always.
        """
        if not isinstance(answer, NotHosted):
            raise HostingError(f"the message {answer.op} was not expected")
        if answer.unfit:
            candidate.unfit[identity] = time.monotonic() + UNFIT_S
        raise HostingError(answer.reason)
