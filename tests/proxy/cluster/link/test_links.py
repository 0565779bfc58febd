"""Links between members, over real sockets."""

import asyncio

import pytest

from proxy.cluster.link.frames import Hello
from proxy.cluster.link.links import Links
from proxy.cluster.link.opener import LinkLostError
from tests.proxy.cluster.link.ends import ASKER, SECRET, echo, serving


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
