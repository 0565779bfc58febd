"""Links between members: one TCP connection to each peer carries all questions to it, answered in any order.

An answer may be a stream, which goes on in both directions (`channels`).

A question has no time limit: tools may run for hours. A link that is silent for `SILENT_S` is dead, and so is one that
breaks. Its questions then fail with `LinkLostError`, and it is unknown whether they were taken: the asker sends them
again, under the same numbers, to the member that answers them now.

A peer's newer link ends its older one. What the older one still brings was sent before, and is not taken.
"""

import asyncio
import secrets

from proxy.cluster.link.channels import LinkChannel
from proxy.cluster.link.connection import SILENT_S
from proxy.cluster.link.frames import NONCE_BYTES, Hello
from proxy.cluster.link.opener import Link, LinkLostError, MemberFailedError
from proxy.cluster.postgres.database import Peer
from proxy.cluster.postgres.joining import Membership


class Links:
    """The links that this member has opened, one to each peer."""

    def __init__(self, secret: bytes, membership: Membership) -> None:
        self._secret, self._membership = secret, membership
        self._links: dict[int, Link] = {}
        self._opening: dict[int, asyncio.Lock] = {}
        self._opened = 0

    async def ask(self, peer: Peer, question: bytes) -> bytes:
        """Ask a peer; the link is opened if there is none.

        Raises:
            LinkLostError: The peer cannot be reached, or the link broke.
            MemberFailedError: The peer met a defect.
        """
        answer = await self.call(peer, question)
        if isinstance(answer, LinkChannel):
            answer.close()
            raise MemberFailedError(f"member {peer.name!r} has answered with a stream")
        return answer

    async def call(self, peer: Peer, question: bytes) -> bytes | LinkChannel:
        """Ask a peer as `ask` does; it may begin a channel, which the caller closes.

        Raises:
            LinkLostError, MemberFailedError: See `ask`.
        """
        return await (await self._to(peer)).ask(question)

    async def _to(self, peer: Peer) -> Link:
        link = self._links.get(peer.number)
        if link is not None and link.is_open:
            return link
        async with self._opening.setdefault(peer.number, asyncio.Lock()):
            link = self._links.get(peer.number)
            if link is None or not link.is_open:
                link = self._links[peer.number] = await self._open(peer)
            return link

    async def _open(self, peer: Peer) -> Link:
        self._opened += 1
        member = self._membership
        hello = Hello(member.number, member.boot, self._opened, secrets.token_bytes(NONCE_BYTES))
        host, _, port = peer.url.rpartition(":")
        link = Link(self._secret, member.cluster, hello, peer)
        try:
            async with asyncio.timeout(SILENT_S):
                await asyncio.get_running_loop().create_connection(lambda: link, host.strip("[]"), int(port))
                await link.opened
        except (OSError, TimeoutError, LinkLostError) as error:
            if hasattr(link, "_transport"):
                link.abort()
            raise LinkLostError(f"member {peer.name!r} cannot be reached at {peer.url}") from error
        return link

    def close(self) -> None:
        """Close all links. Open questions fail with `LinkLostError`."""
        for link in self._links.values():
            link.abort()
