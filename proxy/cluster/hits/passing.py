"""Calls of agents that the owner of their task may know the answer to: sent and answered without a task.

Theory of operation.

1. `begin` sends a whole request over the link in one frame, under a number like any other call. It does so only if the
   owner is known, the link is open, the URL and the host name were accepted before, and no earlier call of the rollout
   takes the regular way here.
2. The owner takes calls in the order of the link. If its tree knows the answer, that is one frame: this member keeps
   the position, and writes the response to the agent's connection.
3. Otherwise the owner answers later, as it answers any call. The connection declines the request to the application,
   which continues the call under its number (`PassedRequest.adopt`). It also does so if the link breaks, or if the
   answer comes from an owner that was replaced: then it asks the next owner, again under this number.
4. If the agent hangs up, the call is continued without it, so that its position is known here.
"""

import asyncio
from collections.abc import Awaitable, Callable

import structlog
from typing_extensions import override

from proxy.cluster.hits.calls import HeadCall, KnownAnswer
from proxy.cluster.ingress import TaskIngress, WaitingCall
from proxy.cluster.link.channels import LinkChannel
from proxy.cluster.link.opener import PendingCall
from proxy.cluster.member import Member
from proxy.dataplane.addressing import Addressing
from proxy.dataplane.passing import PassedRequest, Passing, WaitingConnection
from proxy.dataplane.request_reader import END_OF_HEAD
from proxy.http.access import GRANT, Access
from proxy.http.asgi import Scope
from proxy.refusals import RefusalError
from sandboxes.ipc.codec import decode_bytes, encode
from sandboxes.ipc.frames import MalformedFrameError
from sandboxes.task_owner import TaskOwner

log = structlog.get_logger()

Continue = Callable[["SentCall"], Awaitable[None]]
"""Continues a call whose agent has hung up."""


class SentCall(PassedRequest, PendingCall):
    """A call that its owner may know the answer to.

    Attributes:
        task: The task.
        call: Its number, and what an owner will answer that has it.
        scope: The request.
        body: Its body.
    """

    def __init__(
        self, sender: "CallPassing", task: TaskIngress, rollout: str, scope: Scope, body: bytes,
        connection: WaitingConnection,
    ) -> None:  # fmt: skip
        self._sender, self.task, self._rollout = sender, task, rollout
        self.scope, self.body = scope, body
        self._connection: WaitingConnection | None = connection
        self.call = sender.member.ingress.begin(task, None)
        self._is_regular = self._is_adopted = False

    # -- called by the connection ------------------------------------------------------------------------------------

    @override
    def lose(self) -> None:
        self.call.is_over, self._connection = True, None

    @override
    def release(self) -> None:
        if not self._is_adopted:
            self._sender.go_on(self)
        elif self._is_regular:
            self._is_regular = False
            self.task.end_regular(self._rollout)

    # -- called by the application -----------------------------------------------------------------------------------

    def adopt(self) -> WaitingCall:
        """Return the call, which the caller ends."""
        self._is_adopted = True
        return self.call

    # -- called by the link ------------------------------------------------------------------------------------------

    @override
    def known(self, content: bytes) -> None:
        try:
            answer = decode_bytes(content, KnownAnswer)
            is_accepted = self._sender.member.accept(self.task.name, answer.view, {answer.rollout: answer.position})
        except (MalformedFrameError, OSError) as error:
            # The application asks again under the same number, and reports what fails then.
            log.warning("an answer of a peer was not accepted", task=self.task.name, error=str(error))
            is_accepted = False
        if not is_accepted:
            self._decline()
            return
        self._sender.member.ingress.end(self.task, self.call)
        if self._connection is not None:
            self._connection.answered(answer.response)

    @override
    def later(self, answer: asyncio.Future[bytes | LinkChannel]) -> None:
        self.call.first = answer
        self._decline()

    @override
    def lost(self) -> None:
        self.task.owner = None
        self._decline()

    def _decline(self) -> None:
        """Let the application continue the call."""
        # Until it does, no later call of the rollout may be sent before this one.
        self._is_regular = True
        self.task.begin_regular(self._rollout)
        if self._connection is None:
            self._sender.go_on(self)
        else:
            self._connection.declined()


class CallPassing(Passing):
    """Sends the calls of this member's agents to the owners of their tasks.

    Attributes:
        member: This member.
    """

    def __init__(
        self, member: Member, access: Access, addressing: Addressing, apis: frozenset[str], max_body_bytes: int,
        continued: Continue,
    ) -> None:  # fmt: skip
        """Pass calls on for a member.

        Args:
            member: The member.
            access: Authorises requests.
            addressing: Remembers the URLs and host names that were accepted.
            apis: Names of endpoints that are whole APIs; their requests take the regular way.
            max_body_bytes: Most bytes of a body.
            continued: Continues a call whose agent has hung up.
        """
        self.member, self._access, self._addressing, self._apis = member, access, addressing, apis
        self._max_body_bytes, self._continued = max_body_bytes, continued
        self._tasks = TaskOwner()

    @override
    def begin(
        self, scope: Scope, request: bytes, body: bytes | bytearray, connection: WaitingConnection
    ) -> SentCall | None:
        address = self._addressing.remembered(scope)
        if address is None or not address.rollout or address.endpoint in self._apis:
            return None
        task = self.member.ingress.known(address.task)
        if task is None or task.owner is None or address.rollout in task.regular:
            return None
        link = self.member.link_to(task.owner)
        # Clients may send blank lines between requests (RFC 9112, 2.2).
        head, end, _ = request.lstrip(b"\r\n").partition(END_OF_HEAD)
        # `DataPlane.known` has admitted the request, unless it has the token of a rollout that is not known here.
        is_admitted = GRANT in scope or self._admits(scope)
        if link is None or not end or len(body) > self._max_body_bytes or not is_admitted:
            return None
        passed = SentCall(self, task, address.rollout, scope, bytes(body), connection)
        call = HeadCall(
            task.name, task.owner.view, passed.call.number, task.oldest, head, scope["scheme"] == "https", passed.body
        )
        link.ask_at_once(encode(call), passed)
        return passed

    def expect(self, scope: Scope) -> "RegularCall | None":
        """Note a request that takes the regular way, as `HitPath.expect` does; None if its URL is not known."""
        address = self._addressing.remembered(scope)
        if address is None or address.endpoint in self._apis:
            return None
        return RegularCall(self.member.ingress.task(address.task), address.rollout)

    def go_on(self, passed: SentCall) -> None:
        """Continue a call whose agent has hung up."""
        self._tasks.spawn("call without an agent", self._go_on(passed))

    async def _go_on(self, passed: SentCall) -> None:
        passed.adopt()
        try:
            await self._continued(passed)
        except RefusalError as refusal:
            log.debug("a call without an agent was refused", task=passed.task.name, error=str(refusal))
        finally:
            passed.release()

    def _admits(self, scope: Scope) -> bool:
        try:
            self._access.admit({**scope, "headers": list(scope["headers"])}, rollout_named_by(scope))
        except RefusalError:
            return False
        return True


class RegularCall:
    """A request that was read, and takes the regular way until `end`."""

    def __init__(self, task: TaskIngress, rollout: str) -> None:
        self._task, self._rollout = task, rollout
        task.begin_regular(rollout)

    def end(self) -> None:
        """Note that the request was handled."""
        self._task.end_regular(self._rollout)


def rollout_named_by(scope: Scope) -> Callable[[str], tuple[str, str] | None]:
    """Return the look-up of rollouts' tokens at an ingress: the names in the path, because only the owner knows."""

    def named(text: str) -> tuple[str, str] | None:
        parts = scope["path"].split("/")
        if text.startswith("fp_") and len(parts) > 4 and parts[1] == "t" and parts[3] == "r":
            return parts[2], parts[4]
        return None

    return named
