"""The data plane: a bare ASGI application in front of the control plane.

Routing, validation models and response classes of a web framework cost more than a whole hit does (measured: a
framework route serves half the requests of a bare application), so the way of a hit has none of them.
"""

import asyncio
import secrets
import time
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import structlog

from proxy.compat.docker.endpoint import DockerFront
from proxy.compat.e2b.endpoint import E2b
from proxy.dataplane.websockets import Sockets, refuse
from proxy.dialects import dialect_of
from proxy.dialects.base import Call, Cancel, Close, Dialect, Local, Meaning, Open, Request
from proxy.dialects.rule_based import Declared
from proxy.engine import Engine
from proxy.http.access import ALL, GRANT
from proxy.http.address import Address, address_of
from proxy.http.answer_cache import AT_ONCE, HIT_STATUS, RawHeaders, response
from proxy.http.asgi import AsgiApp, Receive, Scope, Send
from proxy.http.browser_guard import BROWSERS, refuse_foreign
from proxy.http.exchange import Exchange, raw, told_by
from proxy.http.problems import problem_of
from proxy.http.sse import EventStream
from proxy.http.uploads import ClientDisconnectedError, uploading
from proxy.refusals import Problem, RefusalError
from proxy.step import Answer
from proxy.telemetry.timing import Timing
from proxy.tree.keys import CallKey
from proxy.tree.rollout import Outcome, Rollout
from sandboxes.spec import EnvironmentSpec

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
_RESENT = 4096
"""How many named requests are remembered, in case they are sent again."""


class DataPlane:
    """Answers `/t/…` and `/e/…`; anything else goes to the application behind it."""

    def __init__(self, engine: Engine, behind: AsgiApp) -> None:
        self.engine, self._behind = engine, behind
        self._answers, self._access, self._closed = engine.answers, engine.access, engine.access.needs_token
        self._endpoints = engine.counts.endpoints
        self._sockets = Sockets(engine, self._answers)
        self._e2b = E2b(engine)
        self._under_way = 0
        self._addresses: dict[bytes, Address] = {}
        self._calls: dict[Hashable, Call] = {}
        self._dialects: dict[tuple[int, str], Dialect] = {}
        self._constants: dict[tuple[int, CallKey], Answer] = {}
        self._cancels: dict[tuple[int, str], EventStream] = {}
        self.docker = DockerFront(engine, self._answers, self._asked_by, self._count)
        self._resent: OrderedDict[tuple[int, str], tuple[CallKey, asyncio.Future[Answer]]] = OrderedDict()
        self._hosts: dict[bytes, bool] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan" and not await self._admitted(scope, receive, send):
            return
        if scope["type"] == "lifespan" or not scope["path"].startswith(("/t/", "/e/", "/ng-rollout/")):
            await self._behind(scope, receive, send)
            return
        if scope["type"] == "websocket":
            await self._converse(scope, receive, send)
            return
        self._under_way += 1
        exchange = Exchange(send, receive)
        try:
            await self._serve(scope, receive, exchange)
        except ClientDisconnectedError:
            pass
        except Exception as error:  # noqa: BLE001 - a request ends here
            await self._refuse(scope, error, exchange)
        finally:
            self._under_way -= 1

    async def _converse(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope = {**scope, "method": "GET"}
        try:
            self._refuse_foreign(scope)
            address = self._named(self._address(scope))
        except RefusalError as refused:
            self._count(problem_of(refused))
            await receive()
            await refuse(problem_of(refused), send)
            return
        await self._sockets.serve(address, self._request(scope, address, b""), scope, receive, send)

    def known(self, scope: Scope, body: bytes | bytearray) -> bytes | None:
        """Return the whole HTTP response to a call that the tree knows, and take its step; None for anything else.

        What is wrong with a request, and what fails, is told on the ordinary way.
        """
        if self._closed and not self._admits(scope):
            return None
        if b"/docker" in scope["raw_path"] and self.docker.owns(scope):
            return self.docker.known(scope, body)
        address = self._addresses.get(scope["raw_path"])
        if address is None or address.endpoint == "e2b" or not self._familiar(scope):
            return None
        if len(body) > self.engine.settings.max_body_bytes:
            return None
        rollout = self.engine.tasks.rollouts.get((address.task, address.rollout))
        if rollout is None:
            return None
        try:
            dialect = self._dialect_in(rollout, address.endpoint)
            call = self._call(scope, address, bytes(body), rollout, dialect)
            if not isinstance(call, Call) or call.request_id or call.constant or call.routed:
                return None
            record = self.engine.step.known(rollout, call.key)
            if record is None:
                return None
            self._endpoints[call.call.endpoint][Outcome.HIT] += 1
            ready = self._answers.of(record)
            if not (ready.placed or call.bound):
                return ready.hit
            told = told_by(ready, dialect, self._request(scope, address, bytes(body)))
            return response(told.status, raw(told.headers) + ready.headers[ready.told :] + AT_ONCE, told.body)
        except Exception as error:  # noqa: BLE001 - the ordinary way meets it again, and tells it
            log.debug("not answered at once", error=repr(error))
            return None

    def hijacks(self, scope: Scope) -> bool:
        """Say whether a request, that may be answered, takes its connection over."""
        return self.docker.hijacks(scope) and (not self._closed or self._admits(scope))

    def _admits(self, scope: Scope) -> bool:
        """Say whether a request may be answered; who is refused is told on the ordinary way."""
        if GRANT in scope:
            return True
        try:
            scope[GRANT] = self._access.admit(scope, self.engine.store.rollouts.by_token)
        except RefusalError:
            return False
        return True

    async def _admitted(self, scope: Scope, receive: Receive, send: Send) -> bool:
        """Note what a request may see, and say whether it goes on; tell who is refused."""
        if GRANT in scope:
            return True
        try:
            scope[GRANT] = self._access.admit(scope, self.engine.store.rollouts.by_token)
        except RefusalError as error:
            problem = problem_of(error)
            self._count(problem)
            if scope["type"] == "websocket":
                await receive()
                await refuse(problem, send)
            else:
                await self._turn_away(scope, problem, Exchange(send, receive))
            return False
        return True

    async def _turn_away(self, scope: Scope, problem: Problem, exchange: Exchange) -> None:
        """Tell who is not admitted, in the form that clients of a Docker daemon or of E2B read."""
        address = None
        if scope["path"].startswith(("/t/", "/e/")):
            with suppress(RefusalError):
                address = address_of(scope["raw_path"], scope["headers"])
        if address is not None and address.endpoint == "e2b":
            await self._e2b.refuse(self._request(scope, address, b""), problem, exchange.send)
        elif address is not None and address.endpoint == "docker":
            await self.docker.refuse(scope, problem, exchange)
        else:
            await exchange.problem(problem)

    async def _serve(self, scope: Scope, receive: Receive, exchange: Exchange) -> None:
        if self._under_way > self.engine.settings.max_requests:
            raise RefusalError(
                429, "too-many-requests", "more calls are under way than max_requests allows. Try again soon."
            )
        _refuse_smuggling(scope)
        self._refuse_foreign(scope)
        address = self._named(self._address(scope))
        message = await receive()
        if not message.get("more_body") and len(message.get("body", b"")) <= self.engine.settings.max_body_bytes:
            if message["type"] == "http.request":
                await self._respond(scope, address, message.get("body", b""), exchange)
            return
        most, folder = self.engine.settings.max_body_bytes, self.engine.settings.data
        with uploading(
            folder, most=most, spools=_passes(self.engine.tasks.spec(address.task), address.endpoint)
        ) as upload:
            body = await upload.receive(receive, message)
            await self._respond(scope, address, body, exchange, upload.path)

    async def _respond(
        self, scope: Scope, address: Address, body: bytes, exchange: Exchange, upload: Path | None = None
    ) -> None:
        """Answer a request. upload: where its body lies, if not in body."""
        if address.endpoint == "docker":
            await self.docker.serve(scope, address, body, exchange)
            return
        request = self._request(scope, address, body)
        if address.endpoint == "e2b":
            problem = await self._e2b.serve(address.task, request, exchange.send, exchange.receive)
            if problem is not None:
                self._count(problem)
            return
        rollout = self.engine.tasks.rollouts.get((address.task, address.rollout))
        # Nothing is opened for one that is new: what is answered at once must not wait for that.
        spec = self.engine.tasks.spec(address.task) if rollout is None else rollout.tree.spec
        dialect = dialect_of(spec, address.endpoint) if rollout is None else self._dialect_in(rollout, address.endpoint)
        exchange.understood(dialect, request)
        if isinstance(dialect, Declared) and (task := dialect.task(request)) not in ("", address.task):
            scope.get(GRANT, ALL).require(task)
            await self._respond(scope, await self._routed(address, task, spec), body, exchange, upload)
            return
        meaning = dialect.read(request)
        if isinstance(meaning, Call) and meaning.constant:
            await self._constant(address.task, _with_upload(meaning, upload, spec), exchange)
            return
        if rollout is None and isinstance(meaning, Call):
            rollout = await self._begun(address.task, meaning, address.rollout)
            if rollout.tree.spec != spec:
                # It runs in the tree of an older spec of its task.
                dialect = self._dialect_in(rollout, address.endpoint)
                exchange.understood(dialect, request)
                meaning = dialect.read(request)
        meaning = _with_upload(meaning, upload, spec if rollout is None else rollout.tree.spec)
        await self._act(address.task, meaning, exchange, rollout)

    async def _routed(self, address: Address, task: str, spec: EnvironmentSpec) -> Address:
        """Return address with the task that its request names; one that is new has the spec of the one in the URL."""
        if self.engine.store.tasks.get(task) is None:
            await self.engine.tasks.put(task, spec)
        return replace(address, task=task)

    async def _begun(self, task: str, call: Call, name: str) -> Rollout:
        """Return the rollout of a call; a new one begins, unless its name is one that only we give."""
        if not call.existing:
            return await self.engine.tasks.rollout(task, call.rollout or name)
        running = await self.engine.tasks.running(task, call.rollout)
        if running is None:
            raise RefusalError(404, "session", "this session has ended, or never was. Begin another one.")
        return running

    async def _constant(self, task: str, call: Call, exchange: Exchange) -> None:
        """Answer what is the same at all states of a task: asked once, by a rollout of its own that no URL can name."""
        tree = (await self.engine.tasks.open(task)).tree
        name = (tree.id, call.key)
        answer = self._constants.get(name)
        if answer is not None:
            self.engine.counts.answered(Outcome.HIT, answer.record.seconds)
            await exchange.answer(self._answers.of(answer.record), AT_ONCE)
            return
        # One for each call: they need not wait for one another.
        asking = await self.engine.tasks.rollout(task, f"~{call.key.hex()[:32]}")
        listener = exchange.listener(call)
        try:
            running = asyncio.ensure_future(self.engine.step.run(asking, call.call, call.key, listener))
            answer = await exchange.until(running, call)
        finally:
            if not asking.waiting:
                await self.engine.tasks.finish(asking)
        if not answer.record.private:
            _remember(self._constants, name, answer)
        if await exchange.passed():
            return
        await exchange.answer(self._answers.of(answer.record), _told(answer))

    async def _act(self, task: str, meaning: Meaning, exchange: Exchange, rollout: Rollout | None) -> None:
        tasks = self.engine.tasks
        match meaning:
            case Local():
                await exchange.local(meaning)
            case Close():
                ended = rollout or tasks.rollouts.get((task, meaning.rollout))
                if ended is not None:
                    async with ended.turn:
                        await tasks.finish(ended)
                await exchange.local(meaning.answer)
            case Cancel():
                wanting = rollout or tasks.rollouts.get((task, meaning.rollout))
                events = None if wanting is None else self._cancels.get((wanting.id, meaning.name))
                if events is not None:
                    events.cancel()
                await exchange.local(meaning.answer)
            case Open():
                begun = await tasks.opened(task, meaning.rollout, meaning.parent, meaning.spec)
                exchange.extra = meaning.headers
                await self._act(task, meaning.then, exchange, begun)
            case Call():
                assert rollout is not None
                await self._answer(rollout, meaning, exchange)

    async def _answer(self, rollout: Rollout, call: Call, exchange: Exchange) -> None:
        """Answer a call: from the tree, from the same request sent before, or by running it."""
        step, name = self.engine.step, (rollout.id, call.request_id)
        sent = self._resent.get(name) if call.request_id else None
        if sent is not None and sent[0] == call.key:
            answer = await asyncio.shield(sent[1])
            await exchange.answer(self._answers.of(answer.record), _told(answer))
            return
        record = step.known(rollout, call.key)
        if record is not None:
            self._endpoints[call.call.endpoint][Outcome.HIT] += 1
            if call.request_id:
                done = asyncio.get_running_loop().create_future()
                done.set_result(Answer(record, Outcome.HIT, Timing()))
                self._remember_sent(name, call.key, done)
            await exchange.answer(self._answers.of(record), AT_ONCE)
            self.engine.counts.hit_s.observe(time.perf_counter() - exchange.began)
            return
        listener = exchange.listener(call)
        running = asyncio.ensure_future(step.run(rollout, call.call, call.key, listener, commutes=call.commutes))
        if call.request_id:
            self._remember_sent(name, call.key, running)
        with self._cancellable(rollout, call, exchange.events):
            answer = await exchange.until(running, call)
        self._endpoints[call.call.endpoint][answer.outcome] += 1
        if not await exchange.passed():
            await exchange.answer(self._answers.of(answer.record), _told(answer))

    @contextmanager
    def _cancellable(self, rollout: Rollout, call: Call, events: EventStream | None) -> Iterator[None]:
        """Let a call be found by the name under which its client may cancel it."""
        name = (rollout.id, call.cancel)
        if not call.cancel or events is None:
            yield
            return
        self._cancels[name] = events
        try:
            yield
        finally:
            if self._cancels.get(name) is events:
                del self._cancels[name]

    def _remember_sent(self, name: tuple[int, str], key: CallKey, answer: asyncio.Future[Answer]) -> None:
        def forget(done: asyncio.Future[Answer]) -> None:
            # A request that failed is run when it is sent again.
            if done.cancelled() or done.exception() is not None:
                self._resent.pop(name, None)

        self._resent[name] = (key, answer)
        answer.add_done_callback(forget)
        if len(self._resent) > _RESENT:
            self._resent.popitem(last=False)

    def _familiar(self, scope: Mapping[str, Any]) -> bool:
        """Say whether no browser sent this, under a host name that was looked at: 0.3 us of a hit."""
        for name, value in scope["headers"]:
            if name in BROWSERS or (name == b"host" and value not in self._hosts):
                return False
        return True

    def _refuse_foreign(self, scope: Mapping[str, Any]) -> None:
        headers = scope["headers"]
        refuse_foreign(scope["method"], headers, tool=True, names=self.engine.names)
        for name, value in headers:
            if name == b"host":
                _remember(self._hosts, value, True)

    def _dialect_in(self, rollout: Rollout, endpoint: str) -> Dialect:
        known = self._dialects.get((rollout.tree.id, endpoint))
        if known is None:
            known = dialect_of(rollout.tree.spec, endpoint)
            _remember(self._dialects, (rollout.tree.id, endpoint), known)
        return known

    def _call(
        self, scope: Mapping[str, Any], address: Address, body: bytes, rollout: Rollout, dialect: Dialect
    ) -> Meaning:
        """Read a request. Rollouts of a group send the same bytes, so the last ones are remembered."""
        if dialect.headers_matter:
            return dialect.read(self._request(scope, address, body))
        sent = (address.endpoint, address.path, scope["method"], scope["query_string"], body, rollout.tree.id)
        known = self._calls.get(sent)
        if known is None:
            meaning = dialect.read(self._request(scope, address, body))
            if not isinstance(meaning, Call) or len(body) > _REMEMBERED_BYTES:
                return meaning
            known = meaning
            _remember(self._calls, sent, known)
        return known

    def _request(self, scope: Mapping[str, Any], address: Address, body: bytes) -> Request:
        query = scope["query_string"].decode("latin-1")
        headers = tuple((name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"])
        host = next((value for name, value in headers if name == "host"), "")
        target = address.raw.decode("latin-1") + (f"?{query}" if query else "")
        base = f"{scope.get('scheme', 'http')}://{host}{address.prefix.decode('latin-1')}"
        fresh = "" if address.rollout and address.endpoint != "e2b" else secrets.token_hex(12)
        return Request(scope["method"], target, headers, body, address.rollout, base, fresh)

    def _address(self, scope: Mapping[str, Any]) -> Address:
        """Read who asks. A rollout's URL is the same call after call, so the last ones are remembered."""
        raw_path = scope["raw_path"]
        known = self._addresses.get(raw_path)
        if known is None:
            known = address_of(raw_path, scope["headers"])
            # Docker's paths name one exec each.
            if raw_path.startswith((b"/t/", b"/ng-rollout/")) and known.endpoint != "docker":
                _remember(self._addresses, raw_path, known)
        return known

    def _asked_by(self, scope: Mapping[str, Any]) -> Address:
        """Return the address of a request that is answered without `_serve`, if no other site's page sent it."""
        if not self._familiar(scope):
            self._refuse_foreign(scope)
        return self._named(self._address(scope))

    def _named(self, address: Address) -> Address:
        """Return address with the task and the rollout that its token stands for."""
        if not address.token:
            return address
        named = self.engine.store.rollouts.by_token(address.token)
        if named is None:
            raise RefusalError(
                401, "token", "no running rollout has this token. POST /api/v1/tasks/{task}/rollouts gives one."
            )
        return replace(address, task=named[0], rollout=named[1])

    async def _refuse(self, scope: Scope, error: Exception, exchange: Exchange) -> None:
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
        await exchange.problem(problem)

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


def _passes(spec: EnvironmentSpec, endpoint: str) -> bool:
    """Whether what is sent to an endpoint goes on as it is, and is not kept."""
    server = spec.upstreams.get(endpoint)
    return server is not None and server.mode == "pass"


M = TypeVar("M", bound=Meaning)


def _with_upload(meaning: M, upload: Path | None, spec: EnvironmentSpec) -> M:
    """Return a request's meaning with the place where its body lies, if it does not come with it.

    Raises:
        Refused: 413, whoever it is for keeps what it is sent, and so must hold it.
    """
    if upload is None:
        return meaning
    if not isinstance(meaning, Call) or not _passes(spec, meaning.call.endpoint):
        raise RefusalError(413, "body", "the body is larger than max_body_bytes. Send less, or raise it.")
    arguments = {**meaning.call.arguments, "upload": str(upload)}
    return replace(meaning, call=replace(meaning.call, arguments=arguments))


def _refuse_smuggling(scope: Scope) -> None:
    """Refuse a request whose end two readers could see in two places.

    Raises:
        Refused: 400.
    """
    names = [name for name, _ in scope["headers"]]
    if (b"transfer-encoding" in names and b"content-length" in names) or names.count(b"content-length") > 1:
        raise RefusalError(400, "framing", "Content-Length and Transfer-Encoding exclude each other. Send one, once.")


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
