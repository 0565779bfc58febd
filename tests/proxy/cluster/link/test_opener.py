"""The end that sends questions, over real sockets."""

import asyncio

import pytest

from proxy.cluster.link.frames import Hello
from proxy.cluster.link.links import Links
from proxy.cluster.link.opener import LinkLostError, MemberFailedError
from tests.proxy.cluster.link.ends import ASKER, SECRET, echo, serving


def test_a_defect_ends_one_question() -> None:
    """The link carries the calls of all agents."""

    async def run() -> None:
        async def handler(hello: Hello, question: bytes, _begin: object) -> bytes:
            if question == b"bad":
                raise ZeroDivisionError
            return await echo(hello, question)

        async with serving(handler) as (_, peer):
            asker = Links(SECRET, ASKER)
            with pytest.raises(MemberFailedError):
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
