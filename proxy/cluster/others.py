"""What all members of a cluster answer together: each has a part of it, and the one that is asked joins the parts."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from proxy.cluster.forwarding import Relay
from proxy.cluster.link.passing import PEER, PeerLostError, head_of
from proxy.cluster.member import Member
from proxy.cluster.postgres.connection import DatabaseError
from proxy.http.asgi import AsgiApp, Receive, Scope, Send
from proxy.http.problems import problem_of
from proxy.http.responses import send_problem
from proxy.refusals import RefusalError

if TYPE_CHECKING:
    from proxy.cluster.postgres.database import Peer

_ALL_TASKS = "/api/v1/trajectories"
"""What must have all tasks, those too whose owners have died."""


class OtherMembers:
    """Implements `proxy.dataplane.app.OtherProxies`."""

    paths = frozenset({
        _ALL_TASKS, "/api/v1/tasks", "/api/v1/snapshots", "/api/v1/sandboxes", "/api/v1/stats", "/api/v1/videos",
        "/api/v1/gc", "/api/v1/timeline", "/api/v1/system/history", "/api/v1/system/wrong-answers",
        "/api/v1/system/warnings",
    })  # fmt: skip
    """Paths of what is the sum of the members' parts. The report is not: two owners of a rollout both count it."""

    def __init__(self, member: Member, authorise: Callable[[Scope], RefusalError | None]) -> None:
        """Answer for a member. `authorise` returns why a request may see nothing."""
        self._member, self._authorise, self.number = member, authorise, member.number
        self._peers: dict[int, Peer] = {}

    def is_peers(self, scope: Scope) -> bool:
        """Return whether a request comes from another member."""
        return PEER in scope.get("state", {})

    async def numbers(self, scope: Scope) -> list[int]:
        """Return the members that run. This one takes tasks over whose owners have died, if all tasks are wanted."""
        refusal = self._authorise({**scope, "headers": list(scope["headers"])})
        if refusal is not None:
            raise refusal
        try:
            if scope["path"] == _ALL_TASKS:
                for task in await self._member.database.ownerless():
                    await self._member.locate(task, creates=False)
            self._peers = {peer.number: peer for peer, _ in await self._member.database.members() if peer.alive}
        except DatabaseError as error:
            raise RefusalError(503, "database", f"{error}. Try again.") from error
        return sorted(self._peers)

    def application(self, number: int) -> AsgiApp:
        """Return an application that lets a member answer; 503 if it does not."""
        peer = self._peers[number]

        async def passing(scope: Scope, receive: Receive, send: Send) -> None:
            relay = Relay(send)
            try:
                await self._member.passing.request(peer, head_of(scope, None, 0), b"", relay)
            except PeerLostError as error:
                if relay.begun.is_set():
                    raise
                refusal = RefusalError(503, "member", f"{error}. Try again.")
                await send_problem(scope, receive, send, problem_of(refusal))
                return
            await relay.end()

        return passing
