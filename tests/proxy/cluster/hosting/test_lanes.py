"""Messages of a host go to their lanes, whoever reads first."""

import asyncio
from collections import deque

from proxy.cluster.hosting.lanes import MAX_WAITING, Lane, split
from proxy.cluster.hosting.messages import Conversation, HostingError, Rested, SmallUnit
from proxy.cluster.link.channels import LinkChannel
from sandboxes.ipc.codec import Envelope, IpcMessage
from sandboxes.task_owner import start


class Host(Conversation):
    """A conversation whose messages are known in advance. taken: how many of them were received."""

    def __init__(self, messages: list[IpcMessage], *, is_malformed: bool = False) -> None:
        async def drain() -> None: ...

        super().__init__(LinkChannel(1, lambda *_: None, drain, lambda: None), lambda: NotImplemented)
        self._messages, self._is_malformed, self.taken = deque(messages), is_malformed, 0

    async def receive(self) -> Envelope[IpcMessage] | None:
        if not self._messages:
            if self._is_malformed:
                raise HostingError("no message")
            return None
        self.taken += 1
        return Envelope(self._messages.popleft(), b"", [])


def test_each_lane_has_its_own_messages() -> None:
    async def test() -> None:
        host = Host([Rested(), SmallUnit("a"), Rested(), SmallUnit("b")])
        answers, units = Lane(host), Lane(host)
        splitting = start(split(host, answers, units))
        async with asyncio.timeout(30):
            assert [(await units.expect(SmallUnit)).message for _ in "ab"] == [SmallUnit("a"), SmallUnit("b")]
            assert [(await answers.expect(Rested)).message for _ in "ab"] == [Rested(), Rested()]
            assert (await answers.receive(), await units.receive()) == (None, None)
            await splitting

    asyncio.run(test())


def test_lane_that_nobody_reads_holds_up_the_host() -> None:
    """Until it is ended: then its messages are of no interest."""

    async def test() -> None:
        host = Host([Rested()] * 100)
        answers, units = Lane(host), Lane(host)
        splitting = start(split(host, answers, units))
        for _ in range(1000):
            await asyncio.sleep(0)
        assert host.taken == MAX_WAITING + 1
        answers.end()
        async with asyncio.timeout(30):
            await splitting
            assert await units.receive() is None

    asyncio.run(test())


def test_what_is_no_message_ends_both_lanes() -> None:
    async def test() -> None:
        host = Host([Rested()], is_malformed=True)
        answers, units = Lane(host), Lane(host)
        async with asyncio.timeout(30):
            await split(host, answers, units)
            assert (await answers.expect(Rested)).message == Rested()
            assert (await answers.receive(), await units.receive()) == (None, None)

    asyncio.run(test())
