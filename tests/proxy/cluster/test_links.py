"""Links between members, over real sockets."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from proxy.cluster import links as module
from proxy.cluster.channels import Channel
from proxy.cluster.database import Membership, Peer
from proxy.cluster.frames import HELLO_BYTES, Hello
from proxy.cluster.links import Handler, LinkLostError, Links, LinkServer, PeerFailedError, Taker, answered

SECRET = b"the members' secret"
ASKER = Membership("cluster", 1, 7)
ANSWERER = Membership("cluster", 2, 3)


async def echo(hello: Hello, question: bytes, _begin: object = None) -> bytes:
    return b"%d.%d:%b" % (hello.member, hello.boot, question)


def no_calls(_hello: Hello, _call: bytes, _begin: object) -> bytes:
    raise AssertionError


@asynccontextmanager
async def serving(
    handler: Handler, secret: bytes = SECRET, taker: Taker = no_calls
) -> AsyncIterator[tuple[LinkServer, Peer]]:
    server = LinkServer(secret, ANSWERER, handler, taker)
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


def test_one_link_carries_many_questions() -> None:
    """Answers come in the order in which they are ready, not in which they were asked."""

    async def run() -> None:
        first_waits = asyncio.Event()
        connections = set()

        async def handler(hello: Hello, question: bytes, _begin: object) -> bytes:
            connections.add(hello.link)
            if question == b"0":
                await first_waits.wait()
            return await echo(hello, question)

        async with serving(handler) as (_, peer):
            asker = Links(SECRET, ASKER)
            first = asyncio.ensure_future(asker.ask(peer, b"0"))
            others = await asyncio.gather(*(asker.ask(peer, b"%d" % n) for n in range(1, 200)))
            assert others == [b"1.7:%d" % n for n in range(1, 200)]
            assert not first.done()
            first_waits.set()
            assert await first == b"1.7:0"
            assert connections == {1}
            asker.close()

    asyncio.run(run())


def test_large_messages_pass() -> None:
    """They are larger than what a socket takes at once."""

    async def run() -> None:
        async with serving(echo) as (_, peer):
            asker = Links(SECRET, ASKER)
            question = bytes(range(256)) * 40_000
            assert await asker.ask(peer, question) == b"1.7:" + question
            asker.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("asks_with", "answers_with"), [(b"wrong", SECRET), (SECRET, b"wrong")], ids=["asker", "answerer"]
)
def test_a_wrong_secret_ends_the_link(asks_with: bytes, answers_with: bytes) -> None:
    """Neither end trusts the other without a proof."""

    async def run() -> None:
        async with serving(echo, answers_with) as (_, peer):
            asker = Links(asks_with, ASKER)
            with pytest.raises(LinkLostError):
                await asker.ask(peer, b"x")
            asker.close()

    asyncio.run(run())


def test_another_member_is_not_asked() -> None:
    """A member that starts anew at the address of an earlier one does not answer for it."""

    async def run() -> None:
        async with serving(echo) as (_, peer):
            asker = Links(SECRET, ASKER)
            with pytest.raises(LinkLostError):
                await asker.ask(peer._replace(boot=peer.boot + 1), b"x")
            asker.close()

    asyncio.run(run())


def test_a_defect_ends_one_question() -> None:
    """The link carries the calls of all agents."""

    async def run() -> None:
        async def handler(hello: Hello, question: bytes, _begin: object) -> bytes:
            if question == b"bad":
                raise ZeroDivisionError
            return await echo(hello, question)

        async with serving(handler) as (_, peer):
            asker = Links(SECRET, ASKER)
            with pytest.raises(PeerFailedError):
                await asker.ask(peer, b"bad")
            assert await asker.ask(peer, b"good") == b"1.7:good"
            asker.close()

    asyncio.run(run())


def test_a_broken_link_fails_its_questions() -> None:
    """The next question opens another one."""

    async def run() -> None:
        taken, release = asyncio.Event(), asyncio.Event()

        async def handler(hello: Hello, question: bytes, _begin: object) -> bytes:
            if hello.link == 1:
                taken.set()
                await release.wait()
            return await echo(hello, question)

        async with serving(handler) as (_, peer):
            asker = Links(SECRET, ASKER)
            question = asyncio.ensure_future(asker.ask(peer, b"x"))
            await taken.wait()
            asker.close()
            with pytest.raises(LinkLostError):
                await question
            assert await asker.ask(peer, b"y") == b"1.7:y"
            release.set()
            asker.close()

    asyncio.run(run())


def test_a_newer_link_ends_the_older() -> None:
    """What the older one still brings was sent before."""

    async def run() -> None:
        async with serving(echo) as (_, peer):
            older, newer = Links(SECRET, ASKER), Links(SECRET, ASKER._replace(boot=8))
            assert await older.ask(peer, b"x") == b"1.7:x"
            assert await newer.ask(peer, b"x") == b"1.8:x"
            # The first attempt may find its link still open; a new one is refused.
            outcomes = [await attempt(older.ask(peer, b"y")) for _ in range(2)]
            assert isinstance(outcomes[-1], LinkLostError)
            assert await newer.ask(peer, b"z") == b"1.8:z"
            older.close()
            newer.close()

    asyncio.run(run())


def test_a_silent_peer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its machine may be gone, and then no packet says so."""
    monkeypatch.setattr(module, "SILENT_S", 0.5)
    monkeypatch.setattr(module, "PING_S", 0.05)

    async def run() -> None:
        async with serving(echo) as (_, peer):
            # A relay that stops to pass anything on.
            target, quiet = peer.url.rpartition(":"), asyncio.Event()

            async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
                while data := await source.read(65536):
                    if not quiet.is_set():
                        sink.write(data)

            async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                their_reader, their_writer = await asyncio.open_connection(target[0], int(target[2]))
                try:
                    await asyncio.gather(copy(reader, their_writer), copy(their_reader, writer))
                except OSError:
                    pass
                finally:
                    writer.close()
                    their_writer.close()

            between = await asyncio.start_server(relay, "127.0.0.1", 0)
            port = between.sockets[0].getsockname()[1]
            asker = Links(SECRET, ASKER)
            far = peer._replace(url=f"127.0.0.1:{port}")
            # On a busy machine the first links may seem silent too.
            while await attempt(asker.ask(far, b"x")) != b"1.7:x":
                pass
            quiet.set()
            with pytest.raises(LinkLostError):
                await asker.ask(far, b"y")
            between.close()

    asyncio.run(run())


def test_unproven_connections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody without the secret can take the room of members."""
    monkeypatch.setattr(module, "MAX_UNPROVEN", 2)

    async def run() -> None:
        async with serving(echo) as (_, peer):
            host, _, port = peer.url.rpartition(":")
            asker = Links(SECRET, ASKER)
            assert await asker.ask(peer, b"x") == b"1.7:x"
            held = [await asyncio.open_connection(host, int(port)) for _ in range(2)]
            for _, writer in held:
                writer.write(Hello(9, 9, 9, b"n" * 32).pack())
            for reader, _ in held:
                assert len(await reader.readexactly(HELLO_BYTES)) == HELLO_BYTES
            refused, sink = await asyncio.open_connection(host, int(port))
            # Closed, with or without a word.
            assert await attempt(refused.read()) in (b"", None)
            assert await asker.ask(peer, b"y") == b"1.7:y"
            for _, writer in [*held, (refused, sink)]:
                writer.close()
            asker.close()

    asyncio.run(run())


class Call:
    """A call that is asked at once, and what became of it."""

    def __init__(self) -> None:
        self.over: asyncio.Future[bytes | str] = asyncio.get_running_loop().create_future()
        self.answer: asyncio.Future[bytes | Channel] | None = None

    def known(self, content: bytes) -> None:
        self.over.set_result(content)

    def later(self, answer: asyncio.Future[bytes | Channel]) -> None:
        self.answer = answer
        self.over.set_result("later")

    def lost(self) -> None:
        self.over.set_result("lost")


def test_known_calls_are_answered_at_once() -> None:
    """Others are answered later; one with a defect fails, and the link carries on."""

    async def run() -> None:
        def take(hello: Hello, call: bytes, _begin: object) -> bytes | Coroutine[Any, Any, bytes]:
            if call == b"bad":
                raise ZeroDivisionError
            return call.upper() if call == b"known" else echo(hello, call)

        async with serving(echo, taker=take) as (_, peer):
            asker = Links(SECRET, ASKER)
            assert asker.ready(peer) is None
            assert await asker.ask(peer, b"x") == b"1.7:x"
            link = asker.ready(peer)
            assert link is not None
            calls = {content: Call() for content in (b"new", b"known", b"bad")}
            for content, call in calls.items():
                link.ask_at_once(content, call)
            assert [await call.over for call in calls.values()] == ["later", b"KNOWN", "later"]
            new, bad = calls[b"new"].answer, calls[b"bad"].answer
            assert new is not None
            assert await answered(new) == b"1.7:new"
            assert bad is not None
            with pytest.raises(PeerFailedError):
                await answered(bad)
            lost = Call()
            link.ask_at_once(b"known", lost)
            asker.close()
            assert await lost.over == "lost"
            assert asker.ready(peer) is None

    asyncio.run(run())
