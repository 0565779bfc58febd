"""What a sandbox's programs can do through its outlet, with hostile programs and hostile hosts."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from sandboxes.egress.dialing import Dialer
from sandboxes.egress.fair_slots import Requester
from sandboxes.egress.fetching import HostFetcher
from sandboxes.egress.outlet import Outlet
from sandboxes.egress.recordings import Recordings
from tests.sandboxes.egress.origin import Origin, response

HOSTS = ("example.org", "*.example.com", "other.org:8443")


class Program:
    """A program in the sandbox of an outlet."""

    def __init__(self, outlet: Outlet, listener: socket.socket) -> None:
        self.outlet, self._address = outlet, listener.getsockname()

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(*self._address)

    async def send(self, data: bytes) -> bytes:
        """Send bytes on a connection of their own; return all that comes back."""
        reader, writer = await self.connect()
        writer.write(data)
        try:
            return await reader.read()
        finally:
            writer.close()

    async def get(self, url: str, headers: str = "") -> bytes:
        return await self.send(f"GET {url} HTTP/1.1\r\nHost: example.org\r\n{headers}\r\n".encode())


Test = Callable[[Program, Origin], Awaitable[None]]


def with_outlet(folder: Path, test: Test, origin: Origin, *resolved: list[str], max_body_bytes: int = 1 << 20) -> None:
    async def go() -> None:
        async with origin.running(), asyncio.timeout(60):
            dialer = origin.dialer(*resolved)
            outlet, listener = make_outlet(folder, dialer, max_body_bytes)
            serving = asyncio.create_task(outlet.serve())
            try:
                await test(Program(outlet, listener), origin)
            finally:
                serving.cancel()
                await asyncio.wait([serving])
                await outlet.close()

    asyncio.run(go())


def make_outlet(folder: Path, dialer: Dialer, max_body_bytes: int) -> tuple[Outlet, socket.socket]:
    listener = socket.create_server(("127.0.0.1", 0))
    fetcher = HostFetcher(dialer, Recordings(folder), max_body_bytes=max_body_bytes)
    return Outlet(listener, HOSTS, Requester("sandbox", "scope"), fetcher, dialer), listener


def damage(folder: Path) -> None:
    (recording,) = folder.iterdir()
    content = bytearray(recording.read_bytes())
    content[3] ^= 1
    recording.write_bytes(content)


def recordings(folder: Path) -> list[Path]:
    return list(folder.iterdir())


def counting() -> Origin:
    return Origin(lambda count: response(f"answer {count}".encode()))


def test_an_answer_is_the_same_ever_after(tmp_path: Path) -> None:
    async def test(program: Program, origin: Origin) -> None:
        first = await program.get("http://example.org/a?b=c")
        assert first.endswith(b"\r\n\r\nanswer 1")
        taken = program.outlet.take()
        assert taken.live
        assert [(one.method, one.url, one.outcome, one.status, one.size_bytes) for one in taken.exchanges] == [
            ("GET", "http://example.org/a?b=c", "recorded", 200, 8)
        ]
        assert await program.get("http://example.org/a?b=c") == first
        taken = program.outlet.take()
        assert not taken.live
        assert [one.outcome for one in taken.exchanges] == ["repeated"]
        assert (await program.get("http://example.org/other")).endswith(b"answer 2")
        assert len(origin.received) == 2

    with_outlet(tmp_path, test, counting())


def test_requests_at_the_same_time_share_one_response(tmp_path: Path) -> None:
    async def test(program: Program, origin: Origin) -> None:
        answers = await asyncio.gather(*(program.get("http://example.org/") for _ in range(8)))
        assert len(set(answers)) == len(origin.received) == 1

    with_outlet(tmp_path, test, counting())


def test_a_passing_failure_is_not_recorded(tmp_path: Path) -> None:
    async def test(program: Program, _origin: Origin) -> None:
        assert (await program.get("http://example.org/")).startswith(b"HTTP/1.1 503 ")
        taken = program.outlet.take()
        assert (taken.exchanges[0].outcome, taken.live) == ("live", True)
        assert (await program.get("http://example.org/")).endswith(b"later")

    answers = [response(b"busy", "HTTP/1.1 503 Busy"), response(b"later")]
    with_outlet(tmp_path, test, Origin(lambda count: answers[count - 1]))


def test_a_damaged_recording_is_fetched_again(tmp_path: Path) -> None:
    async def test(program: Program, _origin: Origin) -> None:
        await program.get("http://example.org/")
        damage(tmp_path)
        program.outlet.take()
        assert (await program.get("http://example.org/")).endswith(b"answer 2")
        assert program.outlet.take().live

    with_outlet(tmp_path, test, counting())


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        ("GET http://127.0.0.1/ HTTP/1.1", 403),
        ("GET http://2130706433/ HTTP/1.1", 403),
        ("GET http://0177.0.0.1/ HTTP/1.1", 403),
        ("GET http://0x7f.1/ HTTP/1.1", 403),
        ("GET http://[::1]/ HTTP/1.1", 400),
        ("GET http://localhost/ HTTP/1.1", 403),
        ("GET http://other.org/ HTTP/1.1", 403),
        ("GET http://example.org:8080/ HTTP/1.1", 403),
        ("GET http://example.org:443/ HTTP/1.1", 403),
        ("GET http://example.org./ HTTP/1.1", 403),
        ("GET http://example.com/ HTTP/1.1", 403),
        ("GET http://aexample.org/ HTTP/1.1", 403),
        ("GET http://user@example.org/ HTTP/1.1", 400),
        ("GET http://example.org@127.0.0.1/ HTTP/1.1", 400),
        ("GET http://example.org\\@127.0.0.1/ HTTP/1.1", 400),
        ("GET http://example.org#@127.0.0.1/ HTTP/1.1", 400),
        ("GET http://example.org/#fragment HTTP/1.1", 400),
        ("GET https://example.org/ HTTP/1.1", 400),
        ("GET ftp://example.org/ HTTP/1.1", 400),
        ("GET / HTTP/1.1", 400),
        ("POST http://example.org/ HTTP/1.1", 405),
        ("OPTIONS * HTTP/1.1", 405),
        ("CONNECT example.org:80 HTTP/1.1", 403),
        ("CONNECT example.org HTTP/1.1", 403),
        ("CONNECT example.org:22 HTTP/1.1", 403),
        ("CONNECT example.org:0443 HTTP/1.1", 403),
        ("CONNECT 127.0.0.1:443 HTTP/1.1", 403),
        ("CONNECT 2130706433:443 HTTP/1.1", 403),
        ("CONNECT [::ffff:127.0.0.1]:443 HTTP/1.1", 403),
        ("CONNECT other.org:443 HTTP/1.1", 403),
        ("CONNECT user@example.org:443 HTTP/1.1", 403),
        ("CONNECT *.example.com:443 HTTP/1.1", 403),
        ("CONNECT http://example.org:443 HTTP/1.1", 403),
    ],
)
def test_what_the_rules_do_not_allow_goes_nowhere(tmp_path: Path, request_line: str, status: int) -> None:
    async def test(program: Program, origin: Origin) -> None:
        answer = await program.send(f"{request_line}\r\nHost: example.org\r\n\r\n".encode())
        assert answer.startswith(f"HTTP/1.1 {status} ".encode())
        taken = program.outlet.take()
        assert [one.outcome for one in taken.exchanges] == ["refused"]
        # The rules alone decide, so a replay is refused as well.
        assert not taken.live
        assert origin.received == []

    with_outlet(tmp_path, test, counting())


@pytest.mark.parametrize(
    "addresses",
    [
        ["127.0.0.1"], ["10.0.0.1"], ["169.254.169.254"], ["100.100.100.200"], ["168.63.129.16"], ["0.0.0.0"],  # noqa: S104
        ["::1"], ["::ffff:93.184.215.14"], ["fe80::1%eth0"], ["fd00:ec2::254"], ["64:ff9b::7f00:1"], ["2002:7f00:1::"],
        ["93.184.215.14", "127.0.0.1"], [],
    ],
)  # fmt: skip
def test_names_that_lead_inside_are_not_connected_to(tmp_path: Path, addresses: list[str]) -> None:
    async def test(program: Program, origin: Origin) -> None:
        plain = await program.get("http://example.org/")
        tunnel = await program.send(b"CONNECT example.org:443 HTTP/1.1\r\nHost: example.org\r\n\r\n")
        status = b"403" if addresses else b"502"
        assert plain[9:12] == tunnel[9:12] == status
        # Another time the name may lead elsewhere.
        assert program.outlet.take().live
        assert origin.received == []

    with_outlet(tmp_path, test, counting(), addresses)


def test_a_name_is_looked_up_once_for_each_connection(tmp_path: Path) -> None:
    """DNS rebinding: the address that was checked is the one that is connected to (`Origin.dialer` asserts it)."""

    async def test(program: Program, origin: Origin) -> None:
        assert (await program.get("http://example.org/1")).endswith(b"answer 1")
        assert (await program.get("http://example.org/2"))[9:12] == b"403"
        assert len(origin.received) == 1

    with_outlet(tmp_path, test, counting(), ["93.184.215.14"], ["127.0.0.1"])


def test_redirects_are_not_followed(tmp_path: Path) -> None:
    async def test(program: Program, origin: Origin) -> None:
        answer = await program.get("http://example.org/")
        assert answer.startswith(b"HTTP/1.1 302 ")
        assert b"Location: http://127.0.0.1/" in answer or b"location: http://127.0.0.1/" in answer
        assert len(origin.received) == 1

    redirect = response(b"", "HTTP/1.1 302 Found", "Location: http://127.0.0.1/\r\n")
    with_outlet(tmp_path, test, Origin(lambda _: redirect))


def test_a_host_receives_a_request_of_our_own(tmp_path: Path) -> None:
    """Host is the target's. Nothing that frames a body, and no header that is not known, is passed on."""

    async def test(program: Program, origin: Origin) -> None:
        await program.send(
            b"GET http://sub.example.com/x HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: a/b\r\n"
            b"Proxy-Authorization: Basic x\r\nX-Forwarded-For: 127.0.0.1\r\n"
            b"Connection: keep-alive, accept\r\nUpgrade: websocket\r\n\r\n"
            b"GET http://127.0.0.1/smuggled HTTP/1.1\r\nHost: a\r\n\r\n"
        )
        assert origin.received == [
            b"GET /x HTTP/1.1\r\nHost: sub.example.com\r\naccept: a/b\r\nConnection: close\r\n\r\n"
        ]

    with_outlet(tmp_path, test, counting())


@pytest.mark.parametrize(
    "data",
    [
        b"GET http://example.org/ HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nGET /",
        b"GET http://example.org/ HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET http://example.org/ HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\nTransfer-Encoding: chunked\r\n\r\n0",
        b"GET http://example.org/ HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        b"GET http://example.org/ HTTP/1.1\r\n\r\n",
        b"GET http://example.org/\x00 HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET http://example.org/ HTTP/1.1\r\nHost : a\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"x" * 20 + b"\r\n\r\n",
        b"GET http://example.org/ HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 70_000,
        b"GET http://example.org/" + b"x" * 70_000,
    ],
)
def test_malformed_requests_reach_no_host(tmp_path: Path, data: bytes) -> None:
    async def test(program: Program, origin: Origin) -> None:
        answer = await program.send(data)
        assert answer[9:10] == b"4"
        assert origin.received == []

    with_outlet(tmp_path, test, counting())


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"not http\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 400_000,
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 300 + b"Content-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 2_000_000,
        b"HTTP/1.1 100 Continue\r\n\r\n" * 1_000,
    ],
)
def test_malformed_and_endless_responses_are_not_passed_on(tmp_path: Path, answer: bytes) -> None:
    async def test(program: Program, _origin: Origin) -> None:
        assert (await program.get("http://example.org/")).startswith(b"HTTP/1.1 502 ")
        assert program.outlet.take().live
        assert recordings(tmp_path) == []

    with_outlet(tmp_path, test, Origin(lambda _: answer))


def test_response_framing_is_our_own(tmp_path: Path) -> None:
    async def test(program: Program, _origin: Origin) -> None:
        head, _, body = (await program.get("http://example.org/")).lower().partition(b"\r\n\r\n")
        assert body == b"hello"
        assert sorted(head.split(b"\r\n")[1:]) == [b"connection: close", b"content-length: 5", b"etag: \xe9"]

    answer = (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nConnection: x-hop\r\nX-Hop: 1\r\nKeep-Alive: 5\r\n"
        b"Etag: \xe9\r\n\r\n5\r\nhello\r\n0\r\nX-Trailer: 1\r\n\r\n"
    )
    with_outlet(tmp_path, test, Origin(lambda _: answer))


def test_heads_have_no_body(tmp_path: Path) -> None:
    async def test(program: Program, _origin: Origin) -> None:
        for target in ("http://example.org/", "http://127.0.0.1/"):
            answer = await program.send(f"HEAD {target} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
            assert answer.endswith(b"\r\n\r\n")

    with_outlet(tmp_path, test, Origin(lambda _: b"HTTP/1.1 200 OK\r\nContent-Length: 10000000000\r\n\r\n"))


def test_a_tunnel_passes_bytes_both_ways_and_is_never_repeatable(tmp_path: Path) -> None:
    async def test(program: Program, origin: Origin) -> None:
        # The first bytes come together with the request, as from an impatient client.
        answer = await program.send(b"CONNECT example.org:443 HTTP/1.1\r\nHost: a\r\n\r\nhello\r\n\r\n")
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        assert body == b"secret 1"
        assert origin.received == [b"hello\r\n\r\n"]
        taken = program.outlet.take()
        assert taken.live
        assert [(one.url, one.outcome) for one in taken.exchanges] == [("example.org:443", "live")]

    with_outlet(tmp_path, test, Origin(lambda count: f"secret {count}".encode()))


def test_an_open_tunnel_makes_every_later_call_unrepeatable(tmp_path: Path) -> None:
    async def test(program: Program, _origin: Origin) -> None:
        reader, writer = await program.connect()
        writer.write(b"CONNECT other.org:8443 HTTP/1.1\r\nHost: a\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        assert program.outlet.take().live
        assert not program.outlet.take().live
        writer.write(b"go\r\n\r\n")
        assert await reader.read(100) == b"late"
        assert program.outlet.take().live
        writer.close()

    with_outlet(tmp_path, test, Origin(lambda _: b"late", hangs=True))


def test_many_connections_starve_nobody_for_good(tmp_path: Path) -> None:
    """A sandbox with hundreds of idle connections waits for itself; once they end, requests are served."""

    async def test(program: Program, _origin: Origin) -> None:
        idle = [await program.connect() for _ in range(100)]
        waiting = asyncio.create_task(program.get("http://example.org/"))
        for _, writer in idle:
            writer.close()
        assert (await waiting).endswith(b"answer 1")

    with_outlet(tmp_path, test, counting())


def test_more_requests_than_are_listed_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sandboxes.egress.outlet._EXCHANGES", 2)

    async def test(program: Program, _origin: Origin) -> None:
        for path in ("a", "b", "c"):
            await program.get(f"http://example.org/{path}")
        taken = program.outlet.take()
        assert [one.url[-1] for one in taken.exchanges] == ["b", "c"]
        assert taken.lost == 1

    with_outlet(tmp_path, test, counting())
