"""What this member knows as an ingress: where the owners of tasks are, and the calls whose agents wait."""

import asyncio
import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from proxy.cluster.link.passing import Passed
from proxy.cluster.postgres.database import Ownership
from proxy.http.asgi import Receive, Scope
from proxy.refusals import RefusalError

LOOK_S = 0.01
"""How long to look whether an agent has hung up. If it sent its call elsewhere, the end of its connection has arrived
before; two rounds of the event loop read it."""
MAX_UNANSWERED = 1000
"""Most rollouts of a task whose last call is remembered because it may have taken its step without an answer."""


@dataclass(slots=True, eq=False)
class WaitingCall:
    """A call of an agent."""

    task: "TaskIngress"
    number: int  # Its number among the calls of this start.
    # The events of its connection, behind the request; None for one whose events say more than that it has ended.
    receive: Receive | None
    is_again: bool = False  # Whether its agent was told to try again, so that it may be the rollout's last step.
    is_asked: bool = False  # Whether an owner has got it, so that it may have taken its step.
    is_over: bool = False  # Whether the agent has its answer, or has hung up.

    async def waits(self) -> bool:
        """Return whether the agent still waits for the answer. 10 ms, or less if it has hung up."""
        if self.receive is None:
            await asyncio.sleep(LOOK_S)
        elif not self.is_over:
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    self.is_over |= (await self.receive())["type"] == "http.disconnect"
        return not self.is_over


@dataclass(slots=True, eq=False)
class TaskIngress:
    """One task, as this ingress sees it."""

    name: str
    owner: Ownership | None = None  # The owner as the database had it last; None if it has to be looked up.
    waiting: dict[int, WaitingCall] = field(default_factory=dict)  # The calls that are not over, oldest first.
    # By rollout: the digest and the number of the last call whose agent was told to try again although it may have
    # taken its step.
    unanswered: dict[str, tuple[bytes, int]] = field(default_factory=dict)
    # Held while the owner is looked up, or while this member takes the task over.
    looking: asyncio.Lock = field(default_factory=asyncio.Lock)
    failed_at: float = -math.inf  # When that failed last, as a time of the event loop.

    @property
    def oldest(self) -> int:
        """Number of the oldest call that may be made again; 0 for none."""
        if not self.unanswered:
            return next(iter(self.waiting), 0)
        return min((*itertools.islice(self.waiting, 1), *(number for _, number in self.unanswered.values())))

    def passed(self, call: WaitingCall, view: int, scope: Scope) -> Passed:
        """Return what the owner in a view has to know of a call."""
        host, port = scope.get("client") or ("", "")
        scheme = scope.get("scheme", "http")
        return Passed(view, call.number, self.oldest or call.number, call.is_again, scheme, self.name, f"{host}/{port}")


class Ingress:
    """All tasks that agents of this member have named."""

    def __init__(self) -> None:
        self._tasks: dict[str, TaskIngress] = {}
        self._calls: dict[int, WaitingCall] = {}
        self._numbers = itertools.count(1)

    def task(self, name: str) -> TaskIngress:
        """Return a task, which is new if no agent has named it before."""
        return self._tasks.get(name) or self._tasks.setdefault(name, TaskIngress(name))

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

    def begin(self, task: TaskIngress, receive: Receive | None = None, again: int = 0) -> WaitingCall:
        """Number a call, unless it is one that an agent makes `again`; `end` must follow."""
        call = WaitingCall(task, again or next(self._numbers), receive, bool(again))
        task.waiting[call.number] = self._calls[call.number] = call
        return call

    def end(self, call: WaitingCall) -> None:
        """Note that a call is over. Idempotent."""
        call.is_over = True
        # The agent may be making it again.
        if self._calls.get(call.number) is call:
            call.task.waiting.pop(call.number, None)
            del self._calls[call.number]

    @contextmanager
    def calling(
        self, task: TaskIngress, receive: Receive | None, rollout: str = "", request: bytes = b"", begun: object = None
    ) -> Iterator[WaitingCall]:
        """Number a call, unless it is one that has `begun`. It is over at the end of the block.

        The same request of a rollout again, right after one that may have taken its step, is the same call: `request`
        is its digest.
        """
        digest, number = task.unanswered.get(rollout, (b"", 0))
        is_again = bool(request) and digest == request and number not in self._calls
        if isinstance(begun, WaitingCall):
            call, begun.receive = begun, receive
        elif is_again:
            call = self.begin(task, receive, number)
        else:
            task.unanswered.pop(rollout, None)
            call = self.begin(task, receive)
        try:
            yield call
            task.unanswered.pop(rollout, None)
        except RefusalError:
            if call.is_asked and rollout and request:
                task.unanswered[rollout] = request, call.number
                if len(task.unanswered) > MAX_UNANSWERED:
                    del task.unanswered[next(iter(task.unanswered))]
            raise
        finally:
            self.end(call)
