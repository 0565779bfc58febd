"""Finds the owner of a call's task, and asks it, until one has answered."""

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from proxy.cluster.ingress import TaskIngress, WaitingCall
from proxy.cluster.link.channels import LinkChannel
from proxy.cluster.link.opener import LinkLostError, MemberFailedError
from proxy.cluster.member import Member
from proxy.cluster.messages import CallAnswer, CallQuestion
from proxy.cluster.owned import Owned
from proxy.cluster.postgres.connection import DatabaseError
from proxy.cluster.postgres.database import Ownership
from proxy.http.asgi import Scope
from proxy.refusals import RefusalError
from sandboxes.ipc.frames import MalformedFrameError

log = structlog.get_logger()

PATIENCE_S = 8.0
"""How long a request waits for an owner that can answer, in seconds, before it gets 503. A takeover takes a lease, 3 s.
A call that an owner works on has no such limit."""
PAUSE_S = 0.1
"""Between two attempts to find an owner, in seconds."""


class Forwarder:
    """Brings the calls of this member's agents to their owners."""

    def __init__(self, member: Member) -> None:
        self._member = member

    async def route(
        self,
        task: TaskIngress,
        call: WaitingCall,
        here: Callable[[Owned], Awaitable[bool]],
        away: Callable[[Ownership], Awaitable[bool]],
        *,
        creates: bool,
    ) -> bool:
        """Let the owner of a task answer a call.

        Args:
            task: The task.
            call: The call.
            here: Answers it if this member is the owner; returns whether it did.
            away: Lets another member answer it; returns whether that did.
            creates: Whether to become the owner of a task that never had one.

        Returns:
            Whether the task has an owner. A call whose agent has hung up counts as answered.

        Raises:
            RefusalError: 503, no owner could be found or reached for a while.
        """
        member, loop = self._member, asyncio.get_running_loop()
        trouble_since: float | None = None
        while trouble_since is None or loop.time() - trouble_since < PATIENCE_S:
            if trouble_since is not None:
                await asyncio.sleep(PAUSE_S)
                if not await call.waits():
                    return True
            trouble_since = trouble_since or loop.time()
            try:
                owner = await member.locate(task.name, creates=creates)
            except DatabaseError as error:
                log.debug("no owner", task=task.name, error=str(error))
                continue
            if owner is None:
                return False
            began, call.is_asked = loop.time(), True
            if await (here(owner) if isinstance(owner, Owned) else away(owner)):
                return True
            if loop.time() - began > PATIENCE_S:
                trouble_since = None
        raise RefusalError(
            503, "no-owner",
            f"no member of the cluster can answer for task {task.name!r} now, or this member cannot reach it. Try "
            "again.",
        )  # fmt: skip

    async def ask(
        self, owner: Ownership, task: TaskIngress, call: WaitingCall, scope: Scope, kind: str, body: bytes
    ) -> tuple[CallAnswer | None, LinkChannel | None]:
        """Ask the owner of a task; no answer if it did not take the call.

        Raises:
            RefusalError: 502, the owner has a defect.
        """
        # A stream is in none of the calls that may be sent again.
        question = CallQuestion(
            task.name, owner.view, call.number, task.oldest or call.number, call.is_again, scope.get("method", "GET"),
            scope["raw_path"].decode("latin-1"), scope["query_string"].decode("latin-1"),
            [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]],
            scope.get("scheme", "http"), kind, body,
        )  # fmt: skip
        try:
            answer, channel = await self._member.forward(owner, question)
        except MemberFailedError as error:
            raise RefusalError(502, "peer", str(error)) from error
        except (LinkLostError, MalformedFrameError) as error:
            log.debug("a call was not answered", owner=owner.peer.name, error=str(error))
            task.owner = None
            return None, None
        if isinstance(answer, CallAnswer):
            return answer, channel
        if answer.view:
            self._member.adopt(task.name, answer.view)
        task.owner = None
        return None, None
