"""The link to a supervisor: one that stays silent, or ends, is dead to all who wait for it."""

import asyncio
import socket
from collections.abc import Awaitable, Callable

import pytest

from sandboxes.errors import SandboxError
from sandboxes.host.guest_link import GuestLink
from sandboxes.ipc.channel import Channel
from sandboxes.ipc.codec import pack_message
from sandboxes.ipc.messages import DescribeState, Done


def linked(test: Callable[[GuestLink, socket.socket, list[str]], Awaitable[None]]) -> None:
    async def go() -> None:
        ours, theirs = socket.socketpair()
        killed: list[str] = []
        link = GuestLink("box", Channel(ours), lambda: killed.append("killed"))
        with theirs:
            await test(link, theirs, killed)
            link.close()

    asyncio.run(go())


def test_a_silent_supervisor_is_given_up() -> None:
    """All that wait for it get the reason, its processes are killed, and no later request is sent."""

    async def test(link: GuestLink, _theirs: socket.socket, killed: list[str]) -> None:
        patient = asyncio.ensure_future(link.next(Done))
        with pytest.raises(SandboxError, match="box died: it gave no answer within 0 s"):
            await link.ask(DescribeState(), within_s=0.001)
        with pytest.raises(SandboxError, match="no answer"):
            await patient
        assert killed
        assert not link.alive
        with pytest.raises(SandboxError, match="it gave no answer in time"):
            await link.ask(DescribeState())

    linked(test)


def test_an_answer_in_time_leaves_the_link_open() -> None:
    async def test(link: GuestLink, theirs: socket.socket, killed: list[str]) -> None:
        theirs.sendall(pack_message(Done()))
        assert isinstance((await link.next(Done)).message, Done)
        assert link.alive
        assert not killed

    linked(test)


def test_the_end_of_a_supervisor_is_noticed() -> None:
    async def test(link: GuestLink, theirs: socket.socket, killed: list[str]) -> None:
        waiting = asyncio.ensure_future(link.next(Done))
        await asyncio.sleep(0)
        theirs.close()
        with pytest.raises(SandboxError, match="box died: it ended"):
            await waiting
        assert killed
        assert not link.alive

    linked(test)
