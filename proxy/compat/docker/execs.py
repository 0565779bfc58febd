"""Docker's exec instances: made here, run once, remembered with how they ended."""

import asyncio
import secrets

from proxy.compat.docker import requests as docker
from proxy.compat.docker import responses as docker_told
from proxy.compat.docker.calls import ContainerCalls
from proxy.compat.docker.registry import EXECS, Containers
from proxy.compat.docker.requests import DockerRequest
from proxy.compat.docker.responses import Container, Exec
from proxy.compat.docker.stream import Audience, HijackedConnection, Sink, shown
from proxy.dialects.base import Local
from proxy.refusals import RefusalError
from proxy.tree.rollout import Rollout
from sandboxes.process_output import OUT, ending, output

HEAD_S = 10.0
"""A client whose command waits for a sandbox hears that its stream is open after this: some wait for 60 s at most."""
BROKEN = 125
"""The exit code of an exec that failed for reasons of ours, as Docker's own command line has it."""


class ContainerExecs:
    """Those of all containers, by id. max_input: bytes of stdin."""

    def __init__(self, containers: Containers, calls: ContainerCalls, *, max_input: int) -> None:
        self._containers, self._calls, self._max_input = containers, calls, max_input
        self._execs: dict[str, Exec] = {}

    def new(self, asked: DockerRequest, container: Container) -> Local:
        """Make an instance; nothing runs yet.

        Raises:
            Refused: 409, the container does not run; 400, there is no such command.
        """
        require_running(container)
        body = asked.json()
        execution = docker.execution(body, container.made.user)
        one = Exec(secrets.token_hex(32), container, execution, str(body.get("DetachKeys") or ""))
        self._execs[one.id] = container.execs[one.id] = one
        if len(container.execs) > EXECS:
            oldest = next(iter(container.execs))
            del container.execs[oldest]
            self._execs.pop(oldest, None)
        return docker_told.told({"Id": one.id}, 201)

    def find(self, task: str, owner: str, name: str) -> Exec:
        """Return an instance.

        Raises:
            Refused: 404, there is none: not of this rollout, or no more since the proxy was started again.
        """
        one = self._execs.get(name)
        if one is None or (one.container.task, one.container.owner) != (task, owner):
            raise RefusalError(404, "docker", f"No such exec instance: {name}")
        return one

    def forget(self, container: Container) -> None:
        """Forget a container's instances."""
        for one in container.execs.values():
            self._execs.pop(one.id, None)

    def start_known(self, one: Exec, wire: HijackedConnection) -> bool:
        """Answer the start of one that wants no input and that the tree knows; False where it does not."""
        container = one.container
        rollout, life = self._containers.rollout(container), self._containers.life(container)
        ready = container.state == "running" and life.main is None and not (one.started or one.execution.stdin)
        known = self._calls.known(rollout, one.execution.call()) if rollout is not None and ready else None
        if known is None:
            return False
        record, body = known
        one.started = True
        headers = (("cache-status", "forkpoint; hit"), ("x-forkpoint-node", f"n{record.target.id}"))
        wire.answer(self._ended(one, body), tty=one.execution.tty, headers=headers)
        return True

    async def start(self, one: Exec, wire: HijackedConnection) -> None:
        """Run one for the client behind wire."""
        rollout, execution = await self._begin(one), one.execution
        life = self._containers.life(one.container)
        sink = Sink(wire.send, execution.streams, tty=execution.tty)

        def begun() -> None:
            wire.open(tty=execution.tty)

        audience = Audience([sink], begun, wire.disconnected)
        patience = asyncio.get_running_loop().call_later(HEAD_S, begun)
        life.running.add(audience)
        try:
            if execution.stdin:
                begun()
            stdin = await wire.input(self._max_input) if execution.stdin else b""
            body = await self._calls.run(rollout, execution.call(stdin), audience)
        except BaseException:
            one.running, one.exit_code = False, BROKEN
            raise
        finally:
            patience.cancel()
            life.running.discard(audience)
        told = self._ended(one, body)
        begun()
        await wire.send(b"" if sink.heard else told)

    async def start_detached(self, one: Exec, asked: DockerRequest) -> Local:
        """Start one that nobody listens to.

        Raises:
            Refused: 400, it cannot be started, or it is to be listened to.
        """
        if not asked.json().get("Detach"):
            raise RefusalError(
                400, "docker", "an exec that is not detached takes its connection over: use HTTP/1.1, POST"
            )
        rollout = await self._begin(one)
        try:
            body = await self._calls.run(rollout, one.execution.call(detach=True))
        except BaseException:
            one.running, one.exit_code = False, BROKEN
            raise
        self._ended(one, body)
        if one.exit_code is not None:
            raise RefusalError(400, "docker", output(body, OUT).decode(errors="replace").strip())
        return Local(200, headers=())

    async def _begin(self, one: Exec) -> Rollout:
        if one.started:
            raise RefusalError(409, "docker", f"Error: Exec command {one.id} is already running")
        require_running(one.container)
        one.started = True
        rollout = await self._containers.standing(one.container)
        main = self._containers.life(one.container).main
        if main is not None:
            # It would keep all others waiting to its end.
            main.detach()
        one.running = True
        return rollout

    def _ended(self, one: Exec, body: bytes) -> bytes:
        """Note how one ended; return its output as its client reads it."""
        one.exit_code = ending(body).exit_code
        one.running = one.exit_code is None
        return shown(body, one.execution.streams, tty=one.execution.tty)


def require_running(container: Container) -> None:
    """Raise where a container does not run.

    Raises:
        Refused: 409.
    """
    if container.state != "running":
        raise RefusalError(409, "docker", f"Container {container.id} is not running")
