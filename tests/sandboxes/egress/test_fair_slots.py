"""No sandbox and no environment can keep others from what all share, with hostile names and hosts."""

import asyncio
import socket
import threading
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandboxes.egress import dialing
from sandboxes.egress.dialing import Dialer, resolve
from sandboxes.egress.fair_slots import FairSlots, Requester
from sandboxes.egress.fetching import HostFetcher
from sandboxes.egress.outlet import Outlet
from sandboxes.egress.recordings import RecordedResponse, Recordings
from tests.sandboxes.egress.origin import ADDRESS, Origin, response

GREEDY, NEIGHBOUR, OTHER = Requester("g", "one"), Requester("n", "one"), Requester("o", "two")
REQUESTERS = (GREEDY, NEIGHBOUR, OTHER, Requester("p", "three"))


def held_by_greed(count: int, *greedy: Requester) -> tuple[FairSlots, Counter[Requester]]:
    """Return slots of which the greedy take what they get, and how many each got."""
    slots, held = FairSlots(count), Counter[Requester]()

    async def go() -> None:
        for requester in greedy * count:
            taking = asyncio.ensure_future(slots.take(requester))
            await asyncio.sleep(0)
            if not taking.done():
                taking.cancel()
                await asyncio.gather(taking, return_exceptions=True)
            else:
                held[requester] += 1

    asyncio.run(go())
    return slots, held


def test_nobody_gets_the_last_slots() -> None:
    slots, held = held_by_greed(64, GREEDY)
    assert held[GREEDY] == 22
    for requester in (NEIGHBOUR, OTHER):
        asyncio.run(asyncio.wait_for(slots.take(requester), 30))
    _, held = held_by_greed(64, *(Requester(str(number), "one") for number in range(50)))
    assert held.total() == 32


@given(st.lists(st.tuples(st.sampled_from(REQUESTERS), st.booleans()), max_size=60))
def test_every_request_gets_its_turn(steps: list[tuple[Requester, bool]]) -> None:
    """Whatever the order, slots are never more than there are, and all who wait get one in the end."""

    async def go() -> None:
        slots, running = FairSlots(8), list[tuple[Requester, asyncio.Task[None]]]()
        for requester, takes in steps:
            if takes:
                running.append((requester, asyncio.ensure_future(slots.take(requester))))
            elif running and not running[0][1].done():
                running.pop(0)[1].cancel()
            await asyncio.sleep(0)
            assert sum(task.done() for _, task in running) <= 8
        while running:
            ready = [entry for entry in running if entry[1].done()]
            assert ready, "nobody can go on"
            for entry in ready:
                running.remove(entry)
                slots.give_back(entry[0])
            await asyncio.sleep(0)

    asyncio.run(go())


@asynccontextmanager
async def outlets(recordings: Recordings, dialer: Dialer) -> AsyncIterator[tuple[tuple[str, int], tuple[str, int]]]:
    """Yield the addresses of the outlets of two sandboxes of one environment."""
    fetcher = HostFetcher(dialer, recordings)
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    made = [
        Outlet(listener, ("*.example.org",), requester, fetcher, dialer)
        for listener, requester in zip(listeners, (GREEDY, NEIGHBOUR), strict=True)
    ]
    serving = [asyncio.ensure_future(outlet.serve()) for outlet in made]
    try:
        yield listeners[0].getsockname(), listeners[1].getsockname()
    finally:
        for task in serving:
            task.cancel()
        await asyncio.wait(serving)
        for outlet in made:
            await outlet.close()


async def send(address: tuple[str, int], request: str) -> bytes:
    reader, writer = await asyncio.open_connection(*address)
    writer.write(f"{request} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
    try:
        return await reader.read()
    finally:
        writer.close()


def test_slow_names_of_one_sandbox_keep_nobody_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release, asked, slow = threading.Event(), threading.Event(), list[str]()

    def look_up(name: str, *_: object, **__: object) -> list[tuple[object, ...]]:
        if name.startswith("slow"):
            slow.append(name)
            # Without shares, these were all threads.
            if len(slow) >= 16:
                asked.set()
            release.wait(30)
        return [(0, 0, 0, "", (ADDRESS, 0))]

    async def go() -> None:
        origin = Origin(lambda _: response(b"answer"))

        async def connect(_address: str, _port: int) -> socket.socket:
            return await dialing.connect("127.0.0.1", origin.port)

        dialer = Dialer(resolve, connect)
        async with origin.running(), asyncio.timeout(60), outlets(Recordings(tmp_path), dialer) as (greedy, other):
            asking = [asyncio.ensure_future(send(greedy, f"CONNECT slow{n}.example.org:443")) for n in range(32)]
            await asyncio.to_thread(asked.wait, 30)
            assert (await asyncio.wait_for(send(other, "GET http://a.example.org/"), 20)).endswith(b"answer")
            release.set()
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    try:
        asyncio.run(go())
    finally:
        release.set()


def test_slow_hosts_of_one_sandbox_keep_nobody_waiting(tmp_path: Path) -> None:
    crowded, looked_up = threading.Event(), list[str]()

    class Counting(Recordings):
        def load(self, key: str) -> RecordedResponse | None:
            looked_up.append(key)
            # All that the outlet serves at once: they have slots now, or wait for them.
            if len(looked_up) == 32:
                crowded.set()
            return super().load(key)

    async def go() -> None:
        slow, fast = Origin(lambda _: b"", hangs=True), Origin(lambda _: response(b"answer"))

        async def resolve(name: str) -> list[str]:
            return [ADDRESS] if name.startswith("slow") else ["93.184.215.15"]

        async def connect(address: str, _port: int) -> socket.socket:
            return await dialing.connect("127.0.0.1", (slow if address == ADDRESS else fast).port)

        dialer = Dialer(resolve, connect)
        async with (
            slow.running(),
            fast.running(),
            asyncio.timeout(60),
            outlets(Counting(tmp_path), dialer) as (greedy, other),
        ):
            asking = [asyncio.ensure_future(send(greedy, f"GET http://slow.example.org/{n}")) for n in range(32)]
            await asyncio.to_thread(crowded.wait, 30)
            # What waits for a slot does not hold the turn of a request either.
            asking += [asyncio.ensure_future(send(greedy, "GET http://a.example.org/"))]
            assert (await asyncio.wait_for(send(other, "GET http://a.example.org/"), 20)).endswith(b"answer")
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)

    asyncio.run(go())
