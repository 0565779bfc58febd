"""Hits through another member: answers are those of the other ways, calls keep their order, and none is made twice."""

import asyncio
import json
import random
import socket
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import httpx
import pytest

from proxy.cluster.hits.calls import Heads, KnownAnswer, passed_call
from proxy.cluster.hits.passing import CallPassing, SentCall
from proxy.cluster.ingress import Ingress
from proxy.cluster.link.opener import PendingCall
from proxy.cluster.protocol import Position
from proxy.http.access import GRANT
from proxy.http.address import Address
from sandboxes.ipc.codec import encode
from tests.proxy.cluster.nodes import PATIENT, Node, nodes, put_task

if TYPE_CHECKING:
    from proxy.cluster.link.channels import LinkChannel
    from proxy.http.asgi import Scope

REQUEST = b"POST /t/t/r/1/x HTTP/1.1\r\nhost: h\r\ncontent-length: 4\r\n\r\nbody"


class Connection:
    """An agent's connection: what became of its request."""

    def __init__(self) -> None:
        self.events: list[bytes | str] = []

    def answered(self, response: bytes) -> None:
        self.events.append(response)

    def declined(self) -> None:
        self.events.append("declined")


class World:
    """An ingress whose link to an owner is a list of what was sent."""

    def __init__(self) -> None:
        self.ingress, self.sent = Ingress(), list[tuple[bytes, PendingCall]]()
        self.is_accepted, self.accepted = True, list[Any]()
        self.continued: list[SentCall] = []
        link = SimpleNamespace(ask_at_once=lambda content, call: self.sent.append((content, call)))
        member = SimpleNamespace(ingress=self.ingress, link_to=lambda _: link, accept=self._accept)
        address = Address("t", "1", "x", "")
        addressing = SimpleNamespace(remembered=lambda scope: None if scope["path"] == "/foreign" else address)
        self.passing = CallPassing(
            cast("Any", member), cast("Any", None), cast("Any", addressing), frozenset(), 1000, self._continue
        )
        self.task = self.ingress.task("t")
        self.task.owner = cast("Any", SimpleNamespace(view=3, peer=None))

    def _accept(self, name: str, _view: int, positions: Any) -> bool:
        self.accepted.append((name, positions))
        return self.is_accepted

    async def _continue(self, sent: SentCall) -> None:
        self.continued.append(sent)
        self.ingress.end(self.task, sent.call)

    def begin(self, path: str = "/t/t/r/1/x") -> tuple[SentCall | None, Connection]:
        connection = Connection()
        scope: Scope = {"path": path, "scheme": "http", "headers": [], GRANT: None}
        return self.passing.begin(scope, REQUEST, b"body", connection), connection

    async def settled(self) -> None:
        for task in self.passing._tasks:
            await task


def test_known_answer_is_written_once_its_position_is_kept() -> None:
    async def go() -> None:
        world = World()
        passed, connection = world.begin()
        assert passed is not None
        ((content, call),) = world.sent
        sent = passed_call(content, Heads())
        assert (sent.task, sent.view, sent.number, sent.oldest, sent.body) == ("t", 3, 1, 1, b"body")
        call.known(encode(KnownAnswer(3, 7, Position(2, 9), b"response")))
        assert world.accepted == [("t", {7: Position(2, 9)})]
        assert connection.events == [b"response"]
        assert not world.task.waiting

    asyncio.run(go())


@pytest.mark.parametrize("outcome", ["late", "lost", "refused"])
def test_call_without_a_known_answer_is_continued(outcome: str) -> None:
    """The application has it then, under its number; a later call of the rollout does not overtake it."""

    async def go() -> None:
        world = World()
        world.is_accepted = outcome != "refused"
        passed, connection = world.begin()
        assert passed is not None
        call = world.sent[0][1]
        if outcome == "late":
            first: asyncio.Future[bytes | LinkChannel] = asyncio.get_running_loop().create_future()
            call.later(first)
            assert passed.call.first is first
        elif outcome == "lost":
            call.lost()
        else:
            # The answer of an owner that was replaced.
            call.known(encode(KnownAnswer(2, 7, Position(2, 9), b"response")))
        assert connection.events == ["declined"]
        assert list(world.task.waiting) == [passed.call.number]
        world.task.owner = cast("Any", SimpleNamespace(view=3, peer=None))
        assert world.begin()[0] is None
        passed.adopt()
        world.ingress.end(world.task, passed.call)
        passed.release()
        assert world.begin()[0] is not None

    asyncio.run(go())


def test_call_whose_agent_hung_up_is_continued() -> None:
    """Its answer says where the rollout is, and an owner that asks hears that no agent waits."""

    async def go() -> None:
        world = World()
        passed, connection = world.begin()
        assert passed is not None
        passed.lose()
        assert not await passed.call.waits()
        world.sent[0][1].later(asyncio.get_running_loop().create_future())
        await world.settled()
        assert (world.continued, connection.events) == ([passed], [])
        assert not world.task.regular

    asyncio.run(go())


def test_declined_call_that_nobody_adopts_is_continued() -> None:
    """The application has refused the request before it looked at the call."""

    async def go() -> None:
        world = World()
        passed, _ = world.begin()
        assert passed is not None
        world.sent[0][1].lost()
        passed.release()
        await world.settled()
        assert world.continued == [passed]
        assert not world.task.regular

    asyncio.run(go())


def test_foreign_and_overtaking_requests_stay() -> None:
    world = World()
    assert world.begin("/foreign")[0] is None
    regular = world.passing.expect({"path": "/t/t/r/1/x"})
    assert regular is not None
    assert world.begin()[0] is None
    regular.end()
    passed, _ = world.begin()
    assert passed is not None
    assert len(world.sent) == 1


# -- whole members ---------------------------------------------------------------------------------------------------

CALLS = (
    ("script", {"sql": "INSERT INTO entry VALUES ('a'); SELECT * FROM entry"}),
    ("query", {"sql": "SELECT hex(zeroblob(900))"}),
    ("query", {"sql": "SELECT count(*) FROM entry"}),
    ("query", {"sql": "nonsense"}),
    ("script", {"sql": "DELETE FROM entry"}),
)


def passed_hits(node: Node) -> int:
    """Return how many hits the connections of a member have written."""
    lines = httpx.get(f"{node.url}/metrics", timeout=30).text.splitlines()
    return int(next(float(line.split()[1]) for line in lines if line.startswith("forkpoint_hit_seconds_count")))


class Raw:
    """A connection whose requests are one packet each, as those of most agents' clients."""

    def __init__(self, node: Node, *, closes: bool = False) -> None:
        self._address, self._closes = ("127.0.0.1", node.port), closes
        self._socket: socket.socket | None = None

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def send(self, rollout: str, tool: str, arguments: dict[str, str]) -> None:
        if self._socket is None:
            self._socket = socket.create_connection(self._address, timeout=60)
        body = json.dumps(arguments).encode()
        more = "Connection: close\r\n" if self._closes else ""
        head = f"POST /t/t/r/{rollout}/sql/{tool} HTTP/1.1\r\nHost: h\r\n{more}Content-Length: {len(body)}\r\n\r\n"
        self._socket.sendall(head.encode() + body)

    def receive(self) -> tuple[bytes, dict[str, str], bytes]:
        """Return status line, headers and body, without what is about the connection alone."""
        assert self._socket is not None
        with self._socket.makefile("rb") as file:
            status = file.readline()
            headers = {}
            while line := file.readline().strip():
                name, _, value = line.decode().partition(": ")
                headers[name] = value
            body = file.read(int(headers["content-length"]))
        headers.pop("connection", None)
        if self._closes:
            self.close()
        return status, headers, body


def walk(connection: Raw, rollout: str, program: list[tuple[str, dict[str, str]]]) -> list[Any]:
    """Return the responses to the calls of a program."""
    responses = []
    with closing(connection):
        for tool, arguments in program:
            connection.send(rollout, tool, arguments)
            responses.append(connection.receive())
    return responses


def test_both_ways_and_the_owner_answer_alike(dsn: str, tmp_path: Path) -> None:
    """The same program directly, in frames, and on the regular way, after one rollout has recorded it."""
    chosen = random.Random(5)  # noqa: S311 - the same program each time
    program = [chosen.choice(CALLS) for _ in range(40)]
    with nodes(tmp_path, dsn, "ab", module=PATIENT) as members:
        a, b = members.values()
        put_task(a, "t")
        walk(Raw(a), "recorded", program)
        direct = walk(Raw(a), "direct", program)
        # Its URLs are learned on the regular way.
        before, framed = passed_hits(b), walk(Raw(b), "framed", program)
        in_frames = passed_hits(b) - before
        regular = walk(Raw(b, closes=True), "regular", program)
        assert framed == direct
        assert regular == direct
        assert in_frames >= len(program) - 4
