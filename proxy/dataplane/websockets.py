"""WebSockets of agents: each message is a call, and the server's replies to it are its answer.

A message's call is looked up, shared and recorded like any other. The connection to the server is made inside the
sandbox, and only when a call must run. So a call's arguments say which connection of its rollout it belongs to
(`connection`), and whether it is the `first` message there, before which the sandbox opens it. The steps are numbered
below.
"""

import asyncio
import base64
import secrets
from contextlib import suppress
from dataclasses import dataclass, field, replace

import orjson
import structlog

from proxy.dialects import dialect_of
from proxy.dialects.base import Call, Close, Local, Open, Request, Response
from proxy.dialects.rule_based import Declared
from proxy.execution.tasks import Tasks
from proxy.http.access import ALL, GRANT, Access, Grant
from proxy.http.address import Address
from proxy.http.answer_cache import Answers
from proxy.http.asgi import AsgiMessage, Receive, Scope, Send
from proxy.http.lru_cache import LruCache
from proxy.http.problems import count_problem, problem_of
from proxy.http.sent_labels import labels_of
from proxy.refusals import Problem, RefusalError
from proxy.step import Stepper
from proxy.telemetry.counters import Counters
from proxy.tree.keys import CallKey, call_key
from proxy.tree.labels import Labels
from proxy.tree.rollout import Rollout
from sandboxes.calls import ToolCall
from sandboxes.errors import SandboxError, ServerError
from sandboxes.task_owner import start

log = structlog.get_logger()

MAX_QUEUED = 64
"""Limits the messages of one connection that wait for their turn; beyond it the client's sending is held up."""
MAX_QUEUED_BYTES = 1 << 20
"""Limits their bytes, beyond which no further message is read; a message itself may be longer."""
MAX_TRIES = 3
"""How often a message is tried, each time in another sandbox: on a WebSocket no client retries a failed message."""
_MAX_REMEMBERED = 8192
"""Limits the connections that are counted for each rollout and URL."""
_JSON = ("content-type", "application/json")
_BYTES = ("content-type", "application/octet-stream")
_HANDSHAKE_HEADERS = frozenset({
    "connection", "upgrade", "sec-websocket-key", "sec-websocket-version", "sec-websocket-extensions", "content-type",
    "content-length", "sec-websocket-protocol",
})  # fmt: skip
"""Headers of the handshake that say nothing about the messages."""


class _ClientDisconnectedError(Exception):
    """The client has closed its connection."""


class _CloseConnectionError(Exception):
    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code, self.reason = code, reason


@dataclass(slots=True)
class _Connection:
    address: Address
    name: str  # The name of the rollout.
    labels: Labels  # For a rollout that begins on this connection.
    request: Request  # The handshake, as a request with the method `WS`.
    grant: Grant  # What the client's token may see.
    subprotocols: list[str]  # The ones that the client offered.
    send: Send  # Sends an ASGI message to the client.
    # The rollout that got this connection's last message, and the connection's number there.
    numbered: tuple[int, int] | None = None
    # The client's names for things, by the names under which they are recorded.
    aliases: dict[str, str] = field(default_factory=dict)


class Sockets:
    """The WebSocket connections of one data plane."""

    def __init__(
        self, tasks: Tasks, step: Stepper, answers: Answers, access: Access, counts: Counters, max_open: int
    ) -> None:
        self._tasks, self._step, self._answers = tasks, step, answers
        self._access, self._counts, self._max_open = access, counts, max_open
        self._open = 0
        self._connections: LruCache[tuple[int, str], int] = LruCache(_MAX_REMEMBERED)

    async def serve(self, address: Address, request: Request, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection until either side closes it. The request is the handshake."""
        # ASGI delivers `websocket.connect` first; no answer is accepted before it.
        await receive()
        try:
            # 1. Before the handshake is accepted, a refusal can still be an HTTP response, which clients show.
            self._admit(address, request)
            labels = labels_of(scope, scope["headers"])
        except Exception as error:  # noqa: BLE001 - every error of a handshake becomes its response
            await refuse(problem_of(error), send)
            return
        # The handshake reaches a server inside the sandbox, so no token of the proxy may be in it.
        holds_token = self._access.holds_token
        headers = tuple(
            (name, value)
            for name, value in request.headers
            if name not in _HANDSHAKE_HEADERS and not holds_token(value)
        )
        # A URL without a rollout gets one under a name of its own, so that the rollout can end with the connection.
        name = address.rollout or secrets.token_hex(12)
        handshake = replace(request, headers=headers, method="WS")
        grant = scope.get(GRANT, ALL)
        connection = _Connection(address, name, labels, handshake, grant, scope["subprotocols"], send)
        # No await between the count and `try`: whatever ends the connection takes it back.
        self._open += 1
        try:
            await self._converse(connection, receive)
        finally:
            self._open -= 1
            if not address.rollout:
                await self._finish(self._tasks.rollouts.running.get((address.task, name)))

    def _admit(self, address: Address, request: Request) -> None:
        """Raise RefusalError if no connection may be made: 429 for too many; 400 or 404 for the endpoint or target."""
        self._access.refuse_token(request.target)
        if self._open >= self._max_open:
            raise RefusalError(429, "too-many-requests", "more connections are open than max_requests allows.")
        # The task is not opened yet, so a refused handshake writes nothing to the store.
        spec = self._tasks.spec(address.task)
        dialect_of(spec, address.endpoint)
        if address.endpoint not in spec.hosted:
            raise RefusalError(
                400, "no-websocket", f"{address.endpoint!r} has no WebSockets: only tool servers inside sandboxes have."
            )

    async def _converse(self, connection: _Connection, receive: Receive) -> None:
        offered = connection.subprotocols
        # The client must get an answer before a sandbox is there, so the first offered subprotocol is promised.
        accept = {"type": "websocket.accept", "subprotocol": offered[0] if offered else None}
        # Bounded: a full queue stops `read`, then the server's buffer fills, then TCP holds the client up.
        queue: asyncio.Queue[AsgiMessage] = asyncio.Queue(MAX_QUEUED)

        waiting_bytes, taken = 0, asyncio.Event()

        async def read() -> None:
            nonlocal waiting_bytes
            # Always wait for the next message: without a reader the server answers no ping either.
            while True:
                message = await receive()
                waiting_bytes += _size_of(message)
                await queue.put(message)
                # One message may be as large as a body, but not sixty-four.
                while waiting_bytes > MAX_QUEUED_BYTES and not queue.empty():
                    taken.clear()
                    await taken.wait()
                # The disconnect goes through the queue as well, behind the messages that the client still sent.
                if message["type"] != "websocket.receive":
                    return

        reading = start(read())
        try:
            await connection.send(accept)
            # 2. One after the other: the second message is looked up at the node that the first one led to.
            while (message := await queue.get())["type"] == "websocket.receive":
                waiting_bytes -= _size_of(message)
                taken.set()
                await self._handle(connection, message)
        except _CloseConnectionError as close:
            # A client that has left needs no close frame.
            with suppress(_ClientDisconnectedError):
                await _send(connection, {"type": "websocket.close", "code": close.code, "reason": close.reason})
        # The connection is lost, so no close frame can be sent.
        except _ClientDisconnectedError:
            pass
        finally:
            # The reader may wait in `receive` or in `put`; both end with the cancellation, and the server's task
            # waits for that.
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    # -- messages ----------------------------------------------------------------------------------------------------

    async def _handle(self, connection: _Connection, message: AsgiMessage) -> None:
        try:
            await self._answer(connection, message)
        except (_CloseConnectionError, _ClientDisconnectedError):
            raise
        except Exception as error:  # noqa: BLE001 - every error of a message becomes its reply
            problem = problem_of(error)
            count_problem(self._counts, problem)
            if problem.infrastructure:
                log.warning("message failed", path=connection.request.target, problem=problem.slug, error=repr(error))
            await self._report(connection, problem)

    async def _answer(self, connection: _Connection, message: AsgiMessage) -> None:
        text, task, name = message.get("text"), connection.address.task, connection.name
        body = message["bytes"] if text is None else text.encode()
        headers = (*connection.request.headers, _BYTES if text is None else _JSON)
        request = replace(connection.request, headers=headers, body=body, rollout=name, fresh=name)
        dialect = self._dialect(connection)
        meaning = dialect.read(request)
        # A rollout that begins now may run in another tree, whose environment reads the message again.
        if isinstance(meaning, Open):
            rollout = await self._begin(connection, meaning)
            meaning = self._dialect(connection).read(request)
            meaning = meaning.then if isinstance(meaning, Open) else meaning
        elif isinstance(meaning, Call):
            rollout = await self._tasks.rollout(task, name, connection.labels)
            # The tree may be another than the one that the first reading assumed.
            meaning = self._dialect(connection).read(request)
        if isinstance(meaning, Close):
            # In turn: a call of the same rollout on another connection may be in flight.
            await self._finish(self._tasks.rollouts.running.get((task, name)))
            await self._send_local(connection, meaning.answer)
            raise _CloseConnectionError(1000, "")
        if isinstance(meaning, Local):
            await self._send_local(connection, meaning)
            return
        assert isinstance(meaning, Call)
        call, key = self._call(connection, rollout, meaning, binary=text is None)
        # Names that the client chose are recorded under ours, and replies are turned back by this mapping.
        connection.aliases.update((ours, theirs) for theirs, ours in meaning.aliases)
        result = orjson.loads(await self._result(rollout, call, key))
        for reply in result["messages"]:
            await self._send_reply(connection, reply, dialect if meaning.bound else None, request)
        if result["close"] is not None:
            raise _CloseConnectionError(*result["close"])

    def _dialect(self, connection: _Connection) -> Declared:
        # Looked up for each message: while the connection is open, its rollout may begin, or begin again in another
        # tree.
        task = connection.address.task
        rollout = self._tasks.rollouts.running.get((task, connection.name))
        spec = self._tasks.spec(task) if rollout is None else rollout.tree.spec
        dialect = dialect_of(spec, connection.address.endpoint)
        assert isinstance(dialect, Declared)
        return dialect

    async def _begin(self, connection: _Connection, meaning: Open) -> Rollout:
        """Begin the rollout that a message opens; a rollout of the same name that has made calls ends before."""
        connection.grant.require_rollout(meaning.parent)
        tasks, task = self._tasks, connection.address.task
        before = tasks.rollouts.running.get((task, connection.name))
        # A rollout without calls is still at its start and need not end first.
        if before is not None and before.calls:
            await self._finish(before)
        connection.aliases.clear()
        return await tasks.open_rollout(task, connection.name, meaning.parent, labels=connection.labels)

    async def _finish(self, rollout: Rollout | None) -> None:
        if rollout is not None:
            await self._tasks.rollouts.finish_in_turn(rollout)

    def _call(
        self, connection: _Connection, rollout: Rollout, meaning: Call, *, binary: bool
    ) -> tuple[ToolCall, CallKey]:
        """Return a message's call and key; connections to one URL are numbered in the order of first messages."""
        counted = (rollout.id, connection.request.target)
        # A connection that goes on in another rollout (`Open`) is a new one for the sandbox.
        first = connection.numbered is None or connection.numbered[0] != rollout.id
        if first:
            number = self._connections.get(counted, 0)
            self._connections[counted] = number + 1
            connection.numbered = (rollout.id, number)
        assert connection.numbered is not None
        number, subprotocols = connection.numbered[1], connection.subprotocols
        # The content type was added for the dialect alone; a message has none.
        headers = [header for header in meaning.call.arguments["headers"] if header[0] != "content-type"]
        more = {
            "headers": headers,
            "connection": number,
            "first": first,
            "binary": binary,
            "subprotocols": subprotocols,
        }
        call = replace(meaning.call, arguments={**meaning.call.arguments, **more})
        # `first` is not part of the key: which messages came before on this connection follows from the node.
        identity = {"message": meaning.key.hex(), "connection": number, "binary": binary, "subprotocols": subprotocols}
        return call, call_key(ToolCall(call.endpoint, call.tool, identity))

    async def _result(self, rollout: Rollout, call: ToolCall, key: CallKey) -> bytes:
        step = self._step
        # A known message costs no await: the look-up takes the step.
        record = step.known(rollout, key)
        tries = 0
        while record is None:
            tries += 1
            try:
                record = (await step.run(rollout, call, key)).record
            # A sandbox that failed was closed by the lease, so the next try restores or replays into another one.
            except SandboxError as error:
                # A silent server is not tried again: it took the message, and a second sandbox would wait as long.
                if tries == MAX_TRIES or (isinstance(error, ServerError) and error.silent):
                    raise
        return self._answers.of(record).body

    # -- replies -----------------------------------------------------------------------------------------------------

    async def _send_reply(
        self, connection: _Connection, reply: dict[str, str], dialect: Declared | None, request: Request
    ) -> None:
        """Send one recorded message; dialect brings it into the client's form, if it needs one."""
        if "base64" in reply:
            await _send(connection, {"type": "websocket.send", "bytes": base64.b64decode(reply["base64"])})
            return
        text = reply["text"]
        if dialect is not None:
            text = dialect.answer(Response(200, (_JSON,), text.encode()), request).body.decode()
        await _send(connection, {"type": "websocket.send", "text": _with_names(text, connection.aliases)})

    async def _send_local(self, connection: _Connection, local: Local) -> None:
        if local.body:
            await _send(connection, {"type": "websocket.send", "text": local.body.decode()})

    async def _report(self, connection: _Connection, problem: Problem) -> None:
        """Report a problem in the server's own form, or else by closing (_CloseConnectionError)."""
        text = self._dialect(connection).trouble(problem)
        if text is None:
            # 1013 asks the client to try again later, 1008 does not. A reason has at most 123 bytes (RFC 6455, 5.5).
            code = 1013 if problem.infrastructure or problem.status in (429, 503) else 1008
            reason = f"{problem.slug}: {problem.detail}".encode()[:123].decode(errors="ignore")
            raise _CloseConnectionError(code, reason)
        await _send(connection, {"type": "websocket.send", "text": text})


def _size_of(message: AsgiMessage) -> int:
    return len(message.get("text") or message.get("bytes") or b"")


async def _send(connection: _Connection, message: AsgiMessage) -> None:
    try:
        await connection.send(message)
    # The server raises `OSError` (`ClientDisconnected`) for a send after the connection was lost.
    except OSError as error:
        raise _ClientDisconnectedError from error


async def refuse(problem: Problem, send: Send) -> None:
    """Answer a handshake with a problem instead of accepting it."""
    headers = list(problem.headers())
    # An extension of ASGI; without it, a close before the accept is a bare 403.
    await send({"type": "websocket.http.response.start", "status": problem.status, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": problem.body()})


def _with_names(text: str, aliases: dict[str, str]) -> str:
    """Return a JSON text with the client's names in place of ours; only whole strings are replaced."""
    # Most messages hold none of our names, and one search is cheaper than encoding each of them.
    if not any(ours in text for ours in aliases):
        return text
    for ours, theirs in aliases.items():
        # With its quotes: a name within a longer string is left as it is.
        text = text.replace(orjson.dumps(ours).decode(), orjson.dumps(theirs).decode())
    return text
