"""What people do with a cluster: show its members, and drain one."""

import asyncio
import re
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

from proxy.cluster.member import Member
from proxy.cluster.messages import DrainAnswer, DrainQuestion, RoomAnswer, RoomQuestion
from proxy.cluster.postgres.database import Peer
from proxy.refusals import RefusalError

PATHS = re.compile(r"/api/v1/cluster(?:/([^/]+)/drain)?")
"""The cluster itself: its members, and the drain of one."""


class Operations:
    """Answers requests about the cluster."""

    def __init__(self, member: Member, room: Callable[[], RoomAnswer]) -> None:
        """Answer for a member.

        Args:
            member: The member.
            room: Returns the room of the member for sandboxes of others.
        """
        self._member, self._room = member, room

    async def answer(self, method: str, path: str) -> dict[str, Any]:
        """Answer a request that `PATHS` matches, with what is sent as JSON.

        Raises:
            RefusalError: Another method, or see `_drain`.
            DatabaseError: The database does not answer.
        """
        match = PATHS.fullmatch(path)
        node = None if match is None else match[1]
        if method != ("GET" if node is None else "POST"):
            raise RefusalError(405, "method", "GET shows the cluster, and POST drains a member.")
        return await (self._members() if node is None else self._drain(unquote(node)))

    async def _members(self) -> dict[str, Any]:
        """Return the members of the cluster, as the database knows them."""
        own, known = self._member.database.membership, await self._member.database.members()
        rooms = await asyncio.gather(*(self._room_of(peer) for peer, _ in known))
        return {
            "cluster": own.cluster,
            "members": [
                {
                    "name": peer.name, "number": peer.number, "link": peer.url, "alive": peer.alive, "tasks": tasks,
                    "sandboxes": None if room is None else room._asdict(),
                }
                for (peer, tasks), room in zip(known, rooms, strict=True)
            ],
        }  # fmt: skip

    async def _room_of(self, peer: Peer) -> RoomAnswer | None:
        """Return what a member says of its sandboxes; None if it does not answer."""
        if peer.number == self._member.number:
            return self._room()
        answer = await self._member.ask(peer.number, RoomQuestion()) if peer.alive else None
        return answer if isinstance(answer, RoomAnswer) else None

    async def _drain(self, node: str) -> dict[str, Any]:
        """Let a member hand over its tasks.

        Raises:
            RefusalError: 404 or 409 for a member that is not there or has no other member beside it, 503 for one that
                does not answer.
        """
        alive = [peer for peer, _ in await self._member.database.members() if peer.alive]
        chosen = next((peer for peer in alive if peer.name == node), None)
        if chosen is None:
            raise RefusalError(404, "no-such-member", f"no member named {node!r} is running.")
        if len(alive) < 2:
            raise RefusalError(409, "last-member", f"no other member could take over the tasks of {node!r}.")
        own = chosen.number == self._member.number
        answer = await self._member.drain() if own else await self._member.ask(chosen.number, DrainQuestion())
        if not isinstance(answer, DrainAnswer):
            raise RefusalError(503, "member", f"member {node!r} does not answer. Try again.")
        return {"name": node, "handed": answer.handed, "kept": answer.kept}
