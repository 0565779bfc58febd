"""What this member knows as an ingress: views of tasks, where their owners are, and the calls whose agents wait."""

import asyncio
import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from proxy.cluster.link.channels import LinkChannel
from proxy.cluster.postgres.database import Ownership
from proxy.cluster.protocol import IngressTask
from proxy.http.asgi import Receive
from sandboxes.task_owner import start

LOOK_S = 0.01
"""How long to look whether an agent has hung up. If it sent its call elsewhere, the end of its connection has arrived
before; two rounds of the event loop read it."""


@dataclass(slots=True, eq=False)
class WaitingCall:
    """A call of an agent.

    Attributes:
        number: Its number among the calls of this start.
        receive: Returns the next event of the agent's connection, whose request was read to the end; None for a
            connection whose events say more than that it has ended.
        is_over: Whether the agent has its answer, or has hung up.
        first: What an owner will answer that has the call already; None if none has.
    """

    number: int
    receive: Receive | None
    is_over: bool = False
    first: asyncio.Future[bytes | LinkChannel] | None = None

    async def waits(self) -> bool:
        """Return whether the agent still waits for the answer. 10 ms, or less if it has hung up."""
        if self.receive is None:
            await asyncio.sleep(LOOK_S)
        elif not self.is_over:
            hangup = start(_hung_up(self.receive))
            await asyncio.wait({hangup}, timeout=LOOK_S)
            if not hangup.done():
                hangup.cancel()
                await asyncio.gather(hangup, return_exceptions=True)
            elif hangup.result():
                self.is_over = True
        return not self.is_over


async def _hung_up(receive: Receive) -> bool:
    message = await receive()
    is_disconnect: bool = message["type"] == "http.disconnect"
    return is_disconnect


@dataclass(slots=True, eq=False)
class TaskIngress:
    """One task, as this ingress sees it.

    Attributes:
        name: Its name.
        rules: The latest view. Positions are in the position file.
        owner: The owner as the database had it last; None if it has to be looked up.
        waiting: The calls that are not over, oldest first.
        regular: How many calls of a rollout, by its name, take the regular way and are not over. No later call of
            these rollouts may overtake them.
        looking: Held while the owner is looked up, or while this member takes the task over.
        failed_at: When that failed last, as a time of the event loop.
    """

    name: str
    rules: IngressTask = field(default_factory=IngressTask)
    owner: Ownership | None = None
    waiting: dict[int, WaitingCall] = field(default_factory=dict)
    regular: dict[str, int] = field(default_factory=dict)
    looking: asyncio.Lock = field(default_factory=asyncio.Lock)
    failed_at: float = -math.inf

    @property
    def oldest(self) -> int:
        """Number of the oldest call that is not over. There must be one."""
        return next(iter(self.waiting))

    def begin_regular(self, rollout: str) -> None:
        """Count a call that takes the regular way; `end_regular` must follow. An empty name stands for no rollout."""
        self.regular[rollout] = self.regular.get(rollout, 0) + 1

    def end_regular(self, rollout: str) -> None:
        """Note that a call which was counted is over."""
        self.regular[rollout] -= 1
        if not self.regular[rollout]:
            del self.regular[rollout]

    @contextmanager
    def going_regularly(self, rollout: str) -> Iterator[None]:
        """Count a call while the context lasts."""
        self.begin_regular(rollout)
        try:
            yield
        finally:
            self.end_regular(rollout)


class Ingress:
    """All tasks that agents of this member have named."""

    def __init__(self) -> None:
        self._tasks: dict[str, TaskIngress] = {}
        self._calls: dict[int, WaitingCall] = {}
        self._numbers = itertools.count(1)

    def task(self, name: str) -> TaskIngress:
        """Return a task, which is new if no agent has named it before."""
        return self._tasks.get(name) or self._tasks.setdefault(name, TaskIngress(name))

    def known(self, name: str) -> TaskIngress | None:
        """Return a task that an agent has named before."""
        return self._tasks.get(name)

    def call(self, number: int) -> WaitingCall | None:
        """Return a call that is not over; None if it is, or never was."""
        return self._calls.get(number)

    def forget_owners(self) -> None:
        """Ask the database for each owner again."""
        for task in self._tasks.values():
            task.owner = None

    def became_stream(self, task: TaskIngress, call: WaitingCall) -> None:
        """Note that a call is never sent again, so that its owner may forget the answers of the calls after it."""
        task.waiting.pop(call.number, None)

    def begin(self, task: TaskIngress, receive: Receive | None) -> WaitingCall:
        """Number a call; `end` must follow."""
        call = WaitingCall(next(self._numbers), receive)
        task.waiting[call.number] = self._calls[call.number] = call
        return call

    def end(self, task: TaskIngress, call: WaitingCall) -> None:
        """Note that a call is over."""
        call.is_over = True
        task.waiting.pop(call.number, None)
        del self._calls[call.number]

    @contextmanager
    def calling(
        self, task: TaskIngress, receive: Receive | None, begun: WaitingCall | None = None
    ) -> Iterator[WaitingCall]:
        """Number a call, or continue one that has a number; it is over at the end of the block."""
        call = begun or self.begin(task, receive)
        call.receive = receive
        try:
            yield call
        finally:
            self.end(task, call)
