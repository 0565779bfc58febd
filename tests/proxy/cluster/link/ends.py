"""A member that answers questions over a real socket."""

from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager

from proxy.cluster.link.frames import Hello
from proxy.cluster.link.opener import LinkLostError
from proxy.cluster.link.server import Handler, LinkServer
from proxy.cluster.postgres.database import Peer
from proxy.cluster.postgres.joining import Membership

SECRET = b"the members' secret"
ASKER = Membership("cluster", 1, 7)
ANSWERER = Membership("cluster", 2, 3)


async def echo(hello: Hello, question: bytes, _begin: object = None) -> bytes:
    return b"%d.%d:%b" % (hello.member, hello.boot, question)


@asynccontextmanager
async def serving(handler: Handler, secret: bytes = SECRET) -> AsyncIterator[tuple[LinkServer, Peer]]:
    server = LinkServer(secret, ANSWERER, handler)
    port = await server.listen("127.0.0.1", 0)
    try:
        yield server, Peer(ANSWERER.number, ANSWERER.boot, "b", f"127.0.0.1:{port}", alive=True)
    finally:
        await server.aclose()


async def attempt(question: Awaitable[bytes]) -> bytes | LinkLostError | None:
    """Return the answer, or the error; None for a connection that was reset."""
    try:
        return await question
    except LinkLostError as error:
        return error
    except ConnectionError:
        return None
