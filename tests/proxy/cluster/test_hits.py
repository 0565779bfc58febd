"""Known calls at the owner of their task: no answer without its step in the log, and no step twice."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from proxy.cluster.link.greeting import Hello
from proxy.cluster.link.passing import PEER, TUNNEL, Passed, Tunnelled
from proxy.cluster.plane import ClusterPlane
from proxy.cluster.postgres.connection import DatabaseError
from proxy.cluster.protocol import StepId, Stepped
from proxy.dataplane.hit_protocol import protocol_for
from proxy.dataplane.logged_hits import LoggedHits
from proxy.dataplane.response_reports import report_responses
from proxy.http.asgi import Receive, Scope, Send
from proxy.http.passed_head import PASSED
from proxy.tree.rollout import Rollout
from tests.proxy.cluster.states.owners import TASK, BreakableStore, Log, Owner, owner
from tests.proxy.cluster.test_gate import always, call, turns
from tests.proxy.dataplane.test_hit_protocol import Client
from tests.proxy.dataplane.test_request_order import request

WRITE, READ = "echo one > f", "cat f"
PEER_HELLO = Hello(2, 6, b"n")


@dataclass
class Agents:
    """Agents of a member that owns the task. Rows reach the log when a test lets them.

    Attributes:
        answers: What the database says to the next rows: whether it was written, and an error.
    """

    own: Owner
    log: Log
    plane: ClusterPlane
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    answers: list[tuple[bool, DatabaseError | None]] = field(default_factory=list)
    state: ServerState = field(default_factory=ServerState)

    async def append(self, _task: str, row: int, body: bytes) -> bool:
        await self.gate.wait()
        is_written, error = self.answers.pop(0) if self.answers else (True, None)
        if is_written:
            assert row == len(self.log.rows) + 1
            self.log.rows.append(body)
        if error is not None:
            raise error
        return is_written

    def connect(self, state: dict[str, Any] | None = None) -> tuple[Client, Any]:
        config = uvicorn.Config(report_responses(self.plane), lifespan="off", log_config=None)
        client, connection = Client(), protocol_for(self.plane, kind=LoggedHits)(config, self.state, state or {})
        connection.connection_made(client)
        return client, connection

    def send(self, *commands: str, rollout: str = "b") -> Client:
        """Send calls in one packet on a connection of their own."""
        client, connection = self.connect()
        connection.data_received(b"".join(request(command, rollout) for command in commands))
        return client

    async def answered(self, *clients: Client, reads: bool = True) -> list[str]:
        """Let the log take rows; return the output of each answer, if it `reads` them."""
        self.gate.set()
        async with asyncio.timeout(30):
            for client in clients:
                await client.written.wait()
            while self.state.tasks:
                await asyncio.wait(self.state.tasks)
        return [output for client in clients if reads for output in outputs(client)]

    async def ask(self, *commands: str, rollout: str) -> list[str]:
        """Make calls, one after the other; return their output."""
        return [(await self.answered(self.send(command, rollout=rollout)))[0] for command in commands]

    async def rollout(self, name: str = "b") -> Rollout:
        return (await self.own.engine.tasks.open(TASK)).rollouts[name]


def outputs(client: Client) -> list[str]:
    """Return the output of each answer that a client has received."""
    rest, found = client.received, []
    while rest:
        head, _, rest = rest.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), client.received
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        found.append(json.loads(rest[:length])["stdout"])
        rest = rest[length:]
    return found


async def behind(_scope: Scope, _receive: Receive, _send: Send) -> None:
    raise AssertionError


@asynccontextmanager
async def agents(folder: Path) -> AsyncIterator[Agents]:
    """Let a member own a task whose tree knows `WRITE` and then `READ`; rollout `b` is where the first one leads."""
    log = Log()
    async with owner(folder, 1, log, BreakableStore()) as own:
        own.member.database.membership.boot = 5  # type: ignore[misc]
        own.member.database.membership.cluster = "cluster"  # type: ignore[misc]
        made = Agents(own, log, ClusterPlane(own.engine, behind, own.member, b"secret"))
        own.owned._append = made.append
        try:
            assert await made.ask(WRITE, READ, rollout="a") == ["", "one\n"]
            assert await made.ask(WRITE, rollout="b") == [""]
            made.gate.clear()
            yield made
        finally:
            made.gate.set()


async def turns_of_loop() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def steps(log: Log, rollout: int) -> list[Stepped]:
    return [line for line in log.lines(Stepped) if isinstance(line, Stepped) and line.rollout == rollout]


def test_an_answer_waits_for_its_step(tmp_path: Path) -> None:
    async def go() -> None:
        async with agents(tmp_path) as on:
            client = on.send(READ)
            await turns_of_loop()
            rollout = await on.rollout()
            assert (client.received, rollout.calls, on.state.tasks) == (b"", 1, set())
            assert await on.answered(client) == ["one\n"]
            assert [step.position.turn for step in steps(on.log, rollout.id)] == [1, 2]
            assert (rollout.calls, rollout.waiting, on.own.engine.step.order.busy(rollout)) == (2, 0, False)
            assert on.own.member.ingress.task(TASK).waiting == {}

    asyncio.run(go())


@pytest.mark.parametrize("is_written", [True, False])
@pytest.mark.parametrize("error", [None, DatabaseError("silent")])
def test_a_step_whose_row_is_lost_is_taken_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_written: bool, error: DatabaseError | None
) -> None:
    """The next owner, here the same member, gets the call under its number, whether the step is in the log or not."""

    async def go() -> None:
        async with agents(tmp_path) as on:
            member = on.own.member

            async def locate(_name: str, *, creates: bool = True) -> Any:
                assert creates
                return member.gate.owned.get(TASK) or await member.claim(TASK)

            monkeypatch.setattr(member, "locate", locate)
            if is_written and error is None:
                # It is written, and another member has the next row.
                on.answers = [(True, DatabaseError("late"))]
            else:
                on.answers = [(is_written, error)]
            client = on.send(READ)
            assert await on.answered(client) == ["one\n"]
            rollout = await on.rollout()
            taken = steps(on.log, rollout.id)
            assert [step.position.turn for step in taken] == [1, 2]
            assert (rollout.calls, on.own.owned.is_dropped) == (2, True)
            assert member.ingress.task(TASK).waiting == {}
            numbers = [step.call.number for step in taken]
            # Another call gets another number.
            assert await on.ask(READ, rollout="b") == ["one\n"]
            assert [step.call.number for step in steps(on.log, rollout.id)] == [*numbers, numbers[-1] + 1]

    asyncio.run(go())


def test_a_dropped_task_answers_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another member takes the task over while the row is on its way. Its owner gets the call, with its number."""

    async def go() -> None:
        async with agents(tmp_path) as on:
            passed = list[int]()

            async def locate(_name: str, *, creates: bool = True) -> Any:  # noqa: ARG001
                return "the next owner"

            async def pass_on(_owner: Any, _task: Any, waiting: Any, *rest: Any) -> bool:
                passed.append(waiting.number)
                await rest[-1].head(200, (("content-length", "16"),))
                await rest[-1].data(b'{"stdout": "ow"}')
                await rest[-1].end()
                return True

            monkeypatch.setattr(on.own.member, "locate", locate)
            monkeypatch.setattr(on.plane._forwarder, "pass_on", pass_on)
            client = on.send(READ)
            await turns_of_loop()
            (number,) = on.own.member.ingress.task(TASK).waiting
            on.own.owned.fail("a test")
            await client.written.wait()
            assert (passed, outputs(client)) == ([number], ["ow"])
            assert on.own.member.ingress.task(TASK).waiting == {}

    asyncio.run(go())


def test_a_call_that_is_repeated_after_a_503_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its step was in the log, and no owner could be found."""

    async def go() -> None:
        async with agents(tmp_path) as on:
            member, is_reachable = on.own.member, False

            async def locate(_name: str, *, creates: bool = True) -> Any:  # noqa: ARG001
                if not is_reachable:
                    raise DatabaseError("silent")
                return member.gate.owned.get(TASK) or await member.claim(TASK)

            monkeypatch.setattr(member, "locate", locate)
            monkeypatch.setattr("proxy.cluster.forwarding.PATIENCE_S", 0.0)
            on.answers = [(True, DatabaseError("silent"))]
            client = on.send(READ)
            on.gate.set()
            await client.written.wait()
            assert client.received.startswith(b"HTTP/1.1 503")
            is_reachable = True
            assert await member.claim(TASK) is not None
            assert await on.ask(READ, rollout="b") == ["one\n"]
            rollout = await on.rollout()
            assert ([step.position.turn for step in steps(on.log, rollout.id)], rollout.calls) == ([1, 2], 2)

    asyncio.run(go())


@pytest.mark.parametrize("is_dropped", [False, True])
def test_a_client_hangs_up_while_its_step_is_on_its_way(tmp_path: Path, is_dropped: bool) -> None:
    """The step counts if it is in the log. Nothing makes the call again, and nothing waits for it."""

    async def go() -> None:
        async with agents(tmp_path) as on:
            rollout = await on.rollout()
            client, connection = on.connect()
            connection.data_received(request(READ, "b"))
            await turns_of_loop()
            client.close()
            connection.connection_lost(None)
            on.answers = [(not is_dropped, None)]
            on.gate.set()
            await turns_of_loop()
            assert (client.received, rollout.calls) == (b"", 1 if is_dropped else 2)
            assert (rollout.waiting, on.own.member.ingress.task(TASK).waiting, on.state.tasks) == (0, {}, set())

    asyncio.run(go())


def test_calls_of_one_rollout_take_their_turns(tmp_path: Path) -> None:
    """Two connections, then two calls in one packet: in the order in which they came."""

    async def go() -> None:
        async with agents(tmp_path) as on:
            clients = [on.send(READ), on.send("echo two > f"), on.send(READ)]
            await turns_of_loop()
            assert await on.answered(*clients) == ["one\n", "", "two\n"]
            # The first of them is not known, and the second one is, where the rollout is now.
            clients = [on.send("echo three > f"), on.send(READ)]
            assert await on.answered(*clients) == ["", "three\n"]
            assert await on.answered(on.send(READ, READ)) == ["three\n"] * 2
            rollout = await on.rollout()
            assert [step.position.turn for step in steps(on.log, rollout.id)] == list(range(1, 9))

    asyncio.run(go())


def test_a_call_behind_another_ingress_is_confirmed(tmp_path: Path) -> None:
    """The last call of its rollout came through another member, so this one takes the regular way."""

    async def go() -> None:
        async with agents(tmp_path) as on:
            on.gate.set()
            await call(on.own, "b", READ, 1)
            on.gate.clear()
            found = on.plane.hits.find
            seen = list[Any]()
            on.plane.hits.find = lambda *given: seen.append(found(*given)) or seen[-1]  # type: ignore[method-assign, func-returns-value]
            assert await on.ask(READ, READ, rollout="b") == ["one\n"] * 2
            assert [record is not None for record in seen] == [False, True]
            assert turns(on.log)[-3:] == [2, 3, 4]

    asyncio.run(go())


def passed(number: int, *, view: int, oldest: int = 0, is_again: bool = False) -> bytes:
    """Return a known call as a peer passes it on."""
    head, _, body = request(READ, "b").partition(b"\r\n")
    header = Passed(view, number, oldest or number, is_again, "http", TASK).pack()
    return b"%b\r\n%b: %b\r\n%b" % (head, PASSED, header, body)


def test_a_call_that_a_peer_passes_on_is_answered_likewise(tmp_path: Path) -> None:
    """Under the number that the peer gave it, unless it may have taken its step, or may be a late copy."""

    async def go() -> None:
        async with agents(tmp_path) as on:
            view, rollout, seen = on.own.owned.view, await on.rollout(), list[Any]()
            found = on.plane.hits._step.find
            on.plane.hits._step.find = lambda *given: seen.append(found(*given)) or seen[-1]  # type: ignore[method-assign, func-returns-value]
            client, connection = on.connect({PEER: PEER_HELLO})

            async def pass_on(sent: bytes) -> bytes:
                client.received = b""
                client.written.clear()
                connection.data_received(sent)
                await on.answered(client, reads=False)
                return client.received.partition(b"\r\n")[0]

            on.plane._member.confirm = lambda *_: always()  # type: ignore[method-assign]
            # The rollout's last call came through this member.
            assert await pass_on(passed(3, view=view)) == b"HTTP/1.1 200 OK"
            assert (rollout.calls, len(seen)) == (2, 0)
            on.gate.clear()
            connection.data_received(passed(4, view=view, oldest=4))
            await turns_of_loop()
            assert (on.state.tasks, len(seen)) == (set(), 1)
            on.gate.set()
            await client.written.wait()
            # Once more: the link broke, and the same call comes on another connection.
            assert await pass_on(passed(4, view=view, oldest=4)) == b"HTTP/1.1 200 OK"
            assert await pass_on(passed(5, view=view, is_again=True)) == b"HTTP/1.1 200 OK"
            assert (rollout.calls, len(seen)) == (4, 1)
            assert await pass_on(passed(2, view=view)) == b"HTTP/1.1 503 Service Unavailable"
            assert await pass_on(passed(6, view=view - 1)) == b"HTTP/1.1 421 Misdirected Request"
            assert (rollout.calls, len(seen)) == (4, 1)
            taken = steps(on.log, rollout.id)
            assert [step.call for step in taken[1:]] == [StepId(2, 6, number, 0) for number in (3, 4, 5)]
            assert [step.position.turn for step in taken] == [1, 2, 3, 4]

    asyncio.run(go())


def test_what_comes_through_a_tunnel_is_no_known_call(tmp_path: Path) -> None:
    """Only its first request is the peer's word, and that opens a stream."""

    async def go() -> None:
        async with agents(tmp_path) as on:
            assert on.plane.hits.of({TUNNEL: Tunnelled(PEER_HELLO)})({}, b"") is None

    asyncio.run(go())


@pytest.mark.parametrize("is_written", [False, True])
def test_a_call_of_a_peer_whose_task_is_dropped_is_answered_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_written: bool
) -> None:
    """Its row is refused, or is in the log when the task is dropped: the next owner may have gone on from there."""

    async def go() -> None:
        async with agents(tmp_path) as on:

            async def nowhere(_name: str, *, creates: bool) -> None:
                assert not creates

            def write(lines: Any) -> Any:
                row = real(lines)
                row.add_done_callback(lambda _: on.own.member._drop(on.own.owned, "a test"))
                return row

            client, connection = on.connect({PEER: PEER_HELLO})
            on.gate.set()
            await call(on.own, "b", READ, 1, PEER_HELLO.member)
            rollout, real = await on.rollout(), on.own.owned.write
            monkeypatch.setattr(on.own.owned, "write", write)
            monkeypatch.setattr(on.own.member, "locate", nowhere)
            on.answers = [(is_written, None)]
            connection.data_received(passed(4, view=on.own.owned.view))
            await client.written.wait()
            assert (client.received[:12], rollout.calls, rollout.waiting) == (b"HTTP/1.1 421", 2, 0)

    asyncio.run(go())


def test_a_step_that_cannot_be_taken_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The journal's disk is full. The call takes its step when there is room again, and the log has it once more."""

    async def go() -> None:
        async with agents(tmp_path) as on:
            journal, failures = on.own.engine.journal, iter([True])
            append = journal.append

            def failing(entry: Any) -> None:
                if next(failures, False):
                    raise OSError(28, "No space left on device")
                append(entry)

            monkeypatch.setattr(journal, "append", failing)
            assert await on.ask(READ, rollout="b") == ["one\n"]
            rollout = await on.rollout()
            taken = steps(on.log, rollout.id)
            assert ([step.position.turn for step in taken], rollout.calls) == ([1, 2, 2], 2)
            assert taken[1] == taken[2]

    asyncio.run(go())
