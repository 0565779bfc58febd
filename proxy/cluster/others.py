"""What all members of a cluster answer together: each has a part of it, and the one that is asked joins the parts."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import structlog

from proxy.cluster.link.passing import PEER, PeerLostError
from proxy.cluster.member import Member
from proxy.cluster.postgres.connection import DatabaseError
from proxy.http.asgi import Scope
from proxy.http.passed_head import head_of
from proxy.refusals import RefusalError
from sandboxes.errors import SpecError
from sandboxes.listener import Listener

if TYPE_CHECKING:
    from proxy.cluster.postgres.database import Peer

log = structlog.get_logger()

_ALL_TASKS = frozenset({"/api/v1/trajectories", "/api/v1/report", "/api/v1/tasks"})
"""What must have all tasks, those too whose owners have died."""


class OtherMembers:
    """Implements `proxy.dataplane.app.OtherProxies`."""

    paths: frozenset[str] | None = frozenset({
        *_ALL_TASKS, "/api/v1/snapshots", "/api/v1/sandboxes", "/api/v1/stats", "/api/v1/videos",
        "/api/v1/gc", "/api/v1/timeline", "/api/v1/system/history", "/api/v1/system/wrong-answers",
        "/api/v1/system/warnings", "/api/v1/system/changes",
    })  # fmt: skip
    """Paths of what is the sum of the members' parts."""

    def __init__(self, member: Member, authorise: Callable[[Scope], RefusalError | None]) -> None:
        """Answer for a member. `authorise` returns why a request may see nothing."""
        self._member, self._authorise = member, authorise
        self._peers: dict[int, Peer] = {}

    def is_part(self, scope: Scope) -> bool:
        """Return whether a member has sent a request, this one too."""
        return PEER in scope.get("state", {})

    async def numbers(self, scope: Scope) -> list[int]:
        """Return the members that run. This one takes tasks over whose owners have died, if all tasks are wanted."""
        refusal = self._authorise({**scope, "headers": list(scope["headers"])})
        if refusal is not None:
            raise refusal
        try:
            if scope["path"] in _ALL_TASKS:
                await self._take_over()
            self._peers = {peer.number: peer for peer, _ in await self._member.database.members() if peer.alive}
        except DatabaseError as error:
            raise RefusalError(503, "database", f"{error}. Try again.") from error
        return sorted(self._peers)

    async def _take_over(self) -> None:
        """Become the owner of all tasks whose owners have died. Raises DatabaseError."""
        for task in await self._member.database.ownerless():
            # Calls that went to the owner may have left it there.
            self._member.ingress.task(task).owner = None
            try:
                await self._member.locate(task, creates=False)
            except SpecError as error:
                log.warning(
                    "a task is left out, because its environment cannot be opened here", task=task, error=str(error)
                )

    async def request(self, number: int, scope: Scope, listener: Listener) -> None:
        """See `OtherProxies.request`."""
        try:
            await self._member.passing.request(self._peers[number], head_of(scope, 0), b"", listener)
        except PeerLostError as error:
            raise RefusalError(503, "member", f"{error}. Try again.") from error
