"""The end that sends questions, over real sockets."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from proxy.cluster.link.channels import LinkChannel
from proxy.cluster.link.frames import Hello
from proxy.cluster.link.links import Links
from proxy.cluster.link.opener import LinkLostError, MemberFailedError, answered
from tests.proxy.cluster.link.ends import ASKER, SECRET, echo, serving


class Call:
    """A call that is asked at once, and what became of it."""

    def __init__(self) -> None:
        self.over: asyncio.Future[bytes | str] = asyncio.get_running_loop().create_future()
        self.answer: asyncio.Future[bytes | LinkChannel] | None = None

    def known(self, content: bytes) -> None:
        self.over.set_result(content)

    def later(self, answer: asyncio.Future[bytes | LinkChannel]) -> None:
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
            with pytest.raises(MemberFailedError):
                await answered(bad)
            lost = Call()
            link.ask_at_once(b"known", lost)
            asker.close()
            assert await lost.over == "lost"
            assert asker.ready(peer) is None

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
