"""One member of a cluster: it finds the owners of tasks, becomes their owner, and answers its peers.

Theory of operation of a takeover (`claim`), in this order:

1. The log is read, and a row is written behind it which says that this member owns the task. If another row came in
   between, nothing was written, and the owner is looked up again.
2. This member's own ingress accepts no older view from here on. An older view that this member owned itself is dropped:
   its sandboxes are closed, and its calls fail.
3. The store gets the task as the log has it, with the positions that the own ingress knows.
4. The other ingresses that the log names report their positions, however long that takes. Their rollouts wait.
"""

import asyncio
import time
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, cast

import structlog

from proxy.cluster.compaction import LogCompactor, read_task
from proxy.cluster.gate import ClusterGate
from proxy.cluster.ingress import Ingress, TaskIngress
from proxy.cluster.leaving import Leaving
from proxy.cluster.link.channels import LinkChannel
from proxy.cluster.link.links import Links
from proxy.cluster.link.opener import Link, LinkLostError, MemberFailedError
from proxy.cluster.messages import (
    CallAnswer,
    CallQuestion,
    ConfirmAnswer,
    ConfirmQuestion,
    DrainAnswer,
    ElsewhereAnswer,
    LoadAnswer,
    Message,
    ReportAnswer,
    ReportQuestion,
    StreamedAnswer,
    TakeQuestion,
    unpack,
)
from proxy.cluster.owned import Owned
from proxy.cluster.postgres.connection import DatabaseError
from proxy.cluster.postgres.database import ClusterDatabase, Ownership, Peer
from proxy.cluster.postgres.joining import LEASE_S
from proxy.cluster.protocol import OwnedTask, Position
from proxy.cluster.takeover import TaskLogReading
from proxy.engine import Engine
from proxy.tree.tree import Node
from sandboxes.ipc.codec import decode_bytes, encode, with_members
from sandboxes.ipc.frames import MalformedFrameError
from sandboxes.task_owner import TaskOwner

if TYPE_CHECKING:
    from collections.abc import Callable

log = structlog.get_logger()

BEAT_S = LEASE_S / 5
"""Interval at which the lease is extended, in seconds: four beats may fail."""
ASK_S = 0.3
"""Interval at which an ingress that did not report gets the question again, in seconds."""


class Member:
    """This process in the cluster.

    Attributes:
        database: The cluster's database.
        gate: The tasks that this member owns.
        ingress: The tasks that its agents ask for.
        links: The links to other members.
        replaced: Called when a later start of this member has taken its place.
        leaving: Lets members leave rollouts.
        is_leaving: Whether this member takes no task over any more, because it is drained or stops.
    """

    def __init__(self, database: ClusterDatabase, gate: ClusterGate, secret: bytes, engine: Engine) -> None:
        self.database, self.gate, self.ingress = database, gate, Ingress()
        self.replaced: Callable[[], None] = lambda: None
        self.leaving, self.is_leaving = Leaving(gate, database, self.ask, engine), False
        self._engine = engine
        self.links = Links(secret, database.membership)
        self._peers: dict[int, Peer] = {}
        self._tasks = TaskOwner()
        self._lease_until = 0.0

    @property
    def number(self) -> int:
        """Number of this member."""
        return self.gate.number

    @property
    def load(self) -> LoadAnswer:
        """Its load. O(tasks)."""
        tasks = {name: 1 + len(owned.rules.entered) for name, owned in self.gate.owned.items()}
        return LoadAnswer(self.is_leaving, tasks)

    def start(self) -> None:
        """Begin to extend the lease."""
        self._lease_until = _now() + LEASE_S
        self._tasks.spawn("lease", self._beat())
        self._tasks.spawn("compaction", LogCompactor(self.database, self.gate.owned, self._engine.counts).run())

    async def aclose(self) -> None:
        """Own nothing more, end the lease and close the links to others."""
        self.is_leaving = True
        for owned in self.gate.owned.values():
            owned.drop()
        self.gate.owned.clear()
        self._tasks.cancel()
        await self._tasks.wait()
        self.links.close()
        await self.database.aclose()

    # -- owners ------------------------------------------------------------------------------------------------------

    async def locate(self, name: str, *, creates: bool = True) -> Owned | Ownership | None:
        """Return the owner of a task. If it has none that lives, this member becomes its owner.

        Args:
            name: Name of the task.
            creates: Whether to become the owner of a task that never had one.

        Returns:
            The task if this member owns it, the owner if another member does; None for a task that never had an owner.

        Raises:
            DatabaseError: The database does not answer, so the owner is not known.
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
                self._note_peer(owner.peer)
                self.adopt(name, owner.view)
                task.owner = owner
                return owner
            if self.is_leaving:
                if not await self.give(name, 0 if owner is None else owner.view):
                    raise DatabaseError("this member takes no task over, and no other one does")
                continue
            claimed = await self.claim(name)
            if claimed is not None:
                return claimed

    def adopt(self, name: str, view: int) -> bool:
        """Accept no answer of an older view of a task any more; return False if a newer one is known."""
        task = self.ingress.task(name)
        if not task.rules.adopt(view):
            return False
        if task.owner is not None and task.owner.view < view:
            task.owner = None
        owned = self.gate.owned.get(name)
        if owned is not None and owned.rules.view < view:
            self._drop(owned, "another member has taken it over")
        return True

    async def give(self, name: str, view: int, target: int | None = None) -> bool:
        """Let another member take a task over; return whether one did.

        Args:
            name: Name of the task.
            view: The view that it is taken over from; 0 for a task that had no owner.
            target: Number of the member; None for any, one with few tasks first.

        Raises:
            DatabaseError: The database does not answer.
        """
        if target is None:
            members = sorted((count, peer) for peer, count in await self.database.members() if peer.alive)
            numbers = [peer.number for _, peer in members if peer.number != self.number]
        else:
            numbers = [target]
        for number in numbers:
            answer = await self.ask(number, TakeQuestion(name, view))
            if isinstance(answer, ElsewhereAnswer) and answer.view > view:
                # From here on nothing of it is answered here.
                return self.adopt(name, answer.view)
        return False

    async def forward(
        self, owner: Ownership, question: CallQuestion
    ) -> tuple[CallAnswer | ElsewhereAnswer | StreamedAnswer, LinkChannel | None]:
        """Ask the owner of a task. With a channel, the answer is the beginning of a stream.

        Raises:
            LinkLostError: The link broke. Whether the owner has taken the call is not known.
            MemberFailedError: The owner met a defect.
        """
        return await answer_to_call(await self.links.call(owner.peer, encode(question)))

    def link_to(self, owner: Ownership) -> Link | None:
        """Return the link to the owner of a task if a frame can be sent on it now."""
        return self.links.ready(owner.peer)

    def accept(self, name: str, view: int, positions: Mapping[int, Position | None]) -> bool:
        """Keep the positions of an answer; return False if it comes from a view that was replaced.

        Args:
            name: Name of the task.
            view: The view that has answered.
            positions: Where the answer leads, by number of the rollout; None for a rollout that has ended.

        Raises:
            OSError: A position cannot be kept, so the answer must not be passed on.
        """
        if not self.adopt(name, view):
            return False
        for rollout, position in positions.items():
            if position is None:
                self.gate.positions.forget(rollout)
            else:
                self.gate.positions.put(rollout, position)
        return True

    async def confirm(self, ingress: int, number: int) -> bool:
        """Return whether an agent waits for a call at another ingress; False if that cannot be found out."""
        answer = await self.ask(ingress, ConfirmQuestion(number))
        return isinstance(answer, ConfirmAnswer) and answer.waits

    def failed(self, owned: Owned, reason: str) -> None:
        """Drop a task whose row could not be written."""
        self._drop(owned, reason)

    async def drain(self) -> DrainAnswer:
        """Hand over all tasks, and take none over until the next start; see `Leaving.hand_over`."""
        self.is_leaving = True
        answer = await self.leaving.hand_over(tuple(self.gate.owned.values()), self.give)
        await self.leaving.leave()
        return with_members(answer, kept=len(self.gate.owned))

    async def hand_to(self, name: str, target: int) -> DrainAnswer:
        """Hand one task over to a member, by its number; see `Leaving.hand_over`. A task of another owner is not."""
        owned = self.gate.owned.get(name)
        # A member that leaves hands all of its tasks over already.
        tasks = () if owned is None or self.is_leaving else (owned,)
        return await self.leaving.hand_over(tasks, partial(self.give, target=target))

    async def claim(self, name: str) -> Owned | None:
        """Become the owner of a task; None if another member was faster. See the module."""
        # 1. A row that another member writes after this read makes the append fail.
        reading = await read_task(self.database, name)
        view = reading.last + 1
        if not await self.database.append(name, view, None):
            return None
        # 2. No await from here until the store is written: no call may see the task half replaced.
        if not self.adopt(name, view):
            return None
        task, positions = OwnedTask(view, reading.entered.values()), self.gate.positions
        own = {number: known for number in reading.entered if (known := positions.get(number)) is not None}
        settled = {line.rollout: line.position for line in task.hear(self.number, own)}
        # 3. The steps in the journal are those of earlier views.
        self._engine.journal.fold()
        self._engine.store.copies.replace(name, reading.copies(settled))
        owned = Owned(name, task, self.database.append, self.failed)
        owned.trees = {number: copy.exact for number, copy in reading.trees.items()}
        owned.kept, owned.rows = reading.kept, reading.rows
        self.gate.owned[name] = owned
        if reading.last:
            # Rollouts come into memory at the positions of the store.
            await self._open(owned)
            log.info("took over a task", task=name, view=view, records=len(reading.records))
        # 4. Members that the log names, and nothing else.
        for ingress in sorted(task.unheard):
            self._tasks.spawn("report", self._await_report(owned, ingress, reading))
        owned.is_ready = True
        owned.note_change()
        return None if owned.is_dropped else owned

    async def _open(self, owned: Owned) -> None:
        try:
            await self._engine.tasks.open(owned.task)
        except BaseException:
            self._drop(owned, "its environment cannot be opened here")
            raise

    async def _await_report(self, owned: Owned, ingress: int, reading: TaskLogReading) -> None:
        """Ask an ingress for the positions of its rollouts until it reports."""
        rollouts = [number for number, line in reading.entered.items() if line.ingress == ingress]
        question = ReportQuestion(owned.task, owned.rules.view, rollouts)
        while not owned.is_dropped:
            answer = await self.ask(ingress, question)
            if isinstance(answer, ReportAnswer) and not owned.is_dropped:
                if not answer.accepted:
                    self._drop(owned, "an ingress knows a newer owner")
                    return
                self._place(owned, ingress, answer.positions)
                return
            await asyncio.sleep(ASK_S)

    def _place(self, owned: Owned, ingress: int, reported: dict[int, Position]) -> None:
        """Move rollouts to the positions that their ingress has reported."""
        running = {rollout.id: rollout for rollout in self._engine.tasks.rollouts.running.values()}
        for line in owned.rules.hear(ingress, reported):
            rollout = running.get(line.rollout)
            if rollout is None:
                self._engine.store.rollouts.place(line.rollout, *line.position)
            elif rollout.calls != line.position.turn:
                self._engine.tasks.rollouts.place(rollout, *line.position)
        owned.note_change()

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

    def _note_peer(self, peer: Peer) -> None:
        self._peers[peer.number] = peer

    def name_of(self, number: int) -> str:
        """Return the name of a member, or its number if the name is not known."""
        peer = self._peers.get(number)
        return str(number) if peer is None else peer.name

    async def ask(self, number: int, question: Message) -> Message | None:
        """Ask a member by its number; None if it cannot be reached."""
        known = self._peers.pop(number, None)
        for peer in (known, None) if known is not None else (None,):
            try:
                # The second time it is looked up: it may have another address and another start by now.
                target = peer or await self.database.member(number)
                if target is None:
                    return None
                answer = unpack(await self.links.ask(target, encode(question)))
            except (LinkLostError, MemberFailedError, DatabaseError) as error:
                log.debug("a peer did not answer", member=number, error=str(error))
            else:
                self._note_peer(target)
                return answer
        return None


async def answer_to_call(
    content: bytes | LinkChannel,
) -> tuple[CallAnswer | ElsewhereAnswer | StreamedAnswer, LinkChannel | None]:
    """Return what a link has brought for a call. With a channel, the answer is the beginning of a stream.

    Raises:
        MalformedFrameError: It is no answer to a call.
    """
    if not isinstance(content, LinkChannel):
        return _answer_to_call(content), None
    # The channel has begun with the frame that is its first message.
    first = await content.receive()
    try:
        return _answer_to_call(first or b""), content
    except MalformedFrameError:
        content.abort()
        raise


def _answer_to_call(data: bytes) -> CallAnswer | ElsewhereAnswer | StreamedAnswer:
    answer = decode_bytes(data, CallAnswer, ElsewhereAnswer, StreamedAnswer)
    return cast("CallAnswer | ElsewhereAnswer | StreamedAnswer", answer)


def _now() -> float:
    """Return seconds of a clock that also counts while the machine is suspended, which ends its lease."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
