"""The e2b endpoint: E2B's control plane and envd at one base URL, for its SDKs unmodified."""

import asyncio
from dataclasses import replace
from typing import Any

import orjson

from proxy.compat.e2b import requests as e2b
from proxy.compat.e2b import responses as e2b_told
from proxy.compat.e2b.connect_rpc import ConnectError, of_problem
from proxy.compat.e2b.dir_watches import Watches
from proxy.compat.e2b.event_stream import EventStream
from proxy.compat.e2b.file_requests import Plain, Watching
from proxy.compat.e2b.processes import Processes
from proxy.compat.e2b.requests import Chosen, Control, E2BRequest, ProcessStart
from proxy.compat.e2b.sandboxes import Sandboxes, SandboxNote
from proxy.dialects.base import Local, Request
from proxy.engine import Engine
from proxy.http.asgi import Receive, Send
from proxy.http.exchange import raw
from proxy.http.problems import problem_of
from proxy.refusals import Problem, RefusalError
from proxy.tree.rollout import Rollout
from sandboxes.calls import ToolCall, ToolResult


class SandboxGoneError(Exception):
    """A request to a sandbox that does not run, or to a port of it that is not open."""

    def __init__(self, sandbox: str, text: str, port: str = "") -> None:
        super().__init__(text)
        self.told = {"sandboxId": sandbox, "message": text, "code": 502} | ({"port": int(port)} if port else {})


class E2b:
    """Serves all tasks."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._processes = Processes(engine)
        self._watches = Watches(engine, self._processes)
        self._sandboxes = Sandboxes(engine, self._end, self._processes.end)

    async def serve(self, task: str, request: Request, send: Send, receive: Receive) -> Problem | None:
        """Answer a request; return what went wrong, which its client has been told."""
        try:
            spec = self._engine.tasks.spec(task)
            asked = e2b.read(request, spec)
            if isinstance(asked, Control) and asked.verb not in ("health", "envs", "init"):
                await _respond(send, await self._control(task, asked, request))
                return None
            rollout, note = await self._sandbox(task, request)
            if e2b.is_stream(request) and isinstance(asked, ProcessStart | Chosen | Watching):
                return await self._stream(rollout, note, asked, send, receive)
            await _respond(send, await self._envd(rollout, note, asked))
        except ConnectError as error:
            return await self._refuse(send, request, error, None)
        except SandboxGoneError as gone:
            await _respond(send, _json(gone.told, 502))
        except Exception as error:  # noqa: BLE001 - a request ends here
            problem = problem_of(error)
            return await self._refuse(send, request, of_problem(problem), problem)
        return None

    async def refuse(self, request: Request, problem: Problem, send: Send) -> None:
        """Tell a problem that was met before the request was read."""
        await self._refuse(send, request, of_problem(problem), problem)

    async def _control(self, task: str, asked: Control, request: Request) -> Local:
        if asked.verb != "kill":
            return await self._sandboxes.answer(task, asked, request)
        found = await self._sandboxes.running(task, asked.sandbox)
        if found is None:
            raise RefusalError(404, "no-such-sandbox", f"sandbox {asked.sandbox!r} was not found")
        await self._end(found[0], "it was killed")
        return Local(204, headers=())

    async def _end(self, rollout: Rollout, why: str) -> None:
        """End a sandbox, after what is under way in it; a command is left running for that."""
        self._engine.step.leave(rollout)
        async with rollout.turn:
            if not rollout.finished:
                await self._engine.tasks.finish(rollout)
        self._processes.end(rollout, f"the sandbox {rollout.name!r} has ended: {why}")
        self._sandboxes.forget(rollout)

    async def _sandbox(self, task: str, request: Request) -> tuple[Rollout, SandboxNote]:
        """Return the sandbox that a request to envd is for."""
        name = e2b.sandbox_of(request) or request.rollout
        if not name:
            raise RefusalError(400, "no-sandbox", "nothing says which sandbox this is for: send E2b-Sandbox-Id.")
        found = await self._sandboxes.running(task, name)
        if found is not None:
            found = found[0], self._sandboxes.resume(*found)
        if found is None or found[1]["paused"]:
            raise SandboxGoneError(name, "The sandbox was not found")
        port = e2b.port_of(request)
        if port != e2b.ENVD_PORT:
            raise SandboxGoneError(name, "The sandbox is running but port is not open", port if port.isdigit() else "0")
        return found

    # -- envd --------------------------------------------------------------------------------------------------------

    async def _stream(
        self, rollout: Rollout, note: SandboxNote, asked: ProcessStart | Chosen | Watching, send: Send, receive: Receive
    ) -> Problem | None:
        """Answer with a stream; a client that goes away leaves what it began to run on."""
        terminal = isinstance(asked, ProcessStart) and asked.has_terminal
        stream = EventStream(
            send,
            keepalive_s=asked.keepalive_s,
            deadline_s=asked.deadline_s,
            strict=not isinstance(asked, ProcessStart),
            form="terminal" if terminal else "watch" if isinstance(asked, Watching) else "process",
        )
        working = asyncio.ensure_future(self._begin(rollout, note, asked, stream))
        watching = asyncio.ensure_future(_gone(receive, stream))
        try:
            await stream.serve()
        finally:
            watching.cancel()
            working.cancel()
            problem = (await asyncio.gather(working, return_exceptions=True))[0]
        return problem if isinstance(problem, Problem) else None

    async def _begin(
        self, rollout: Rollout, note: SandboxNote, asked: ProcessStart | Chosen | Watching, stream: EventStream
    ) -> Problem | None:
        try:
            if isinstance(asked, ProcessStart):
                env = {**note["envs"], **asked.call.arguments["env"]}
                call = replace(asked.call, arguments={**asked.call.arguments, "env": env})
                await self._processes.start(rollout, replace(asked, call=call), stream)
            elif isinstance(asked, Watching):
                await self._watches.follow(rollout, asked, stream)
            else:
                await self._processes.connect(rollout, asked.pid, asked.tag, stream)
        except ConnectError as error:
            stream.end(error)
        except Exception as error:  # noqa: BLE001 - a request ends here
            problem = problem_of(error)
            stream.end(of_problem(problem))
            return problem
        return None

    async def _envd(self, rollout: Rollout, note: SandboxNote, asked: E2BRequest) -> Local:
        match asked:
            case Control(verb="envs"):
                return _json({**rollout.tree.spec.env, **note["envs"]})
            case Control():
                return Local(204, headers=())
            case Chosen():
                await self._processes.act(rollout, asked)
                return _json({})
            case Watching():
                return _json(await self._watches.answer(rollout, asked))
            case Plain():
                return await self._plain(rollout, asked)
        raise AssertionError(asked)

    async def _plain(self, rollout: Rollout, asked: Plain) -> Local:
        results = [await self._done(rollout, call) for call in asked.calls]
        match asked.form:
            case "entry":
                return _json({"entry": e2b_told.entry(results[0])})
            case "entries":
                return _json({"entries": e2b_told.entries(results[0])})
            case "processes":
                return _json({"processes": e2b_told.processes(results[0])})
            case "uploads":
                return _json([e2b_told.upload(result) for result in results])
            case "file":
                return Local(200, results[0].body, (("content-type", "application/octet-stream"),))
        return _json({})

    async def _done(self, rollout: Rollout, call: ToolCall) -> ToolResult:
        result = await self._processes.ask(rollout, call)
        error = e2b_told.failure(result)
        if error is not None:
            raise error
        return result

    async def _refuse(
        self, send: Send, request: Request, error: ConnectError, problem: Problem | None
    ) -> Problem | None:
        if e2b.is_stream(request):
            stream = EventStream(send, keepalive_s=50.0, deadline_s=None)
            stream.end(error)
            await stream.serve()
        elif e2b.is_connect(request):
            await _respond(send, _json(error.told, error.status))
        else:
            # Of a recorded failure, this is the one for which plain HTTP has a number of its own.
            own = 507 if error.code == "resource_exhausted" else error.status
            status = own if problem is None else problem.status
            retry = () if problem is None or problem.retry_after_s is None else problem.retry_after_s
            headers = (("retry-after", str(retry)),) if retry else ()
            await _respond(send, _json({"code": status, "message": str(error)}, status, headers))
        return problem


async def _gone(receive: Receive, stream: EventStream) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    stream.lose()


async def _respond(send: Send, local: Local) -> None:
    headers = raw(local.headers)
    if local.status != 204:
        headers.append((b"content-length", b"%d" % len(local.body)))
    await send({"type": "http.response.start", "status": local.status, "headers": headers})
    await send({"type": "http.response.body", "body": local.body})


def _json(value: Any, status: int = 200, headers: tuple[tuple[str, str], ...] = ()) -> Local:
    return Local(status, orjson.dumps(value), (("content-type", "application/json"), *headers))
