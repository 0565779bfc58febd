"""One member of a cluster: it finds the owners of tasks, becomes their owner, and answers its peers.

Theory of operation of a takeover (`claim`), in this order:

1. The log is read, and a row is written behind it which says that this member owns the task. If another row came in
   between, nothing was written, and the owner is looked up again.
2. An older view that this member owned itself is dropped: its sandboxes are closed, and its calls fail.
3. The store gets the task as the log has it. Its calls are answered from then on.
"""

import asyncio
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import structlog

from proxy.cluster import messages
from proxy.cluster.compaction import read_task
from proxy.cluster.gate import ClusterGate
from proxy.cluster.ingress import Ingress, TaskIngress
from proxy.cluster.lines import Kept
from proxy.cluster.link.greeting import Hello
from proxy.cluster.link.passing import Passing, PeerLostError
from proxy.cluster.owned import Owned
from proxy.cluster.postgres.connection import DatabaseError
from proxy.cluster.postgres.database import ClusterDatabase, Ownership, Peer
from proxy.cluster.postgres.joining import LEASE_S
from proxy.engine import Engine
from proxy.storage.copies import TaskCopy, TreeCopy
from proxy.tree.tree import Node
from sandboxes.ipc.codec import encode, with_members
from sandboxes.ipc.frames import MalformedFrameError
from sandboxes.task_owner import TaskOwner

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

log = structlog.get_logger()

BEAT_S = LEASE_S / 5
"""Interval at which the lease is extended, in seconds: four beats may fail."""
LEAVE_S = 10.0
"""How long a member that stops, or hands a task over, waits for calls that run, in seconds."""
SEND_S = 10.0
"""How long the kept states of all tasks that are handed over together may be sent, in seconds. What is not sent in
time, for example to a slow store, is replayed by the next owner."""
QUIET_S = 0.3
"""Interval at which is looked whether a task has a call that runs, in seconds."""


class Member:
    """This process in the cluster."""

    def __init__(self, database: ClusterDatabase, gate: ClusterGate, secret: bytes, engine: Engine) -> None:
        self.database, self.gate, self.ingress = database, gate, Ingress()
        self.replaced: Callable[[], None] = lambda: None
        # Awaited before a task is handed over, for so many seconds at most: the next owner finds its kept states.
        self.hands_over: Callable[[Owned, float], Awaitable[bool]] | None = None
        self.is_leaving = False  # Whether this member takes no task over any more, because it is drained or stops.
        self._engine = engine
        self.passing = Passing(secret, database.membership)  # Passes requests on to other members.
        self._peers: dict[int, Peer] = {}
        self._tasks = TaskOwner()
        self._lease_until = 0.0

    @property
    def number(self) -> int:
        """Number of this member."""
        return self.gate.number

    @property
    def hello(self) -> Hello:
        """This start of the member, as an ingress of its own calls."""
        return Hello(self.number, self.database.membership.boot, b"")

    def start(self) -> None:
        """Begin to extend the lease."""
        self._lease_until = _now() + LEASE_S
        self._tasks.spawn("lease", self._beat())

    async def aclose(self) -> None:
        """Own nothing more, end the lease and close the connections to others."""
        self.is_leaving = True
        for owned in self.gate.owned.values():
            owned.drop()
        self.gate.owned.clear()
        await self._tasks.end()
        self.passing.close()
        await self.database.aclose()

    # -- owners ------------------------------------------------------------------------------------------------------

    async def locate(self, name: str, *, creates: bool = True) -> Owned | Ownership | None:
        """Return the owner of a task. If it has none that lives, this member becomes its owner.

        A task that never had an owner gets one only if `creates` says so; else None. Raises DatabaseError.
        """
        owned = self.gate.owned.get(name)
        if owned is not None:
            return owned
        task = self.ingress.task(name)
        if task.owner is not None:
            return task.owner
        clock = asyncio.get_running_loop().time
        came_at = clock()
        async with task.looking:
            # One look answers for all calls that wait behind it: one after the other, they would each wait for a
            # database that does not answer.
            if task.failed_at > came_at:
                raise DatabaseError(f"the owner of task {name!r} could not be found")
            try:
                return await self._look(task, creates=creates)
            except DatabaseError:
                task.failed_at = clock()
                raise

    async def _look(self, task: TaskIngress, *, creates: bool) -> Owned | Ownership | None:
        """Look up the owner of a task, or become it; see `locate`."""
        name = task.name
        while True:
            if name in self.gate.owned:
                return self.gate.owned[name]
            owner = await self.database.owner(name)
            if owner is None and not creates:
                return None
            # A row of this start that is not owned here was dropped, and must be taken over again.
            if owner is not None and owner.peer.alive and owner.peer.number != self.number:
                self._peers[owner.peer.number] = owner.peer
                task.owner = owner
                return owner
            if self.is_leaving:
                if not await self.give(name, 0 if owner is None else owner.view):
                    raise DatabaseError("this member takes no task over, and no other one does")
                continue
            claimed = await self.claim(name)
            if claimed is not None:
                return claimed

    def supersede(self, name: str, view: int) -> None:
        """Own a task no more, and answer nothing of it, if it is owned in an earlier view than this one."""
        owned = self.gate.owned.get(name)
        if owned is not None and owned.view < view:
            self._drop(owned, "another member has taken it over")

    async def give(self, name: str, view: int, target: int | None = None) -> bool:
        """Let `target`, or a member with few tasks, take a task over from a view (0: none); return whether one did."""
        if target is None:
            members = sorted((count, peer) for peer, count in await self.database.members() if peer.alive)
            numbers = [peer.number for _, peer in members if peer.number != self.number]
        else:
            numbers = [target]
        for number in numbers:
            answer = await self.ask(number, messages.TakeQuestion(name, view))
            if isinstance(answer, messages.ElsewhereAnswer) and answer.view > view:
                self.supersede(name, answer.view)
                return True
        return False

    async def confirm(self, ingress: int, boot: int, number: int) -> bool:
        """Return whether an agent waits for a call at its ingress; False if that cannot be found out."""
        answer = await self.ask(ingress, messages.ConfirmQuestion(boot, number))
        return isinstance(answer, messages.ConfirmAnswer) and answer.waits

    async def _drain(self) -> messages.DrainAnswer:
        """Hand over all tasks, and take none over until the next start; see `hand_over`."""
        self.is_leaving = True
        answer = await self.hand_over(tuple(self.gate.owned.values()), self.give)
        return with_members(answer, kept=len(self.gate.owned))

    async def hand_over(
        self, tasks: "Sequence[Owned]", give: "Callable[[str, int], Awaitable[bool]]"
    ) -> messages.DrainAnswer:
        """Hand tasks over, one by one. Calls that run after `LEAVE_S` are made again by the next owner.

        A task stays if a rollout of it has a state that no other member could have.
        """
        clock = asyncio.get_running_loop().time
        handed, until, left_s = 0, clock() + LEAVE_S, SEND_S
        for owned in tasks:
            await self._await_calls(owned.task, until)
            if self.hands_over is not None:
                began = clock()
                is_safe = await self.hands_over(owned, left_s)
                left_s = max(0.0, left_s - (clock() - began))
                if not is_safe:
                    continue
            # A row of this owner that came after the next one has read the log would keep that one from its first row.
            async with owned.holding_rows():
                with suppress(DatabaseError):
                    handed += not owned.is_dropped and await give(owned.task, owned.view)
        return messages.DrainAnswer(handed, len(tasks) - handed)

    async def _await_calls(self, name: str, until: float) -> None:
        """Wait until no call of a task waits or runs here."""
        task, now = self._engine.tasks.get(name), asyncio.get_running_loop().time
        while task is not None and any(rollout.waiting for rollout in task.rollouts.values()) and now() < until:  # noqa: ASYNC110 - for a while
            await asyncio.sleep(QUIET_S)

    async def claim(self, name: str) -> Owned | None:
        """Become the owner of a task; None if another member was faster. See the module."""
        # 1. A row that another member writes after this read makes the append fail.
        reading = await read_task(self.database, name)
        view = reading.last + 1
        if not await self.database.append(name, view, None):
            return None
        # 2. No await from here until the store is written: no call may see the task half replaced.
        self.supersede(name, view)
        self.ingress.task(name).owner = None
        # 3. The steps in the journal are those of earlier views.
        self._engine.journal.fold()
        self._engine.store.copies.replace(name, reading.copies())
        owned = Owned(name, view, reading.steps, self.database.append, self._drop)
        owned.trees = {number: copy.exact for number, copy in reading.of(TreeCopy).items()}
        owned.kept, owned.rows = reading.of(Kept), reading.rows
        self.gate.owned[name] = owned
        if reading.of(TaskCopy):
            # Rollouts come into memory at the positions of the store.
            await self._open(owned)
            log.info("took over a task", task=name, view=view, records=len(reading.records))
        owned.open()
        return None if owned.is_dropped else owned

    async def _open(self, owned: Owned) -> None:
        try:
            await self._engine.tasks.open(owned.task)
        except BaseException:
            self._drop(owned, "its environment cannot be opened here")
            raise

    def _drop(self, owned: Owned, reason: str) -> None:
        """Own a task no more: nothing of it may be answered or recorded here from now on."""
        if self.gate.owned.get(owned.task) is owned:
            del self.gate.owned[owned.task]
        if owned.is_dropped:
            return
        log.warning("a task is not owned any more", task=owned.task, reason=reason)
        engine, trees = self._engine, self._engine.store.trees.ids_of(owned.task)
        task = engine.tasks.get(owned.task)
        for rollout in () if task is None else tuple(task.rollouts.values()):
            # A call that waits for its turn sees it and gives up.
            rollout.finished = True
        for forget in engine.lifecycle.at_drop:
            forget(owned.task)
        if task is not None:
            engine.tasks.close(task)
        for number in trees:
            tree = engine.trees.close(number)
            for node in () if tree is None else tree.nodes.values():
                # A call that still runs finds its node detached and records nothing.
                node.detached = True
        # Last: calls that wait for the log go on from here, and find the task gone.
        owned.drop()
        self._tasks.spawn("close sandboxes", self._close_detached())

    async def _close_detached(self) -> None:
        await self._engine.pool.close_where(lambda slot: isinstance(slot.position, Node) and slot.position.detached)

    # -- lease -------------------------------------------------------------------------------------------------------

    async def _beat(self) -> None:
        """Extend the lease. Without it nothing is owned, because another member may own it by now."""
        while True:
            began = _now()
            try:
                if not await self.database.beat():
                    log.error("a later start of this member has taken its place, so this one ends")
                    self.replaced()
                    return
                self._lease_until = began + LEASE_S
            except DatabaseError as error:
                log.warning("the lease was not extended", error=str(error))
            if _now() > self._lease_until:
                for owned in tuple(self.gate.owned.values()):
                    self._drop(owned, "the lease of this member has run out")
                self.ingress.forget_owners()
            await asyncio.sleep(BEAT_S)

    # -- peers -------------------------------------------------------------------------------------------------------

    async def ask(self, number: int, question: messages.Message) -> messages.Message | None:
        """Ask a member by its number, this one too; None if it cannot be reached."""
        if number == self.number:
            return await self._reply(question)
        known = self._peers.pop(number, None)
        for peer in (known, None) if known is not None else (None,):
            try:
                # The second time it is looked up: it may have another address and another start by now.
                target = peer or await self.database.member(number)
                if target is None:
                    return None
                answer = messages.unpack(await self.passing.ask(target, encode(question)))
            except (PeerLostError, MalformedFrameError, DatabaseError) as error:
                log.debug("a peer did not answer", member=number, error=str(error))
            else:
                self._peers[target.number] = target
                return answer
        return None

    async def answer(self, content: bytes) -> bytes:
        """Answer a question of a peer. Raises MalformedFrameError: it is none."""
        return encode(await self._reply(messages.unpack(content)))

    async def _reply(self, question: messages.Message) -> messages.Message:
        match question:
            case messages.TakeQuestion(task=task, view=view):
                return messages.ElsewhereAnswer(await self._take_over(task, view))
            case messages.DrainQuestion():
                return await self._drain()
            case messages.HandQuestion(task=task, target=target):
                owned = self.gate.owned.get(task)
                # A member that leaves hands all of its tasks over already. A task of another owner is not handed over.
                tasks = () if owned is None or self.is_leaving else (owned,)
                return await self.hand_over(tasks, partial(self.give, target=target))
            case messages.LoadQuestion():
                loads = {name: 1 + len(owned.steps) for name, owned in self.gate.owned.items()}
                return messages.LoadAnswer(self.is_leaving, loads)
            case messages.ConfirmQuestion(boot=boot, number=number):
                call = self.ingress.call(number) if boot == self.hello.boot else None
                return messages.ConfirmAnswer(call is not None and await call.waits())
            case other:
                raise MalformedFrameError(f"a peer sent the message {type(other).__name__}")

    async def _take_over(self, name: str, view: int) -> int:
        """Take a task over from a member that lives and asks for it; return the own view, 0 for none."""
        async with self.ingress.task(name).looking:
            owned = self.gate.owned.get(name)
            if owned is None and not self.is_leaving:
                try:
                    owner = await self.database.owner(name)
                    if view == (0 if owner is None else owner.view):
                        owned = await self.claim(name)
                except DatabaseError:
                    return 0
            return 0 if owned is None else owned.view


def _now() -> float:
    """Return seconds of a clock that also counts while the machine is suspended, which ends its lease."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
