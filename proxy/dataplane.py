"""The data plane: a bare ASGI application in front of the control plane.

Routing, validation models and response classes of a web framework cost more than a whole hit does (measured: a
framework route serves half the requests of a bare application), so the way of a hit has none of them.
"""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import structlog

from proxy.answers import Answers, RawHeaders
from proxy.canonical import call_key
from proxy.dialects import DIALECTS
from proxy.engine import Engine
from proxy.errors import Problem, Refused, problem_of
from proxy.forest import Outcome, Rollout
from proxy.step import Answer
from proxy.timing import Timing
from proxy.wire import Address, address_of

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

log = structlog.get_logger()

_CACHE_STATUS = {
    Outcome.HIT: b"forkpoint; hit",
    Outcome.WAIT: b"forkpoint; fwd=miss; collapsed",
    Outcome.MISS: b"forkpoint; fwd=miss; stored",
    Outcome.BYPASS: b"forkpoint; fwd=bypass",
}
_AT_ONCE: RawHeaders = [
    (b"cache-status", _CACHE_STATUS[Outcome.HIT]),
    (b"server-timing", b"tool;dur=0, restore;dur=0, replay;dur=0, wait;dur=0"),
]


class _Hangup(Exception):  # noqa: N818 - what the client did
    """The client left before its request was complete."""


class DataPlane:
    """Answers `/t/…` and `/e/…`; anything else goes to the application behind it."""

    def __init__(self, engine: Engine, behind: App) -> None:
        self._engine, self._behind = engine, behind
        self._answers = Answers(engine.store, budget_bytes=engine.settings.answer_memory_bytes)
        self._under_way = 0

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

    async def _serve(self, scope: Message, receive: Receive, send: Send) -> None:
        if self._under_way > self._engine.settings.max_requests:
            raise Refused(
                429, "too-many-requests", "more calls are under way than max_requests allows. Try again soon."
            )
        address = address_of(scope["raw_path"], scope["headers"])
        parse = DIALECTS.get(address.endpoint)
        if parse is None:
            raise Refused(404, "no-such-endpoint", f"endpoints here are: {', '.join(sorted(DIALECTS))}.")
        body = await self._body(receive)
        rollout = self._engine.tasks.rollouts.get((address.task, address.rollout)) or await self._rollout(address)
        call = parse(scope["method"], address.path, scope["query_string"].decode("latin-1"), body, rollout.tree.spec)
        key = call_key(call)
        record = self._engine.step.known(rollout, key)
        if record is not None:
            headers = _AT_ONCE
        else:
            answer = await self._engine.step.run(rollout, call, key)
            record, headers = answer.record, _told(answer)
        ready = self._answers.of(record)
        await send({"type": "http.response.start", "status": ready.status, "headers": ready.headers + headers})
        await send({"type": "http.response.body", "body": ready.body})

    async def _rollout(self, address: Address) -> Rollout:
        task, name = address.task, address.rollout
        if address.token:
            named = self._engine.store.rollout_of_token(address.token)
            if named is None:
                raise Refused(
                    401, "token", "no running rollout has this token. POST /api/v1/tasks/{task}/rollouts gives one."
                )
            task, name = named
        return await self._engine.tasks.rollout(task, name)

    async def _body(self, receive: Receive) -> bytes:
        most = self._engine.settings.max_body_bytes
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
            self._engine.counts.failure(problem.slug)
        else:
            self._engine.counts.refusals[problem.slug] += 1


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
