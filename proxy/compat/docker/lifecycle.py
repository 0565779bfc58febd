"""From a container's start to its end: its main command, who is attached to it, who waits for it, its log."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import orjson
import structlog

from proxy.compat.docker import requests as docker
from proxy.compat.docker import responses as docker_told
from proxy.compat.docker.calls import ContainerCalls
from proxy.compat.docker.execs import BROKEN, ContainerExecs, require_running
from proxy.compat.docker.registry import KILLED, Containers, Life
from proxy.compat.docker.requests import DockerRequest
from proxy.compat.docker.responses import Container
from proxy.compat.docker.stream import Audience, HijackedConnection, Sink, shown
from proxy.dialects.base import Local
from proxy.refusals import RefusalError
from proxy.tree.rollout import Rollout
from sandboxes.calls import ToolCall
from sandboxes.listener import Headers
from sandboxes.process_output import ERR, OUT, ending, output

_FRAMES = (("content-type", "application/vnd.docker.multiplexed-stream"),)
_RAW = (("content-type", "application/vnd.docker.raw-stream"),)
_JSON = (("content-type", "application/json"),)
_NOTHING = Local(204, headers=())

log = structlog.get_logger()


class Streaming(Exception):  # noqa: N818 - a way to answer
    """This request is answered by what content sends, piece by piece."""

    def __init__(
        self, content: Callable[[Callable[[bytes], Awaitable[None]]], Awaitable[None]], headers: Headers
    ) -> None:
        super().__init__()
        self.content, self.headers = content, headers


class ContainerLives:
    """Those of all containers. max_input: bytes of stdin. closing: set when the proxy ends."""

    def __init__(
        self,
        containers: Containers,
        execs: ContainerExecs,
        calls: ContainerCalls,
        *,
        max_input: int,
        closing: asyncio.Event,
    ) -> None:
        self._containers, self._execs, self._calls = containers, execs, calls
        self._max_input, self._closing = max_input, closing
        self._tasks: set[asyncio.Task[None]] = set()

    async def aclose(self) -> None:
        """Let go of main commands: they end on their own, and `Step.drain` waits for that."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def tell(self, verb: str, asked: DockerRequest, container: Container) -> Local:
        """Do what a POST to a container says.

        Raises:
            Refused: 409, it does not run. Streaming: this one waits.
        """
        if verb == "wait":
            raise self._wait(asked, container)
        if verb == "kill" and container.state != "running":
            name = asked.words[1]
            raise RefusalError(409, "docker", f"Cannot kill container: {name}: Container {container.id} is not running")
        if verb != "start":
            stopped = await self.stop(container)
            if verb != "restart":
                return stopped
        return await self.start(container)

    async def start(self, container: Container) -> Local:
        """Start a container: its main command, where it has one that does something."""
        if container.state == "running":
            return Local(304, headers=())
        rollout = await self._containers.standing(container)
        if container.state == "exited":
            # What its stop ended: here it ends when that would be seen.
            await self._calls.run(rollout, docker.ends_all(container.made.user))
            self._containers.life(container).exited = asyncio.Event()
        container.state, container.started_at = "running", time.time()
        self._containers.save(container)
        if container.made.background:
            await self._background(container, rollout)
        elif container.made.main:
            self._later(self._main(container, rollout))
        return _NOTHING

    async def _background(self, container: Container, rollout: Rollout) -> None:
        """Start a main command that stays, as part of the state; one that cannot be started ends its container."""
        body = await self._calls.run(rollout, docker.main_of(container.made).call(detach=True))
        code = ending(body).exit_code
        if code is not None:
            self._containers.life(container).log = body
            await self._exited(container, code)

    async def _main(self, container: Container, rollout: Rollout) -> None:
        """Run a container's main command, as its first call, and end the container with it."""
        life, execution = self._containers.life(container), docker.main_of(container.made)
        sinks = [Sink(wire.send, streams, tty=execution.tty) for wire, streams in life.attached]
        audience = life.main = Audience(sinks, lambda: None, None)
        try:
            stdin = await life.stdin.input(self._max_input) if life.stdin is not None else b""
            call = execution.call(stdin)
            body = await self._calls.run(rollout, call, audience)
            for sink in sinks:
                if not sink.heard:
                    await sink.take_all(body)
            code = ending(body).exit_code
            life.log = body
        except Exception as error:  # noqa: BLE001 - a background task ends here
            log.warning("a container's main command failed", container=container.id, error=repr(error))
            for sink in sinks:
                await sink.take(ERR, f"forkpoint: {error}\n".encode())
            code = BROKEN
        life.main = None
        if code is not None and container.state == "running":
            await self._exited(container, code)

    async def _exited(self, container: Container, code: int) -> None:
        container.state, container.exit_code, container.finished_at = "exited", code, time.time()
        self._containers.save(container)
        life = self._containers.life(container)
        life.exited.set()
        for wire, _ in life.attached:
            wire.close()
        life.attached.clear()
        if container.made.auto_remove:
            await self._forget(container)

    async def stop(self, container: Container) -> Local:
        """Stop a container; its files stay."""
        if container.state != "running":
            return Local(304, headers=())
        self._containers.life(container).detach()
        await self._exited(container, KILLED)
        return _NOTHING

    async def remove(self, asked: DockerRequest, container: Container) -> Local:
        """Remove a container, and end the rollout that it is.

        Raises:
            Refused: 409, it runs.
        """
        if container.state == "running" and not asked.flag("force"):
            raise RefusalError(
                409, "docker", f'cannot remove container "/{container.name}": container is running: stop the container '
                "before removing or force remove",
            )  # fmt: skip
        await self._forget(container)
        return _NOTHING

    async def _forget(self, container: Container) -> None:
        await self._containers.remove(container)
        self._execs.forget(container)

    def _wait(self, asked: DockerRequest, container: Container) -> Streaming:
        life, condition = self._containers.life(container), asked.query.get("condition", "")

        async def content(send: Callable[[bytes], Awaitable[None]]) -> None:
            # The head at once: clients go on to start the container when they have it.
            await send(b"")
            if condition == "removed":
                await self._first(life.removed.wait())
            elif condition == "next-exit" or container.state == "running":
                await self._first(life.exited.wait())
            if not (self._closing.is_set() and container.state == "running"):
                await send(orjson.dumps({"StatusCode": container.exit_code}) + b"\n")

        return Streaming(content, _JSON)

    async def logs(self, asked: DockerRequest, container: Container) -> Streaming:
        """Return what tells what the main command said."""
        life, tty = self._containers.life(container), container.made.tty
        streams = frozenset(place for place, name in ((1, "stdout"), (2, "stderr")) if asked.flag(name))
        if not streams:
            raise RefusalError(400, "docker", "Bad parameters: you must choose at least one stream")
        if life.log is None and life.main is None and container.made.main:
            rollout = await self._containers.standing(container)
            life.log = self._calls.recorded(rollout, docker.main_of(container.made).call())

        async def content(send: Callable[[bytes], Awaitable[None]]) -> None:
            main = life.main
            if main is None or life.log is not None:
                body = docker_told.tail(life.log or b"", asked.query.get("tail", "all"))
                await send(shown(body, streams, tty=tty) if body else b"")
                return
            pieces: asyncio.Queue[bytes | None] = asyncio.Queue()
            pieces.put_nowait(shown(main.kept.end(0), streams, tty=tty))
            if asked.flag("follow"):
                main.sinks.append(Sink(pieces.put, streams, tty=tty, heard=main.begun))
                self._later(self._end_of(life, pieces))
            else:
                pieces.put_nowait(None)
            while (piece := await pieces.get()) is not None:
                await send(piece)

        return Streaming(content, _RAW if tty else _FRAMES)

    async def top(self, asked: DockerRequest, container: Container) -> Local:
        """Tell who lives in a container, as its own `ps` does."""
        require_running(container)
        rollout = await self._containers.standing(container)
        argv = ["ps", *(asked.query.get("ps_args") or "-ef").split()]
        told: dict[str, Any] = {"argv": argv, "env": {}, "cwd": "/", "user": None, "tty": False}
        body = await self._calls.run(rollout, ToolCall("process", "run", told))
        if ending(body).exit_code:
            raise RefusalError(500, "docker", f"ps: {output(body, OUT).decode(errors='replace').strip()}")
        return docker_told.topped(output(body, OUT).decode(errors="replace"))

    async def attach(self, asked: DockerRequest, container: Container, wire: HijackedConnection) -> None:
        """Let a client hear, and feed, a main command; until that ends.

        Raises:
            Refused: 409, it has ended.
        """
        if container.state == "exited":
            raise RefusalError(409, "docker", "You cannot attach to a stopped container, start it first")
        life, tty = self._containers.life(container), container.made.tty
        streams = frozenset(place for place, name in ((1, "stdout"), (2, "stderr")) if asked.flag(name))
        wire.open(tty=tty)
        life.attached.append((wire, streams))
        if asked.flag("stdin") and container.made.stdin:
            life.stdin = wire
        if life.main is not None:
            life.main.sinks.append(Sink(wire.send, streams, tty=tty, heard=life.main.begun))
        try:
            await self._first(life.exited.wait(), wire.disconnected())
        finally:
            life.attached = [entry for entry in life.attached if entry[0] is not wire]

    async def _end_of(self, life: Life, pieces: "asyncio.Queue[bytes | None]") -> None:
        await self._first(life.exited.wait())
        pieces.put_nowait(None)

    async def _first(self, *coming: Coroutine[Any, Any, object]) -> None:
        """Wait for the first of these, or for the end of the proxy."""
        waiting = {asyncio.ensure_future(one) for one in (*coming, self._closing.wait())}
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()

    def _later(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
