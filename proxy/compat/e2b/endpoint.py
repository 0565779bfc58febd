"""The e2b endpoint: E2B's control plane and envd at one base URL, for E2B's unmodified SDKs."""

import asyncio
import sys
from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import Any

from proxy.compat.e2b import requests, responses
from proxy.compat.e2b.connect_rpc import ConnectError, from_problem
from proxy.compat.e2b.control_requests import ControlRequest
from proxy.compat.e2b.dir_watches import DirWatches
from proxy.compat.e2b.event_stream import EventStream, StreamForm
from proxy.compat.e2b.file_requests import CallsRequest, WatchRequest
from proxy.compat.e2b.processes import Processes
from proxy.compat.e2b.requests import E2BRequest, ProcessRequest, ProcessStart
from proxy.compat.e2b.responses import json_response
from proxy.compat.e2b.sandbox_note import SandboxNote
from proxy.compat.e2b.sandbox_registry import RunningSandbox, SandboxRegistry
from proxy.compat.e2b.sandboxes import SandboxControl
from proxy.compat.endpoints import EndpointContext
from proxy.dialects.base import Local, Request
from proxy.http.access import ALL, GRANT, Grant
from proxy.http.address import Address
from proxy.http.answer_cache import raw
from proxy.http.asgi import Receive, Send
from proxy.http.exchange import Exchange, beside
from proxy.http.lru_cache import LruCache
from proxy.http.problems import problem_of
from proxy.http.responses import send_response
from proxy.refusals import Problem, RefusalError
from proxy.tree.keys import CallKey, call_key
from proxy.tree.rollout import Rollout
from sandboxes.calls import ToolCall, ToolResult
from sandboxes.spec import EnvironmentSpec
from sandboxes.task_owner import start

StreamRequest = ProcessStart | ProcessRequest | WatchRequest
_ENVD_VERBS = ("health", "envs", "init")
"""REST requests that go to envd in the sandbox, not to the control plane."""

_START_PATH = "process.Process/Start"
_DECIDING = frozenset({
    b"authorization", b"connect-timeout-ms", b"content-encoding", b"content-type", b"e2b-sandbox-id",
    b"e2b-sandbox-port", b"host",
})  # fmt: skip
"""The headers that decide which call a start is, and in which sandbox."""
_MAX_KEYS, _REMEMBERED_BYTES = 4096, 4096
"""How many starts are remembered, and the largest of their bodies: 16 MiB in all."""


class SandboxGoneError(Exception):
    """The addressed sandbox does not run, or the addressed port of it is not open."""

    def __init__(self, sandbox: str, text: str, port: str = "") -> None:
        super().__init__(text)
        # The JSON that E2B's own proxy answers with.
        self.payload = {"sandboxId": sandbox, "message": text, "code": 502} | ({"port": int(port)} if port else {})


class E2bEndpoint:
    """Serves the e2b endpoint of all tasks."""

    def __init__(self, context: EndpointContext) -> None:
        self._context, self._request_of, self._count = context, context.request_of, context.count
        self._processes = Processes(context)
        self._watches = DirWatches(context, self._processes)
        self._registry = SandboxRegistry(context, self._processes)
        self._control = SandboxControl(context, self._registry)
        # Keys of starts by the bytes that decide them.
        self._keys: LruCache[Hashable, CallKey] = LruCache(_MAX_KEYS)

    async def serve(self, scope: Mapping[str, Any], address: Address, body: bytes, exchange: Exchange) -> None:
        """Answer a request, and count the problem that the client was sent, if any."""
        request = self._request_of(scope, address, body)
        grant = scope.get(GRANT, ALL)
        problem = await self._answer(address.task, request, grant, exchange.send, exchange.receive)
        if problem is not None:
            self._count(problem)

    def known_call(self, scope: Mapping[str, Any], address: Address, body: bytes, rollout: Rollout) -> bytes | None:
        """Answer the start of a process that the tree knows; see `KnowingEndpoint.known_call`."""
        if scope["method"] != "POST" or address.path != _START_PATH:
            return None
        note = self._registry.awake(rollout)
        deciding = [header for header in scope["headers"] if header[0] in _DECIDING]
        # What the request names is not always the rollout of its URL, below which there may be further sandboxes.
        if note is None or any(name != rollout.name for name in requests.sandboxes_in(deciding)):
            return None
        spec = self._context.tasks.spec(rollout.task)
        headers = tuple(header for header in deciding if header[0] != b"e2b-sandbox-id")
        # Rollouts of a group send the same, so the key holds all that decides the call but the sandbox's own name.
        same = (spec.directory, rollout.tree.id, body, headers, tuple(note.envs.items()))
        key = self._keys.get(same)
        if key is None:
            key = _start_key(self._request_of(scope, address, body), spec, note)
            if key is None:
                return None
            if len(body) <= _REMEMBERED_BYTES:
                self._keys[same] = key
        return self._processes.known(rollout, key)

    async def refuse(self, scope: Mapping[str, Any], address: Address, problem: Problem, exchange: Exchange) -> None:
        """Answer a request with a problem that was noticed before the request was read."""
        await self._refuse(exchange.send, self._request_of(scope, address, b""), from_problem(problem), problem)

    async def _answer(self, task: str, request: Request, grant: Grant, send: Send, receive: Receive) -> Problem | None:
        """Answer a request; return the problem in it, for the counters. A recorded error of a call is none."""
        try:
            # A small body may unpack to a large one, and its files are digested.
            size = sys.maxsize if request.header("content-encoding") else len(request.body)
            parsed = await beside(size, requests.read, request, self._context.tasks.spec(task))
            if isinstance(parsed, ControlRequest) and parsed.verb not in _ENVD_VERBS:
                await _respond(send, await self._control.answer(task, parsed, request, grant))
                return None
            sandbox = await self._addressed_sandbox(task, request, grant)
            if requests.is_stream(request) and isinstance(parsed, StreamRequest):
                return await self._stream(sandbox, parsed, send, receive)
            await _respond(send, await self._envd(sandbox, parsed))
        except ConnectError as error:
            return await self._refuse(send, request, error, None)
        except SandboxGoneError as error:
            await _respond(send, json_response(error.payload, 502))
        except Exception as error:  # noqa: BLE001 - a request ends here
            problem = problem_of(error)
            return await self._refuse(send, request, from_problem(problem), problem)
        return None

    async def _addressed_sandbox(self, task: str, request: Request, grant: Grant) -> RunningSandbox:
        name = requests.sandbox_of(request) or request.rollout
        if not name:
            raise RefusalError(400, "no-sandbox", "The request names no sandbox. Send it in E2b-Sandbox-Id.")
        grant.require_rollout(name)
        sandbox = await self._registry.find(task, name)
        if sandbox is not None:
            # Before the check: a sandbox created with autoResume is never seen as paused here.
            sandbox = self._registry.resume_on_request(sandbox)
        if sandbox is None or sandbox.note.paused:
            raise SandboxGoneError(name, "The sandbox was not found")
        port = requests.port_of(request)
        if port != requests.ENVD_PORT:
            raise SandboxGoneError(name, "The sandbox is running but port is not open", port if port.isdigit() else "0")
        return sandbox

    # -- envd --------------------------------------------------------------------------------------------------------

    async def _stream(
        self, sandbox: RunningSandbox, request: StreamRequest, send: Send, receive: Receive
    ) -> Problem | None:
        """Answer with a stream, which three tasks share.

        This one sends, `producing` runs the request and puts events, and `watching` notices that the client
        disconnects. A process that the request has started continues after a disconnect.
        """
        stream = EventStream(
            send,
            keepalive_s=request.keepalive_s,
            deadline_s=request.deadline_s,
            strict=not isinstance(request, ProcessStart),
            form=_form(request),
        )
        producing = start(self._produce(sandbox, request, stream))
        watching = start(_lose_on_disconnect(receive, stream))
        try:
            await stream.serve()
        finally:
            # The stream is over: neither a disconnect nor further events matter.
            watching.cancel()
            producing.cancel()
            problem = (await asyncio.gather(producing, return_exceptions=True))[0]
        return problem if isinstance(problem, Problem) else None

    async def _produce(self, sandbox: RunningSandbox, request: StreamRequest, stream: EventStream) -> Problem | None:
        rollout = sandbox.rollout
        try:
            if isinstance(request, ProcessStart):
                await self._processes.start(rollout, _with_variables(request, sandbox.note), stream)
            elif isinstance(request, WatchRequest):
                await self._watches.follow(rollout, request, stream)
            elif request.verb == "connect":
                await self._processes.connect(rollout, request.pid, request.tag, stream)
            else:
                # A whole stream of input is one write. Its response is a stream too, of one empty message.
                await self._processes.act(rollout, request)
                stream.put({})
                stream.end()
        except ConnectError as error:
            stream.end(error)
        except Exception as error:  # noqa: BLE001 - a request ends here
            problem = problem_of(error)
            stream.end(from_problem(problem))
            return problem
        return None

    async def _envd(self, sandbox: RunningSandbox, request: E2BRequest) -> Local:
        rollout = sandbox.rollout
        match request:
            case ControlRequest(verb="envs"):
                return json_response({**rollout.tree.spec.env, **sandbox.note.envs})
            case ControlRequest():
                return Local(204, headers=())
            case ProcessRequest():
                await self._processes.act(rollout, request)
                return json_response({})
            case WatchRequest():
                return json_response(await self._watches.answer(rollout, request))
            case CallsRequest():
                return await self._run_calls(rollout, request)
        raise AssertionError(request)

    async def _run_calls(self, rollout: Rollout, request: CallsRequest) -> Local:
        results = [await self._run_call(rollout, call) for call in request.calls]
        match request.form:
            case "entry":
                return json_response({"entry": responses.entry(results[0])})
            case "entries":
                return json_response({"entries": responses.entries(results[0])})
            case "processes":
                return json_response({"processes": responses.processes(results[0])})
            case "uploads":
                return json_response([responses.upload(result) for result in results])
            case "file":
                return Local(200, results[0].body, (("content-type", "application/octet-stream"),))
        return json_response({})

    async def _run_call(self, rollout: Rollout, call: ToolCall) -> ToolResult:
        result = await self._processes.call(rollout, call)
        error = responses.failure(result)
        if error is not None:
            raise error
        return result

    async def _refuse(
        self, send: Send, request: Request, error: ConnectError, problem: Problem | None
    ) -> Problem | None:
        if requests.is_stream(request):
            # The stream ends at once, so it never waits for a keepalive.
            stream = EventStream(send, keepalive_s=50.0, deadline_s=None)
            stream.end(error)
            await stream.serve()
        elif requests.is_connect(request):
            await _respond(send, json_response(error.payload, error.status))
        else:
            # A recorded failure has no problem. A full disk is the one that plain HTTP has its own status for.
            recorded_status = 507 if error.code == "resource_exhausted" else error.status
            status = recorded_status if problem is None else problem.status
            retry_s = None if problem is None else problem.retry_after_s
            headers = (("retry-after", str(retry_s)),) if retry_s else ()
            await _respond(send, json_response({"code": status, "message": str(error)}, status, headers))
        return problem


def _start_key(request: Request, spec: EnvironmentSpec, note: SandboxNote) -> CallKey | None:
    """Return the key of a start; None for a start that no other rollout can share, or of another port."""
    parsed = requests.read(request, spec)
    if not isinstance(parsed, ProcessStart) or parsed.has_terminal or requests.port_of(request) != requests.ENVD_PORT:
        return None
    return call_key(_with_variables(parsed, note).call)


def _with_variables(start: ProcessStart, note: SandboxNote) -> ProcessStart:
    arguments = start.call.arguments
    return replace(start, call=replace(start.call, arguments={**arguments, "env": {**note.envs, **arguments["env"]}}))


def _form(request: StreamRequest) -> StreamForm:
    if isinstance(request, WatchRequest):
        return "watch"
    return "terminal" if isinstance(request, ProcessStart) and request.has_terminal else "process"


async def _lose_on_disconnect(receive: Receive, stream: EventStream) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    stream.lose()


async def _respond(send: Send, local: Local) -> None:
    await send_response(send, local.status, raw(local.headers), local.body)
