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
_OF_ONE = frozenset({"/metrics", "/readyz", "/api/v1/backup"})
"""What is about one member, or whole at each of them."""


class OtherMembers:
    """Implements `proxy.dataplane.app.OtherProxies`."""

    def __init__(self, member: Member, authorise: Callable[[Scope], RefusalError | None]) -> None:
        """Answer for a member. `authorise` returns why a request may see nothing."""
        self._member, self._authorise = member, authorise
        self._peers: dict[int, Peer] = {}

    def answers(self, scope: Scope) -> bool:
        """Return whether members have parts of the response to a request of an agent."""
        return PEER not in scope.get("state", {}) and scope["path"] not in _OF_ONE

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
        for task in await self._member.database.tasks(ownerless=True):
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
