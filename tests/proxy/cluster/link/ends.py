"""A member that accepts peers over a real socket."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from proxy.cluster.link.greeting import Hello
from proxy.cluster.link.listener import PeerListener
from proxy.cluster.postgres.database import Peer
from proxy.cluster.postgres.joining import Membership

SECRET = b"the members' secret"
ASKER = Membership("cluster", 1, 7)
ANSWERER = Membership("cluster", 2, 3)


@asynccontextmanager
async def accepting(make_http: Callable[[Hello], asyncio.Protocol] | None) -> AsyncIterator[Peer]:
    """Accept peers, and yield how they reach this member."""
    listener, end = PeerListener(SECRET, ANSWERER), socket.create_server(("127.0.0.1", 0))
    listener.make_http = make_http
    await listener.serve(end)
    try:
        yield Peer(ANSWERER.number, ANSWERER.boot, "b", f"127.0.0.1:{end.getsockname()[1]}", alive=True)
    finally:
        listener.close()
