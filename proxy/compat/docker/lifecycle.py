"""From the start of a container to its end: its main command, attached clients, logs, waiting and removal."""

# Theory of operation. `containers` has the table of states. What runs as the main command decides what a start does:
#
# 1. *Nothing* (`ContainerSpec.main` is empty): the command would only wait, so it is never executed. The container is
#    RUNNING until it is stopped.
# 2. *A command* (`_run_main`): it is the first call of the rollout, runs in a task of its own, and the container exits
#    with it. The first exec detaches it, because calls of a rollout run one at a time.
# 3. *An entrypoint before a command that only waits* (`_start_background_main`): it is started as a background process
#    and belongs to the state. Its end is not observed.
#
# Clients may attach before the start. They are kept in `ContainerActivity.attached` until the main command begins.

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import orjson
import structlog

from proxy.compat.docker import requests, responses
from proxy.compat.docker.calls import ContainerCalls
from proxy.compat.docker.containers import Container, ContainerChange, ContainerState
from proxy.compat.docker.events import ContainerEvents
from proxy.compat.docker.execs import FAILED_EXIT_CODE, ContainerExecs, require_running
from proxy.compat.docker.members import OUTPUT
from proxy.compat.docker.output import OutputListener, OutputSink, client_output, first_of
from proxy.compat.docker.projects import Projects
from proxy.compat.docker.registry import KILLED_EXIT_CODE, ContainerActivity, ContainerRegistry
from proxy.compat.docker.requests import DockerRequest
from proxy.compat.docker.stream import StreamConnection
from proxy.dialects.base import Local
from proxy.execution.errors import StateLostError
from proxy.refusals import RefusalError
from proxy.tree.rollout import Rollout, is_moving
from sandboxes.calls import ToolCall
from sandboxes.errors import SandboxError
from sandboxes.listener import Headers
from sandboxes.process_output import ERR, OUT, ending, output
from sandboxes.task_owner import TaskOwner

_FRAMES = (("content-type", "application/vnd.docker.multiplexed-stream"),)
_RAW = (("content-type", "application/vnd.docker.raw-stream"),)
_JSON = (("content-type", "application/json"),)
_NO_CONTENT = Local(204, headers=())
_NOT_MODIFIED = Local(304, headers=())

log = structlog.get_logger()

SendPiece = Callable[[bytes], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class StreamedResponse:
    """A response that is sent piece by piece."""

    # Sends the pieces with the function that it is given, and returns at the end.
    content: Callable[[SendPiece], Coroutine[Any, Any, None]]
    headers: Headers


class ContainerLifecycle:
    """Starts, stops, watches and removes the containers of all tasks."""

    def __init__(
        self,
        registry: ContainerRegistry,
        execs: ContainerExecs,
        calls: ContainerCalls,
        events: ContainerEvents,
        projects: Projects,
        *,
        max_stdin_bytes: int,
        closing: asyncio.Event,
    ) -> None:
        """Create the service. Waiting responses end when `closing` is set; `max_stdin_bytes` is for main commands."""
        self._registry, self._execs, self._calls = registry, execs, calls
        self._events, self._projects = events, projects
        self._max_stdin_bytes, self._closing = max_stdin_bytes, closing
        self._tasks = TaskOwner()
        calls.at_loss.append(self._lose_all)

    async def aclose(self) -> None:
        """Stop watching main commands. Their calls continue until `Stepper.drain` has waited for them."""
        await self._tasks.end()

    async def rollout_of(self, container: Container) -> Rollout:
        """Return a container's rollout. Raises RefusalError: 404 if it has ended; 409 if its state is lost."""
        try:
            return await self._registry.require_rollout(container)
        except RefusalError as error:
            if error.slug == "rollout-lost":
                await self._lose(container, str(error))
            raise

    async def _lose_all(self, rollout: Rollout, why: str) -> None:
        for container in self._registry.of_rollout(rollout):
            await self._lose(container, why)

    async def _lose(self, container: Container, why: str) -> None:
        container.lost = why
        await self._exit(container, KILLED_EXIT_CODE)

    def ended(self, rollout: Rollout) -> None:
        """Forget the containers of a rollout, whatever has ended it."""
        for container in self._registry.of_rollout(rollout):
            self._registry.drop(container)
            self._execs.forget(container)

    async def change(self, verb: str, request: DockerRequest, container: Container) -> Local | StreamedResponse:
        """Start, stop, restart, kill or wait for a container. Raises RefusalError (409) to kill an ended one."""
        if verb == "wait":
            return self._wait(request, container)
        if verb == "kill" and not container.is_running:
            name = request.segments[1]
            raise RefusalError(409, "docker", f"Cannot kill container: {name}: Container {container.id} is not running")
        # Stop, kill and restart begin alike: whatever the signal, nothing of a container survives it.
        if verb != "start":
            response = await self._stop(container)
            if verb != "restart":
                return response
        return await self._start(container)

    async def _start(self, container: Container) -> Local:
        if container.is_running:
            return _NOT_MODIFIED
        if container.project:
            return self._start_member(container)
        rollout = await self._registry.require_rollout(container)
        if container.state is ContainerState.EXITED:
            # A stop ends every process; here those of a call that was under way then.
            await self._calls.run(rollout, requests.kill_all())
            self._registry.activity(container).exited = asyncio.Event()
        self._note_start(container)
        if container.spec.background:
            await self._start_background_main(container, rollout)
        elif container.spec.main:
            self._tasks.spawn("run main command of container", self._run_main(container, rollout))
        return _NO_CONTENT

    def _start_member(self, container: Container) -> Local:
        """Start a container of a project. Its command is run with the sandbox, before the project's first call."""
        if not self._projects.is_planned(container):
            raise RefusalError(
                409, "docker", f"Project {container.project!r} has made calls already, so no container can be started "
                "in its state. End it first (docker compose down).",
            )  # fmt: skip
        if container.state is ContainerState.EXITED:
            self._registry.activity(container).exited = asyncio.Event()
        self._note_start(container)
        return _NO_CONTENT

    def _note_start(self, container: Container) -> None:
        container.change(ContainerChange.START)
        container.lost = ""
        container.started_at = time.time()
        self._registry.save(container)
        self._events.publish("start", container)

    async def _start_background_main(self, container: Container, rollout: Rollout) -> None:
        body = await self._calls.run(rollout, requests.main_command(container.spec).call(detach=True))
        exit_code = ending(body).exit_code
        if exit_code is not None:
            # A detached call returns an exit code only if the command could not be started.
            self._registry.activity(container).log = body
            await self._exit(container, exit_code)

    async def _run_main(self, container: Container, rollout: Rollout) -> None:
        activity, command = self._registry.activity(container), requests.main_command(container.spec)
        sinks = [OutputSink(connection.send, streams, tty=command.tty) for connection, streams in activity.attached]
        # No `disconnected`: the main command belongs to the container, not to a client.
        listener = activity.main = OutputListener(sinks)
        try:
            stdin = await activity.stdin.input(self._max_stdin_bytes) if activity.stdin is not None else b""
            body = await self._calls.run(rollout, command.call(stdin), listener)
            for sink in sinks:
                # On a hit nothing ran, so the sinks get the recorded output.
                if not sink.has_output:
                    await sink.put_result(body)
            exit_code = ending(body).exit_code
            activity.log = body
        except Exception as error:  # noqa: BLE001 - a background task ends here
            log.warning("main command of a container failed", container=container.id, error=repr(error))
            for sink in sinks:
                await sink.put(ERR, f"forkpoint: {error}\n".encode())
            exit_code = FAILED_EXIT_CODE
        activity.main = None
        # None: an exec has detached the command, so its end is not observed.
        if exit_code is not None:
            await self._exit(container, exit_code)

    async def _exit(self, container: Container, exit_code: int) -> None:
        if not container.is_running:
            # The container was stopped while its main command ended.
            return
        container.change(ContainerChange.EXIT)
        container.exit_code, container.finished_at = exit_code, time.time()
        self._registry.save(container)
        self._events.publish("die", container)
        activity = self._registry.activity(container)
        activity.exited.set()
        # Attached clients wait for the end of the stream, and then ask for the exit code.
        for connection, _ in activity.attached:
            connection.close()
        activity.attached.clear()
        # `docker run --rm` leaves the removal to the daemon.
        if container.spec.auto_remove:
            await self._remove(container)

    async def _stop(self, container: Container) -> Local:
        if not container.is_running:
            return _NOT_MODIFIED
        self._registry.activity(container).detach()
        rollout = None if container.project else self._registry.rollout(container)
        # What its processes wrote from now on would be in copies of its files. A call under way has the sandbox.
        if rollout is not None and is_moving(rollout.node) and not rollout.waiting:
            # A container whose state cannot be had any more can be stopped all the same.
            with contextlib.suppress(RefusalError, StateLostError, SandboxError):
                await self._calls.run(rollout, requests.kill_all())
        await self._exit(container, KILLED_EXIT_CODE)
        return _NO_CONTENT

    async def remove(self, request: DockerRequest, container: Container) -> Local:
        """Remove a container, and finish its rollout. Raises RefusalError (409) if it runs, unless forced."""
        if container.is_running and not request.flag("force"):
            raise RefusalError(
                409, "docker", f'cannot remove container "/{container.name}": container is running: stop the container '
                "before removing or force remove",
            )  # fmt: skip
        await self._remove(container)
        return _NO_CONTENT

    async def _remove(self, container: Container) -> None:
        await self._registry.remove(container)
        self._execs.forget(container)
        if container.project:
            self._projects.forget_member(container)
        self._events.publish("destroy", container)

    def _wait(self, request: DockerRequest, container: Container) -> StreamedResponse:
        activity, condition = self._registry.activity(container), request.query.get("condition", "")

        async def content(send: SendPiece) -> None:
            # Send the head at once: clients start the container only when they have it.
            await send(b"")
            if condition == "removed":
                await self._first_of(activity.removed.wait())
            elif condition == "next-exit" or container.is_running:
                await self._first_of(activity.exited.wait())
            # At shutdown there is no exit code to send. The client retries.
            if not (self._closing.is_set() and container.is_running):
                await send(orjson.dumps({"StatusCode": container.exit_code}) + b"\n")

        return StreamedResponse(content, _JSON)

    async def logs(self, request: DockerRequest, container: Container) -> StreamedResponse:
        """Return the output of the main command. Raises RefusalError (400) if the request selects no stream."""
        activity, tty = self._registry.activity(container), container.spec.tty
        streams = _streams(request)
        if not streams:
            raise RefusalError(400, "docker", "Bad parameters: you must choose at least one stream")
        if container.project:
            return await self._member_logs(request, container, streams)
        if activity.log is None and activity.main is None and container.spec.main:
            # The proxy was restarted since the command ended: its result is still in the tree.
            rollout = await self._registry.require_rollout(container)
            activity.log = self._calls.recorded(rollout, requests.main_command(container.spec).call())

        async def content(send: SendPiece) -> None:
            # Decided when the response is sent: the command may have ended since the request.
            main = activity.main
            if main is None or activity.log is not None:
                body = responses.tail(activity.log or b"", request.query.get("tail", "all"))
                await send(client_output(body, streams, tty=tty) if body else b"")
                return
            # None ends the queue: at once, or when the container exits.
            pieces: asyncio.Queue[bytes | None] = asyncio.Queue()
            pieces.put_nowait(client_output(main.output.end(0), streams, tty=tty))
            if request.flag("follow"):
                main.sinks.append(OutputSink(pieces.put, streams, tty=tty, has_output=main.has_output))
                self._tasks.spawn("end followed log", self._end_log(activity, pieces))
            else:
                pieces.put_nowait(None)
            while (piece := await pieces.get()) is not None:
                await send(piece)

        return StreamedResponse(content, _RAW if tty else _FRAMES)

    async def _member_logs(
        self, request: DockerRequest, container: Container, streams: frozenset[int]
    ) -> StreamedResponse:
        """Return what a service of a project has printed; the main container only waits, and prints nothing."""
        body = b""
        if container.service and OUT in streams:
            rollout = await self._registry.require_rollout(container)
            argv = ["cat", OUTPUT]
            call = ToolCall("process", "run", {"argv": argv, "env": {}, "tty": False, "service": container.service})
            body = responses.tail(await self._calls.run(rollout, call), request.query.get("tail", "all"))
        activity = self._registry.activity(container)

        async def content(send: SendPiece) -> None:
            await send(client_output(body, streams, tty=container.spec.tty) if body else b"")
            if request.flag("follow") and container.is_running:
                await self._first_of(activity.exited.wait())

        return StreamedResponse(content, _RAW if container.spec.tty else _FRAMES)

    def until_closing(self, content: Callable[[SendPiece], Coroutine[Any, Any, None]]) -> StreamedResponse:
        """Return a response that goes on until the client leaves or the proxy shuts down."""

        async def bounded(send: SendPiece) -> None:
            await self._first_of(content(send))

        return StreamedResponse(bounded, _JSON)

    async def top(self, request: DockerRequest, container: Container) -> Local:
        """List a container's processes. Raises RefusalError: 409 if it does not run; 500 if it has no working `ps`."""
        require_running(container)
        rollout = await self._registry.require_rollout(container)
        argv = ["ps", *(request.query.get("ps_args") or "-ef").split()]
        arguments: dict[str, Any] = {"argv": argv, "env": {}, "cwd": "/", "user": None, "tty": False}
        arguments |= {"service": container.service} if container.service else {}
        body = await self._calls.run(rollout, ToolCall("process", "run", arguments))
        if ending(body).exit_code:
            raise RefusalError(500, "docker", f"ps: {output(body, OUT).decode(errors='replace').strip()}")
        return responses.process_table(output(body, OUT).decode(errors="replace"))

    async def attach(self, request: DockerRequest, container: Container, connection: StreamConnection) -> None:
        """Connect a client to the main command, until exit or disconnect. Raises RefusalError (409) after the exit."""
        if container.state is ContainerState.EXITED:
            raise RefusalError(409, "docker", "You cannot attach to a stopped container, start it first")
        activity, tty, streams = self._registry.activity(container), container.spec.tty, _streams(request)
        # The head goes out before the start: `docker run` attaches first, and starts the container then.
        connection.open(tty=tty)
        activity.attached.append((connection, streams))
        if request.flag("stdin") and container.spec.stdin:
            activity.stdin = connection
        # The command runs already. The client gets its output from now on, as from Docker.
        if activity.main is not None:
            has_output = activity.main.has_output
            activity.main.sinks.append(OutputSink(connection.send, streams, tty=tty, has_output=has_output))
        try:
            await self._first_of(activity.exited.wait(), connection.disconnected())
        finally:
            # A container may be restarted: a connection that is gone must not get the next run's output.
            activity.attached = [entry for entry in activity.attached if entry[0] is not connection]

    async def _end_log(self, activity: ContainerActivity, pieces: "asyncio.Queue[bytes | None]") -> None:
        await self._first_of(activity.exited.wait())
        pieces.put_nowait(None)

    async def _first_of(self, *events: Coroutine[Any, Any, object]) -> None:
        """Wait for the first of these events, or for the proxy's shutdown."""
        await first_of(*events, self._closing.wait())


def _streams(request: DockerRequest) -> frozenset[int]:
    return frozenset(number for number, name in ((1, "stdout"), (2, "stderr")) if request.flag(name))
