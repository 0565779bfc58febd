"""The data plane: a bare ASGI application in front of the control plane.

Routing, validation models and response classes of a web framework cost more than a whole hit does (measured: a
framework route serves half the requests of a bare application), so the way of a hit has none of them.
"""

from collections.abc import Awaitable, Callable, Hashable, Mapping, MutableMapping
from typing import Any

import structlog

from proxy.answers import AT_ONCE, HIT_STATUS, Answers, RawHeaders
from proxy.canonical import CallKey, call_key
from proxy.dialects import DIALECTS
from proxy.engine import Engine
from proxy.errors import Problem, Refused, problem_of
from proxy.forest import Outcome, Rollout
from proxy.step import Answer
from proxy.timing import Timing
from proxy.wire import Address, address_of
from sandboxes.calls import ToolCall

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

log = structlog.get_logger()

_CACHE_STATUS = {
    # After waiting for its turn a call may find its answer.
    Outcome.HIT: HIT_STATUS,
    Outcome.WAIT: b"forkpoint; fwd=miss; collapsed",
    Outcome.MISS: b"forkpoint; fwd=miss; stored",
    Outcome.BYPASS: b"forkpoint; fwd=bypass",
}
_REMEMBERED = 8192
_REMEMBERED_BYTES = 2048
"""How many addresses and calls are remembered, and the largest body of such a call."""


class _Hangup(Exception):  # noqa: N818 - what the client did
    """The client left before its request was complete."""


class DataPlane:
    """Answers `/t/…` and `/e/…`; anything else goes to the application behind it."""

    def __init__(self, engine: Engine, behind: App) -> None:
        self.engine, self._behind = engine, behind
        self._answers = Answers(engine.store, budget_bytes=engine.settings.answer_memory_bytes)
        self._under_way = 0
        self._addresses: dict[bytes, Address] = {}
        self._calls: dict[Hashable, tuple[ToolCall, CallKey]] = {}

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(("/t/", "/e/")):
            await self._behind(scope, receive, send)
            return
        self._under_way += 1
        try:
            await self._serve(scope, receive, send)
        except _Hangup:
            pass
        except Exception as error:  # noqa: BLE001 - a request ends here
            await self._refuse(scope, error, send)
        finally:
            self._under_way -= 1

    def known(self, scope: Mapping[str, Any], body: bytes | bytearray) -> bytes | None:
        """Return the whole HTTP response to a call that the tree knows, and take its step; None for anything else.

        What is wrong with a request, and what fails, is told on the ordinary way.
        """
        address = self._addresses.get(scope["raw_path"])
        if address is None or len(body) > self.engine.settings.max_body_bytes:
            return None
        rollout = self.engine.tasks.rollouts.get((address.task, address.rollout))
        if rollout is None:
            return None
        try:
            _, key = self._call(scope, address, bytes(body), rollout)
            record = self.engine.step.known(rollout, key)
            return None if record is None else self._answers.of(record).hit
        except Exception as error:  # noqa: BLE001 - the ordinary way meets it again, and tells it
            log.debug("not answered at once", error=repr(error))
            return None

    async def _serve(self, scope: Message, receive: Receive, send: Send) -> None:
        if self._under_way > self.engine.settings.max_requests:
            raise Refused(
                429, "too-many-requests", "more calls are under way than max_requests allows. Try again soon."
            )
        address = self._address(scope)
        if address.endpoint not in DIALECTS:
            raise Refused(404, "no-such-endpoint", f"endpoints here are: {', '.join(sorted(DIALECTS))}.")
        body = await self._body(receive)
        rollout = self.engine.tasks.rollouts.get((address.task, address.rollout)) or await self._rollout(address)
        call, key = self._call(scope, address, body, rollout)
        record = self.engine.step.known(rollout, key)
        if record is not None:
            ready = self._answers.of(record)
            headers = ready.headers + AT_ONCE
        else:
            answer = await self.engine.step.run(rollout, call, key)
            ready = self._answers.of(answer.record)
            headers = ready.headers + _told(answer)
        await send({"type": "http.response.start", "status": ready.status, "headers": headers})
        await send({"type": "http.response.body", "body": ready.body})

    def _call(
        self, scope: Mapping[str, Any], address: Address, body: bytes, rollout: Rollout
    ) -> tuple[ToolCall, CallKey]:
        """Parse a call and find its key. Rollouts of a group send the same bytes, so the last ones are remembered."""
        spec = rollout.tree.spec
        sent = (address.endpoint, address.path, scope["method"], scope["query_string"], body, rollout.tree.id)
        known = self._calls.get(sent)
        if known is None:
            query = scope["query_string"].decode("latin-1")
            call = DIALECTS[address.endpoint](scope["method"], address.path, query, body, spec)
            known = call, call_key(call)
            if len(body) <= _REMEMBERED_BYTES:
                _remember(self._calls, sent, known)
        return known

    def _address(self, scope: Message) -> Address:
        """Read who asks. A rollout's URL is the same call after call, so the last ones are remembered."""
        raw_path = scope["raw_path"]
        known = self._addresses.get(raw_path)
        if known is None:
            known = address_of(raw_path, scope["headers"])
            if raw_path.startswith(b"/t/"):
                _remember(self._addresses, raw_path, known)
        return known

    async def _rollout(self, address: Address) -> Rollout:
        task, name = address.task, address.rollout
        if address.token:
            named = self.engine.store.rollout_of_token(address.token)
            if named is None:
                raise Refused(
                    401, "token", "no running rollout has this token. POST /api/v1/tasks/{task}/rollouts gives one."
                )
            task, name = named
        return await self.engine.tasks.rollout(task, name)

    async def _body(self, receive: Receive) -> bytes:
        most = self.engine.settings.max_body_bytes
        message = await receive()
        body: bytes = message.get("body", b"")
        if not message.get("more_body") and message["type"] == "http.request" and len(body) <= most:
            return body
        return await _rest(message, receive, most)

    async def _refuse(self, scope: Message, error: Exception, send: Send) -> None:
        problem = problem_of(error)
        self._count(problem)
        if problem.status >= 500:
            log.error(
                "call failed",
                path=scope["path"],
                problem=problem.slug,
                error=repr(error),
                exc_info=_unforeseen(problem, error),
            )
        body = problem.body()
        headers = [*problem.headers(), (b"content-length", b"%d" % len(body))]
        if problem.status == 413:
            # What is left of the request was not read, so the connection cannot be used again.
            headers.append((b"connection", b"close"))
        await send({"type": "http.response.start", "status": problem.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _count(self, problem: Problem) -> None:
        if problem.infrastructure:
            self.engine.counts.failure(problem.slug)
        else:
            self.engine.counts.refusals[problem.slug] += 1


def _remember(memory: dict[Any, Any], key: Hashable, value: object) -> None:
    if len(memory) >= _REMEMBERED:
        memory.clear()
    memory[key] = value


def _unforeseen(problem: Problem, error: Exception) -> Exception | None:
    return error if problem.slug == "defect" else None


async def _rest(message: Message, receive: Receive, most: int) -> bytes:
    chunks, size = [], 0
    while True:
        if message["type"] == "http.disconnect":
            raise _Hangup
        chunks.append(message.get("body", b""))
        size += len(chunks[-1])
        if size > most:
            raise Refused(413, "body", f"the body is larger than max_body_bytes, {most}. Send less, or raise it.")
        if not message.get("more_body"):
            return b"".join(chunks)
        message = await receive()


def _told(answer: Answer) -> RawHeaders:
    return [(b"cache-status", _CACHE_STATUS[answer.outcome]), (b"server-timing", _server_timing(answer.timing))]


def _server_timing(timing: Timing) -> bytes:
    parts = (
        ("tool", timing.tool_s),
        ("restore", timing.restore_s),
        ("replay", timing.replay_s),
        ("wait", timing.wait_s),
    )
    return ", ".join(f"{name};dur={seconds * 1000:.3f}" for name, seconds in parts).encode()
