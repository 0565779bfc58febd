"""The regular path of an agent's request: read it, find out what it means, do that, send the answer.

A request passes four methods downwards, numbered below: `serve`, `_respond`, `_act`, `_call`. Only a request that names
another task than its URL passes `_respond` again, with that task.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from proxy.compat.endpoints import Endpoint
from proxy.dataplane.addressing import MAX_REMEMBERED, Addressing, request_of
from proxy.dataplane.retries import Retries
from proxy.dialects import dialect_of
from proxy.dialects.base import AT_ONCE_BYTES, Call, Cancel, Close, Local, Meaning, Open
from proxy.dialects.rule_based import Declared
from proxy.engine import Engine
from proxy.execution.step_notes import Answer
from proxy.http.access import ALL, GRANT, Grant
from proxy.http.address import Address
from proxy.http.answer_cache import HIT_STATUS, PreparedAnswer, RawHeaders
from proxy.http.asgi import Receive, Scope
from proxy.http.exchange import Exchange, beside
from proxy.http.lru_cache import LruCache
from proxy.http.problems import count_problem, problem_of
from proxy.http.sent_labels import labels_of
from proxy.http.streaming import ServerEvents
from proxy.http.uploads import uploading
from proxy.refusals import RefusalError
from proxy.telemetry.timing import Timing
from proxy.tree.labels import Labels
from proxy.tree.rollout import Outcome, Rollout
from sandboxes.spec import EnvironmentSpec
from sandboxes.task_owner import start

if TYPE_CHECKING:
    from proxy.tree.keys import CallKey

_CACHE_STATUS = {
    Outcome.HIT: HIT_STATUS,  # a call may find its answer after it has waited for its turn
    Outcome.WAIT: b"forkpoint; fwd=miss; collapsed",
    Outcome.MISS: b"forkpoint; fwd=miss; stored",
    Outcome.BYPASS: b"forkpoint; fwd=bypass",
}
"""The `Cache-Status` header (RFC 9211) of each outcome."""


class Dispatch:
    """Serves the requests that the hit path does not answer."""

    def __init__(self, engine: Engine, addressing: Addressing, endpoints: Mapping[str, Endpoint]) -> None:
        self._engine, self._addressing, self._endpoints = engine, addressing, endpoints
        self._answers, self._retries = engine.answers, Retries()
        self._constants: LruCache[tuple[int, CallKey], Answer] = LruCache(MAX_REMEMBERED)
        self._constant_callers: Counter[int] = Counter()
        self._cancellable: dict[tuple[int, str], ServerEvents] = {}
        self._in_flight = 0

    async def refuse(self, scope: Scope, address: Address, refusal: RefusalError, exchange: Exchange) -> None:
        """Report a request that is not authorised in the form that clients of its endpoint read."""
        problem = problem_of(refusal)
        count_problem(self._engine.counts, problem)
        endpoint = self._endpoints.get(address.endpoint)
        if endpoint is None:
            await exchange.problem(problem)
        else:
            await endpoint.refuse(scope, address, problem, exchange)

    async def serve(self, scope: Scope, receive: Receive, exchange: Exchange) -> None:
        """Answer a request. Raises ClientDisconnectedError if it never was complete, and its errors, for the caller."""
        # 1. Framing, browser and limits. Everything runs on one event loop, so a plain counter needs no lock.
        self._in_flight += 1
        try:
            if self._in_flight > self._engine.settings.max_requests:
                raise RefusalError(
                    429, "too-many-requests", "more calls are in flight than max_requests allows. Try again soon."
                )
            # Before the body is read: with two possible ends, the body's last bytes could be the next request for a
            # proxy in front.
            _refuse_smuggling(scope)
            address = self._addressing.address(scope)
            # Tool servers, in sandboxes and elsewhere, receive headers and targets: none may hold a token of the proxy.
            access = self._engine.access
            scope["headers"] = access.without_tokens(scope["headers"])
            access.refuse_token((scope["raw_path"] + b"?" + scope["query_string"]).decode("latin-1"))
            message, settings = await receive(), self._engine.settings
            # Most bodies are complete in the first message, and need neither a file nor a copy.
            if not message.get("more_body") and len(message.get("body", b"")) <= settings.max_body_bytes:
                # Otherwise the client disconnected before it sent its body, and no response can reach it.
                if message["type"] == "http.request":
                    await self._respond(scope, address, message.get("body", b""), exchange)
                return
            # Only a forwarded body may exceed the limit, because it is never put into a record and needs no memory.
            spools = _is_forwarded(self._engine.tasks.spec(address.task), address.endpoint)
            with uploading(settings.data, max_bytes=settings.max_body_bytes, spools=spools) as upload:
                # Beyond the limit this raises 413, or spools to a file that the end of the block deletes.
                body = await upload.receive(receive, message)
                await self._respond(scope, address, body, exchange, upload.path)
        finally:
            self._in_flight -= 1

    async def _respond(
        self, scope: Scope, address: Address, body: bytes, exchange: Exchange, upload: Path | None = None
    ) -> None:
        """Answer a request whose body is there: in `body`, or in the file `upload`."""
        # 2. The dialect says what the request means. Endpoints that are whole APIs (Docker, E2B) answer for
        # themselves.
        own = self._endpoints.get(address.endpoint)
        if own is not None:
            await own.serve(scope, address, body, exchange)
            return
        request = request_of(scope, address, body)
        tasks = self._engine.tasks
        rollout = tasks.rollouts.running.get((address.task, address.rollout))
        # A new rollout is not begun yet: a reply of the proxy's own must not wait for its tree to be opened.
        spec = tasks.spec(address.task) if rollout is None else rollout.tree.spec
        endpoint = address.endpoint
        dialect = dialect_of(spec, endpoint) if rollout is None else self._addressing.dialect(rollout, endpoint)
        # From here on errors are reported in the dialect's own form, so that the client's library can read them.
        exchange.understood(dialect, request)
        task = await beside(len(body), dialect.task, request) if isinstance(dialect, Declared) else ""
        if task not in ("", address.task):
            # The grant was checked for the URL's task only. Without this line a token for one task could name any
            # other.
            scope.get(GRANT, ALL).require(task)
            await self._respond(scope, await self._routed(address, task, spec), body, exchange, upload)
            return
        if rollout is None or upload is not None or len(body) > AT_ONCE_BYTES:
            meaning = await beside(len(body), dialect.read, request)
        else:
            meaning = self._addressing.meaning(scope, address, body, rollout)
        _require_own(scope.get(GRANT, ALL), meaning)
        # Before the client's rollout is begun: a list of tools is no step of it.
        if isinstance(meaning, Call) and await self._is_constant(meaning, address, rollout):
            await self._constant(address.task, _with_upload(meaning, upload, spec) if upload else meaning, exchange)
            return
        if rollout is None and isinstance(meaning, Call):
            labels = labels_of(scope, scope["headers"])
            rollout = await self._rollout(address.task, meaning, address.rollout, labels)
            if rollout.tree.spec != spec:
                # The rollout runs in the tree of an older environment of its task, which may read requests otherwise.
                dialect = self._addressing.dialect(rollout, endpoint)
                exchange.understood(dialect, request)
                meaning = await beside(len(body), dialect.read, request)
        if upload is not None:
            meaning = _with_upload(meaning, upload, spec if rollout is None else rollout.tree.spec)
        # 3. Act: a reply of the proxy's own, a rollout's begin or end, a cancellation, or a call.
        # A message that opens a rollout may come from a client that has labels for it.
        labels = labels_of(scope, scope["headers"]) if isinstance(meaning, Open) else {}
        await self._act(address.task, meaning, exchange, rollout, labels)

    async def _routed(self, address: Address, task: str, spec: EnvironmentSpec) -> Address:
        """Return the address of the task that a request names; a new task gets the environment of the URL's task."""
        # Two requests may both find the task missing. `put` is serialised by name, so at worst it is written twice.
        if self._engine.store.tasks.get(task) is None:
            await self._engine.tasks.put(task, spec)
        return replace(address, task=task)

    async def _rollout(self, task: str, call: Call, name: str, labels: Labels) -> Rollout:
        """Return the rollout of a call. A new one begins, unless only the proxy gives such names (`Call.existing`)."""
        if not call.existing:
            # Without `existing` the name is the client's own, so an unknown one is simply a new rollout.
            return await self._engine.tasks.rollout(task, call.rollout or name, labels)
        return await self._running(task, call.rollout)

    async def _running(self, task: str, name: str) -> Rollout:
        rollout = await self._engine.tasks.running(task, name)
        if rollout is None:
            raise RefusalError(404, "session", "this session has ended or never existed. Begin another session.")
        return rollout

    async def _is_constant(self, call: Call, address: Address, rollout: Rollout | None) -> bool:
        """Return whether a call has one answer for all rollouts in the state of its rollout, which may be another's."""
        if call.constant or not call.shared_at_root:
            return call.constant
        tasks, name = self._engine.tasks, call.rollout or address.rollout
        if rollout is None and name:
            rollout = await tasks.running(address.task, name)
        # The task may have got another environment, and so another tree, since the rollout began.
        return rollout is None or rollout.node is (await tasks.open(address.task)).tree.root

    async def _constant(self, task: str, call: Call, exchange: Exchange) -> None:
        """Answer a call whose answer is the same for all rollouts of a task, or for those at its root.

        The call runs once, in a rollout of its own, whose name no URL can have: calls do not wait for one another.
        """
        engine = self._engine
        if call.existing:
            await self._running(task, call.rollout)
        # Keyed by tree: another environment of the task lists other tools.
        key = ((await engine.tasks.open(task)).tree.id, call.key)
        answer = self._constants.get(key)
        if answer is not None:
            engine.counts.answered(Outcome.HIT, answer.record.seconds)
            ready = self._answers.of(answer.record)
            await exchange.answer(ready, ready.hit_headers)
            return
        rollout = await engine.tasks.rollout(task, f"~{call.key.hex()[:32]}")
        # Counted here and not by `rollout.waiting`: a second first call has found the rollout, but its task has not
        # run yet, so it does not wait in it yet.
        self._constant_callers[rollout.id] += 1
        listener = exchange.listener(call)
        try:
            answer = await exchange.until(start(engine.step.run(rollout, call.call, call.key, listener)), call)
        finally:
            self._constant_callers[rollout.id] -= 1
            # The last caller ends the rollout.
            if not self._constant_callers[rollout.id]:
                del self._constant_callers[rollout.id]
                await engine.tasks.rollouts.finish(rollout)
        # A private answer holds for one rollout only (the server made a request of its client, for example).
        if not answer.record.private:
            self._constants[key] = answer
        await self._send(answer, exchange)

    async def _act(
        self, task: str, meaning: Meaning, exchange: Exchange, rollout: Rollout | None, labels: Labels
    ) -> None:
        tasks = self._engine.tasks
        match meaning:
            case Local():
                if meaning.within:
                    await self._running(task, meaning.within)
                await exchange.local(meaning)
            case Close():
                rollout = rollout or tasks.rollouts.running.get((task, meaning.rollout))
                if rollout is not None:
                    # The call in flight ends first: its step belongs to the rollout that is about to end.
                    await tasks.rollouts.finish_in_turn(rollout)
                else:
                    await tasks.dismiss(task, meaning.rollout)
                await exchange.local(meaning.answer)
            case Cancel():
                rollout = rollout or tasks.rollouts.running.get((task, meaning.rollout))
                # A call that has ended has no entry any more, so a late cancellation changes nothing.
                events = None if rollout is None else self._cancellable.get((rollout.id, meaning.name))
                if events is not None:
                    events.cancel()
                await exchange.local(meaning.answer)
            case Open():
                opened = await tasks.open_rollout(task, meaning.rollout, meaning.parent, meaning.spec, labels)
                exchange.extra = meaning.headers
                # The request also means something within the rollout that it opens.
                await self._act(task, meaning.then, exchange, opened, labels)
            case Call():
                assert rollout is not None
                await self._call(rollout, meaning, exchange)

    async def _call(self, rollout: Rollout, call: Call, exchange: Exchange) -> None:
        step, endpoints = self._engine.step, self._engine.counts.endpoints
        # 4. The call: from a retry's first attempt, from the tree, or by running it.
        first_attempt = self._retries.answer(rollout, call)
        if first_attempt is not None:
            # Shielded: a client that hangs up must not cancel the answer that the first attempt waits for.
            answer = await asyncio.shield(first_attempt)
            if await self._may_repeat(rollout, answer):
                ready = self._answers.of(answer.record)
                await exchange.answer(ready, _headers_of(answer, ready))
                return
        # Requests with an ID, or whose body came slowly, were not looked up on the hit path.
        record = step.known(rollout, call.key, expected=int(exchange.expected is rollout))
        if record is not None:
            endpoints[call.call.endpoint][Outcome.HIT] += 1
            self._retries.remember_hit(rollout, call, record)
            ready = self._answers.of(record)
            await exchange.answer(ready, ready.hit_headers)
            self._engine.counts.hit_s.observe(time.perf_counter() - exchange.began)
            return
        listener = exchange.listener(call)
        step.detach(rollout)
        running = step.begin(rollout, call.call, call.key, listener, commutes=call.commutes)
        # Remembered before the first await, so a retry that comes while the call runs shares its answer.
        self._retries.remember(rollout, call, running)
        with self._cancellable_as(call.cancel, rollout, exchange.events):
            answer = await exchange.until(running, call)
        endpoints[call.call.endpoint][answer.outcome] += 1
        await self._send(answer, exchange)

    async def _may_repeat(self, rollout: Rollout, answer: Answer) -> bool:
        if self._engine.gate is None:
            return True
        async with self._engine.step.order.hold(rollout):
            return await self._engine.gate.repeat(rollout, answer.record)

    async def _send(self, answer: Answer, exchange: Exchange) -> None:
        # A response that was passed on while it arrived only needs its end. Its record, which may be too large to
        # be held in memory, is not read.
        if not await exchange.passed():
            ready = self._answers.of(answer.record)
            await exchange.answer(ready, _headers_of(answer, ready))

    @contextmanager
    def _cancellable_as(self, name: str, rollout: Rollout, events: ServerEvents | None) -> Iterator[None]:
        """Let the client cancel its call under the name that it gave the call, while the context lasts."""
        key = (rollout.id, name)
        # Only a call with a listener for events can be cancelled, and only under a name.
        if not name or events is None:
            yield
            return
        # The rollout's number is part of the key: two clients may choose the same name for their calls.
        self._cancellable[key] = events
        try:
            yield
        finally:
            # The client may have given the name to a second call meanwhile.
            if self._cancellable.get(key) is events:
                del self._cancellable[key]


def _require_own(grant: Grant, meaning: Meaning) -> None:
    """Raise RefusalError (403) if a request names another rollout in its body than its token stands for."""
    if isinstance(meaning, Local):
        grant.require_rollout(meaning.within)
        return
    grant.require_rollout(meaning.rollout)
    if isinstance(meaning, Open):
        if not meaning.rollout:
            # The new rollout would get a name of the proxy's.
            grant.require_no_rollout()
        grant.require_rollout(meaning.parent)
        _require_own(grant, meaning.then)


def _is_forwarded(spec: EnvironmentSpec, endpoint: str) -> bool:
    """Return whether an endpoint's requests are passed to an upstream as they are and not recorded."""
    server = spec.upstreams.get(endpoint)
    return server is not None and server.mode == "pass"


M = TypeVar("M", bound=Meaning)


def _with_upload(meaning: M, upload: Path, spec: EnvironmentSpec) -> M:
    """Return a request's meaning with the file of its body. Raises RefusalError (413) for one that is recorded."""
    # The body went to a file because its endpoint is forwarded, but the meaning may be of another kind.
    if not isinstance(meaning, Call) or not _is_forwarded(spec, meaning.call.endpoint):
        raise RefusalError(413, "body", "the body is larger than max_body_bytes. Send less, or raise it.")
    arguments = {**meaning.call.arguments, "upload": str(upload)}
    return replace(meaning, call=replace(meaning.call, arguments=arguments))


def _refuse_smuggling(scope: Scope) -> None:
    """Raise RefusalError (400) for a request whose end two readers could see at two positions (RFC 9112, 6.3)."""
    names = [name for name, _ in scope["headers"]]
    # A parser that prefers either header reads another end than a proxy in front of it, which lets a request hide
    # in a body.
    if (b"transfer-encoding" in names and b"content-length" in names) or names.count(b"content-length") > 1:
        raise RefusalError(400, "framing", "Content-Length and Transfer-Encoding exclude each other. Send one, once.")


def _headers_of(answer: Answer, ready: PreparedAnswer) -> RawHeaders:
    status = _CACHE_STATUS[answer.outcome] + (b"; detail=not-kept" if answer.timing.known else b"")
    return [(b"cache-status", status), (b"server-timing", _server_timing(answer.timing) + ready.resources)]


def _server_timing(timing: Timing) -> bytes:
    times = (timing.tool_s * 1000, timing.restore_s * 1000, timing.replay_s * 1000, timing.wait_s * 1000)
    return b"tool;dur=%.3f, restore;dur=%.3f, replay;dur=%.3f, wait;dur=%.3f" % times
