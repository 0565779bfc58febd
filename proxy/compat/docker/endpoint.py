"""Docker's endpoint on its connections: requests, streams in their answers, and connections that become streams."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import orjson
import structlog

from proxy.compat.docker.api import EngineApi
from proxy.compat.docker.lifecycle import Streaming
from proxy.compat.docker.responses import fault
from proxy.compat.docker.stream import HijackedConnection
from proxy.dialects.base import Local, Meaning, Request, Response
from proxy.engine import Engine
from proxy.http.address import Address
from proxy.http.answer_cache import Answers, response
from proxy.http.exchange import Exchange, raw
from proxy.http.problems import problem_of
from proxy.refusals import Problem, RefusalError
from sandboxes.process_output import ERR, frame

_STREAMS = re.compile(rb"/docker(?:/v[0-9.]+)?/(?:exec/[^/]+/start|containers/[^/]+/attach)/?")
_NAME = "docker"

log = structlog.get_logger()


class _Form:
    """See `Dialect`: errors in Docker's form. What requests mean is `EngineApi`'s matter."""

    headers_matter = True

    def read(self, request: Request) -> Meaning:
        """See `Dialect.read`."""
        raise NotImplementedError

    def answer(self, told: Response, request: Request) -> Response:  # noqa: ARG002 - nothing here depends on it
        """See `Dialect.answer`."""
        return told

    def problem(self, problem: Problem, request: Request) -> Local:  # noqa: ARG002
        """See `Dialect.problem`."""
        return fault(problem.status, problem.detail)


FORM = _Form()


class DockerFront:
    """named: returns the address of a request. count: takes note of a problem."""

    def __init__(
        self,
        engine: Engine,
        answers: Answers,
        named: Callable[[Mapping[str, Any]], Address],
        count: Callable[[Problem], None],
    ) -> None:
        self.api = EngineApi(engine, answers)
        self._named, self._count, self._most = named, count, engine.settings.max_requests
        self._under_way = 0
        engine.beside.append(self.api.aclose)

    def owns(self, scope: Mapping[str, Any]) -> bool:
        """Whether a request is for this endpoint."""
        try:
            return self._named(scope).endpoint == _NAME
        except RefusalError:
            return False

    def known(self, scope: Mapping[str, Any], body: bytes | bytearray) -> bytes | None:
        """Return the whole response to a request that needs no await; None for any other."""
        return self.api.known(scope["method"], self._named(scope), scope["query_string"], bytes(body))

    async def serve(
        self,
        scope: Mapping[str, Any],
        address: Address,
        body: bytes,
        exchange: Exchange,
    ) -> None:
        """Answer a request in HTTP's own way."""
        exchange.understood(FORM, Request(scope["method"], "/", (), b""))
        try:
            local = await self.api.answer(scope["method"], address, scope["query_string"], body)
        except Streaming as streaming:
            await exchange.stream(streaming.headers, streaming.content)
            return
        await exchange.local(local)

    async def refuse(self, scope: Mapping[str, Any], problem: Problem, exchange: Exchange) -> None:
        """Tell a problem that was met before the request was read."""
        exchange.understood(FORM, Request(scope["method"], "/", (), b""))
        await exchange.problem(problem)

    # -- connections that become streams -----------------------------------------------------------------------------

    def hijacks(self, scope: Mapping[str, Any]) -> bool:
        """Whether a request, of which the head is there, may take its connection over."""
        return scope["method"] == "POST" and _STREAMS.search(scope["raw_path"]) is not None

    def takes_over(self, scope: Mapping[str, Any], body: bytes) -> bool:
        """Whether it does, now that all of it is there."""
        try:
            detached = scope["raw_path"].endswith(b"/start") and bool(orjson.loads(body or b"{}").get("Detach"))
            return not detached and self.owns(scope)
        except (orjson.JSONDecodeError, AttributeError):
            # It gets its error as any request does.
            return False

    def is_hasty(self, scope: Mapping[str, Any]) -> bool:
        """Whether a request's client loses what comes with the head of a stream."""
        return any(name == b"user-agent" and value.startswith(b"docker-sdk-python") for name, value in scope["headers"])

    def answered(self, scope: Mapping[str, Any], body: bytes, wire: HijackedConnection) -> bool:
        """Answer at once, if no await is needed; otherwise False, and `hijack` it."""
        try:
            return self.api.hijacked_at_once(self._named(scope), body, wire)
        except Exception as error:  # noqa: BLE001 - the ordinary way meets it again, and tells it
            log.debug("not answered at once", error=repr(error))
            return False

    async def hijack(self, scope: Mapping[str, Any], body: bytes, wire: HijackedConnection) -> None:
        """Answer a request that has taken its connection over; end the connection after it."""
        self._under_way += 1
        try:
            self._require_room()
            await self.api.hijacked(self._named(scope), scope["query_string"], body, wire)
        except Exception as error:  # noqa: BLE001 - a request ends here
            await self._tell(scope, error, wire)
        finally:
            self._under_way -= 1
            wire.close()

    def _require_room(self) -> None:
        if self._under_way > self._most:
            raise RefusalError(429, "too-many-requests", "more calls are under way than max_requests allows.")

    async def _tell(self, scope: Mapping[str, Any], error: Exception, wire: HijackedConnection) -> None:
        problem = problem_of(error)
        self._count(problem)
        if problem.status >= 500:
            unforeseen = error if problem.slug == "defect" else None
            log.error("call failed", path=scope["path"], problem=problem.slug, error=repr(error), exc_info=unforeseen)
        if wire.opened:
            await wire.send(frame(ERR, f"forkpoint: {problem.detail}\n".encode()))
            return
        local = fault(problem.status, problem.detail)
        headers = [*raw(local.headers), (b"content-length", b"%d" % len(local.body)), (b"connection", b"close")]
        wire.refuse(response(local.status, headers, local.body))
