"""A member that stops or is drained leaves: the positions that only it knows go to the log (rule 8 of `protocol`).

Tasks that a member hands over to another one, all of them or some, take the same way.
"""

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

import structlog

from proxy.cluster.gate import ClusterGate
from proxy.cluster.messages import DrainAnswer, LeaveAnswer, LeaveQuestion, Message, ReportAnswer, ReportQuestion
from proxy.cluster.owned import Owned
from proxy.cluster.postgres.connection import DatabaseError
from proxy.cluster.postgres.database import ClusterDatabase
from proxy.cluster.protocol import Position
from proxy.engine import Engine
from proxy.refusals import RefusalError
from sandboxes.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

log = structlog.get_logger()

LEAVE_S = 10.0
"""How long a member that stops waits for its owners, and for the calls of its peers, in seconds."""
SEND_S = 10.0
"""How long the kept states of all tasks that are handed over together may be sent, in seconds. What is not sent in
time, for example to a slow store, is replayed by the next owner."""
QUIET_S = 0.3
"""Interval at which is looked whether a task has a call that runs, in seconds."""


class Leaving:
    """Lets ingresses leave the tasks of this member, and this member leave the tasks of others.

    Attributes:
        hands_over: Awaited before a task is handed over, so that the next owner finds its kept states. Its second
            argument is the most seconds that it may take.
    """

    hands_over: "Callable[[Owned, float], Awaitable[None]] | None" = None

    def __init__(
        self,
        gate: ClusterGate,
        database: ClusterDatabase,
        ask: "Callable[[int, Message], Awaitable[Message | None]]",
        engine: Engine,
    ) -> None:
        """Create the part of a member that leaves. `ask` asks another member by its number; see `Member.ask`."""
        self._gate, self._database, self._ask, self._engine = gate, database, ask, engine

    async def leave(self) -> None:
        """Let all owners write the positions that this member knows as an ingress to the log.

        Rollouts of owners that do not answer, and of tasks without an owner, still need this member.
        """
        try:
            async with asyncio.timeout(LEAVE_S):
                await self.let_go(self._gate.number)
                peers = [peer for peer, _ in await self._database.members() if peer.alive]
                others = [peer.number for peer in peers if peer.number != self._gate.number]
                answers = await asyncio.gather(*(self._ask(number, LeaveQuestion()) for number in others))
        except (DatabaseError, TimeoutError) as error:
            log.warning("not all rollouts can go on without this member", error=str(error))
        else:
            needed = sum(answer.kept for answer in answers if isinstance(answer, LeaveAnswer))
            log.info("left the rollouts of others", needed=needed)

    async def hand_over(self, tasks: "Sequence[Owned]", give: "Callable[[str, int], Awaitable[bool]]") -> DrainAnswer:
        """Hand tasks of this member over, one after the other. A task that no member takes over stays.

        A call that still runs after `LEAVE_S` is made again by the next owner, and recorded once.

        Args:
            tasks: The tasks.
            give: Lets another member take a task over, by its name and view; returns whether one did.
        """
        clock = asyncio.get_running_loop().time
        handed, until, left_s = 0, clock() + LEAVE_S, SEND_S
        for owned in tasks:
            await self._await_calls(owned.task, until)
            if self.hands_over is not None:
                began = clock()
                await self.hands_over(owned, left_s)
                left_s = max(0.0, left_s - (clock() - began))
            # The next owner then waits for no report of this member.
            await self.let_go_of(owned, self._gate.number)
            # A row of this owner that came after the next one has read the log would keep that one from its first row.
            async with owned.holding_rows():
                with suppress(DatabaseError):
                    handed += not owned.is_dropped and await give(owned.task, owned.rules.view)
        return DrainAnswer(handed, len(tasks) - handed)

    async def _await_calls(self, name: str, until: float) -> None:
        """Wait until no call of a task waits or runs here."""
        task, now = self._engine.tasks.get(name), asyncio.get_running_loop().time
        while task is not None and any(rollout.waiting for rollout in task.rollouts.values()) and now() < until:  # noqa: ASYNC110 - for a while
            await asyncio.sleep(QUIET_S)

    async def let_go(self, ingress: int) -> int:
        """Let an ingress leave all tasks of this member; return how many of their rollouts still need it."""
        return sum([await self.let_go_of(owned, ingress) for owned in tuple(self._gate.owned.values())])

    async def let_go_of(self, owned: Owned, ingress: int) -> int:
        """Let an ingress leave one task; return how many rollouts of it still need the ingress."""
        named = [number for number, line in owned.rules.entered.items() if line.ingress == ingress]
        reported = await self._positions(owned, ingress, named) if named and owned.is_ready else None
        if reported is None:
            return len(named)
        lines = []
        with suppress(RefusalError, SpecError):
            # Rollouts of a task that was not used for a while are not in memory.
            task = await self._engine.tasks.open(owned.task)
            owned.require()
            running = {rollout.id: rollout for rollout in task.rollouts.values()}
            # No await from here on: no call may begin between a look at a rollout and its line.
            for rollout in (running[number] for number in named if number in running):
                if not rollout.waiting:
                    position = Position(rollout.calls, rollout.node.id)
                    lines.append(owned.rules.left(rollout.id, ingress, position, reported.get(rollout.id)))
            written = [line for line in lines if line is not None]
            if written:
                await asyncio.shield(owned.write(written))
            return len(named) - len(written)
        return len(named)

    async def _positions(self, owned: Owned, ingress: int, rollouts: list[int]) -> "Mapping[int, Position] | None":
        """Return what an ingress has passed on, by rollout; None if it does not answer."""
        if ingress == self._gate.number:
            get = self._gate.positions.get
            return {number: position for number in rollouts if (position := get(number)) is not None}
        answer = await self._ask(ingress, ReportQuestion(owned.task, owned.rules.view, rollouts))
        return answer.positions if isinstance(answer, ReportAnswer) and answer.accepted else None
