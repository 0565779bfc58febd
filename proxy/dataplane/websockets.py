"""WebSockets of agents: each message is a call, and what the server says to it the answer.

A message's call is known, shared and recorded like any other; the connection to the server lives in the sandbox, and
none is made while the tree knows the answers. A rollout that the URL does not name is that of its connection, and ends
with it.
"""

import asyncio
import base64
import secrets
from dataclasses import dataclass, field, replace

import orjson
import structlog

from proxy.dialects import dialect_of
from proxy.dialects.base import Call, Close, Local, Meaning, Open, Request, Response
from proxy.dialects.rule_based import Declared
from proxy.engine import Engine
from proxy.http.address import Address
from proxy.http.answer_cache import Answers
from proxy.http.asgi import AsgiMessage, Receive, Scope, Send
from proxy.http.lru_cache import LruCache
from proxy.http.problems import count_problem, problem_of
from proxy.refusals import Problem, RefusalError
from proxy.tree.keys import CallKey, call_key
from proxy.tree.rollout import Rollout
from sandboxes.calls import ToolCall
from sandboxes.errors import SandboxError, ServerError

log = structlog.get_logger()

WAITING = 64
"""Messages of one connection that wait; then its client has to."""
TRIES = 3
"""How often a message is tried in another sandbox: its client would hear of trouble and not try again."""
_REMEMBERED = 8192
_JSON = ("content-type", "application/json")
_BYTES = ("content-type", "application/octet-stream")
_HANDSHAKE = frozenset({
    "connection", "upgrade", "sec-websocket-key", "sec-websocket-version", "sec-websocket-extensions", "content-type",
    "content-length", "sec-websocket-protocol",
})  # fmt: skip


class _Gone(Exception):  # noqa: N818 - what the client did
    """The client closed its connection."""


class _Finished(Exception):  # noqa: N818 - what there is to do
    """The connection is to be closed, with this code and reason."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code, self.reason = code, reason


@dataclass(slots=True)
class _Line:
    """One client's connection. name: of its rollout. said: to which rollout it has spoken, and as which of its
    connections. aliases: what we call what its client has named.
    """

    address: Address
    name: str
    request: Request
    offered: list[str]
    send: Send
    said: tuple[int, int] | None = None
    aliases: dict[str, str] = field(default_factory=dict)


class Sockets:
    """All connections of one data plane."""

    def __init__(self, engine: Engine, answers: Answers) -> None:
        self._engine, self._answers = engine, answers
        self._open = 0
        self._connections: LruCache[tuple[int, str], int] = LruCache(_REMEMBERED)

    async def serve(self, address: Address, request: Request, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection until either side closes it. request: its handshake."""
        await receive()
        try:
            self._admit(address)
        except Exception as error:  # noqa: BLE001 - a request ends here
            await refuse(problem_of(error), send)
            return
        headers = tuple(header for header in request.headers if header[0] not in _HANDSHAKE)
        name = address.rollout or secrets.token_hex(12)
        line = _Line(address, name, replace(request, headers=headers, method="WS"), scope["subprotocols"], send)
        self._open += 1
        try:
            await self._converse(line, receive)
        finally:
            self._open -= 1
            if not address.rollout:
                await self._finish(self._engine.tasks.rollouts.get((address.task, name)))

    def _admit(self, address: Address) -> None:
        """Raise where there is nobody to talk to.

        Raises:
            Refused: so it is.
        """
        if self._open >= self._engine.settings.max_requests:
            raise RefusalError(429, "too-many-requests", "more connections are open than max_requests allows.")
        spec = self._engine.tasks.spec(address.task)
        dialect_of(spec, address.endpoint)
        if address.endpoint not in spec.hosted:
            raise RefusalError(
                400, "no-websocket", f"{address.endpoint!r} has no WebSockets: tool servers inside sandboxes have."
            )

    async def _converse(self, line: _Line, receive: Receive) -> None:
        accepted = {"type": "websocket.accept", "subprotocol": line.offered[0] if line.offered else None}
        waiting: asyncio.Queue[AsgiMessage] = asyncio.Queue(WAITING)

        async def listen() -> None:
            # Always waiting for the next one: the server reads nothing, and answers no ping, while nobody does.
            while True:
                message = await receive()
                await waiting.put(message)
                if message["type"] != "websocket.receive":
                    return

        listening = asyncio.ensure_future(listen())
        try:
            await line.send(accepted)
            while (message := await waiting.get())["type"] == "websocket.receive":
                await self._hear(line, message)
        except _Finished as end:
            await _sent(line, {"type": "websocket.close", "code": end.code, "reason": end.reason})
        except _Gone:
            pass
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)

    # -- messages ----------------------------------------------------------------------------------------------------

    async def _hear(self, line: _Line, message: AsgiMessage) -> None:
        """Answer one message.

        Raises:
            _Finished: the connection ends with it. _Gone: the client went away.
        """
        try:
            await self._answer(line, message)
        except (_Finished, _Gone):
            raise
        except Exception as error:  # noqa: BLE001 - a message ends here
            problem = problem_of(error)
            count_problem(self._engine.counts, problem)
            if problem.infrastructure:
                log.warning("message failed", path=line.request.target, problem=problem.slug, error=repr(error))
            await self._tell_problem(line, problem)

    async def _answer(self, line: _Line, message: AsgiMessage) -> None:
        text = message.get("text")
        body = message["bytes"] if text is None else text.encode()
        kind = _BYTES if text is None else _JSON
        request = replace(line.request, headers=(*line.request.headers, kind), body=body, rollout=line.name)
        request = replace(request, fresh=line.name)
        dialect = self._dialect(line)
        meaning = dialect.read(request)
        if isinstance(meaning, Open):
            rollout = await self._begun(line, meaning)
            # It may run in another tree than the last one did.
            meaning = self._opened(self._dialect(line).read(request))
        elif isinstance(meaning, Call):
            rollout = await self._engine.tasks.rollout(line.address.task, line.name)
            meaning = self._dialect(line).read(request)
        if isinstance(meaning, Close):
            await self._finish(self._engine.tasks.rollouts.get((line.address.task, line.name)))
            await self._say_local(line, meaning.answer)
            raise _Finished(1000, "")
        if isinstance(meaning, Local):
            await self._say_local(line, meaning)
            return
        assert isinstance(meaning, Call)
        call, key = self._placed(line, rollout, meaning, binary=text is None)
        for theirs, ours in meaning.aliases:
            line.aliases[ours] = theirs
        told = orjson.loads(await self._asked(rollout, call, key))
        for one in told["messages"]:
            await self._say(line, one, dialect if meaning.bound else None, request)
        if told["close"] is not None:
            raise _Finished(*told["close"])

    def _opened(self, meaning: Meaning) -> Meaning:
        return meaning.then if isinstance(meaning, Open) else meaning

    def _dialect(self, line: _Line) -> Declared:
        rollout = self._engine.tasks.rollouts.get((line.address.task, line.name))
        spec = self._engine.tasks.spec(line.address.task) if rollout is None else rollout.tree.spec
        dialect = dialect_of(spec, line.address.endpoint)
        assert isinstance(dialect, Declared)
        return dialect

    async def _begun(self, line: _Line, meaning: Open) -> Rollout:
        """Return the rollout that a message opens: at the root, whatever its name stood for before."""
        tasks = self._engine.tasks
        before = tasks.rollouts.get((line.address.task, line.name))
        if before is not None and before.calls:
            await self._finish(before)
        line.aliases.clear()
        return await tasks.open_rollout(line.address.task, line.name, meaning.parent)

    async def _finish(self, rollout: Rollout | None) -> None:
        if rollout is not None:
            await self._engine.tasks.finish_in_turn(rollout)

    def _placed(self, line: _Line, rollout: Rollout, meaning: Call, *, binary: bool) -> tuple[ToolCall, CallKey]:
        """Return a message's call, with what its sandbox must know of the connection, and its key."""
        place = (rollout.id, line.request.target)
        first = line.said is None or line.said[0] != rollout.id
        if first:
            number = self._connections.get(place, 0)
            self._connections[place] = number + 1
            line.said = (rollout.id, number)
        assert line.said is not None
        number = line.said[1]
        headers = [header for header in meaning.call.arguments["headers"] if header[0] != "content-type"]
        more = {
            "headers": headers,
            "connection": number,
            "first": first,
            "binary": binary,
            "subprotocols": line.offered,
        }
        call = replace(meaning.call, arguments={**meaning.call.arguments, **more})
        told = {"message": meaning.key.hex(), "connection": number, "binary": binary, "subprotocols": line.offered}
        return call, call_key(ToolCall(call.endpoint, call.tool, told))

    async def _asked(self, rollout: Rollout, call: ToolCall, key: CallKey) -> bytes:
        """Return what answers a call, from the tree or from its server."""
        step = self._engine.step
        record = step.known(rollout, key)
        tries = 0
        while record is None:
            tries += 1
            try:
                record = (await step.run(rollout, call, key)).record
            except SandboxError as error:
                if tries == TRIES or (isinstance(error, ServerError) and error.silent):
                    raise
        return self._answers.of(record).body

    # -- what is said ------------------------------------------------------------------------------------------------

    async def _say(self, line: _Line, told: dict[str, str], dialect: Declared | None, request: Request) -> None:
        if "base64" in told:
            await _sent(line, {"type": "websocket.send", "bytes": base64.b64decode(told["base64"])})
            return
        text = told["text"]
        if dialect is not None:
            text = dialect.answer(Response(200, (_JSON,), text.encode()), request).body.decode()
        await _sent(line, {"type": "websocket.send", "text": _with_names(text, line.aliases)})

    async def _say_local(self, line: _Line, local: Local) -> None:
        if local.body:
            await _sent(line, {"type": "websocket.send", "text": local.body.decode()})

    async def _tell_problem(self, line: _Line, problem: Problem) -> None:
        """Tell what went wrong in the server's own form; where its dialect has none, by closing.

        Raises:
            _Finished: there is none.
        """
        told = self._dialect(line).trouble(problem)
        if told is None:
            code = 1013 if problem.infrastructure or problem.status in (429, 503) else 1008
            raise _Finished(code, f"{problem.slug}: {problem.detail}".encode()[:123].decode(errors="ignore"))
        await _sent(line, {"type": "websocket.send", "text": told})


async def _sent(line: _Line, message: AsgiMessage) -> None:
    """Send message.

    Raises:
        _Gone: nobody is there.
    """
    try:
        await line.send(message)
    except OSError as error:
        raise _Gone from error


async def refuse(problem: Problem, send: Send) -> None:
    """Answer a handshake with a problem."""
    headers = list(problem.headers())
    await send({"type": "websocket.http.response.start", "status": problem.status, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": problem.body()})


def _with_names(text: str, aliases: dict[str, str]) -> str:
    """Return a JSON text with the client's names for ours, where one is all of a string."""
    if not any(ours in text for ours in aliases):
        return text
    for ours, theirs in aliases.items():
        text = text.replace(orjson.dumps(ours).decode(), orjson.dumps(theirs).decode())
    return text
