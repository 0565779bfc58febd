"""Docker's exec instances.

Docker runs a command in two requests: the first creates an instance, the second starts it. Only the start is a call of
the rollout. An instance is kept in memory after its end, because clients then ask for its exit code.
"""

import asyncio
import secrets
from functools import partial

from proxy.compat.docker import requests, responses
from proxy.compat.docker.calls import ContainerCalls
from proxy.compat.docker.containers import Container, Exec, ExecState, ShownContainers
from proxy.compat.docker.output import OutputListener, OutputSink, client_output
from proxy.compat.docker.registry import ContainerRegistry
from proxy.compat.docker.requests import DockerRequest
from proxy.compat.docker.stream import StreamConnection
from proxy.dialects.base import Local
from proxy.refusals import RefusalError
from proxy.tree.rollout import Rollout
from sandboxes.process_output import OUT, ending, output

HEAD_DELAY_S = 10.0
"""Delay after which the stream is opened although its command waits for a sandbox: some clients time out after 60 s."""
FAILED_EXIT_CODE = 125
"""Exit code of a command that Forkpoint could not run, as `docker run` reports it for the daemon's failures."""
MAX_EXECS = 256
"""How many exec instances a container remembers, the latest ones."""


class ContainerExecs:
    """The exec instances of all containers, by ID."""

    def __init__(self, registry: ContainerRegistry, calls: ContainerCalls, *, max_stdin_bytes: int) -> None:
        self._registry, self._calls, self._max_stdin_bytes = registry, calls, max_stdin_bytes
        self._execs: dict[str, Exec] = {}

    def create(self, request: DockerRequest, container: Container) -> Local:
        """Create an instance. Raises RefusalError: 409 if the container does not run; 400 if there is no command."""
        require_running(container)
        body = request.json()
        spec = requests.exec_spec(body, "" if container.service else container.spec.user, container.service)
        instance = Exec(secrets.token_hex(32), container, spec, str(body.get("DetachKeys") or ""))
        self._execs[instance.id] = container.execs[instance.id] = instance
        # An agent may exec thousands of times in one container; clients ask only about the latest.
        if len(container.execs) > MAX_EXECS:
            oldest = next(iter(container.execs))
            del container.execs[oldest]
            self._execs.pop(oldest, None)
        return responses.json_response({"Id": instance.id}, 201)

    def find(self, shown: ShownContainers, exec_id: str) -> Exec:
        """Return an instance. Raises RefusalError (404) if this URL has none, or the proxy was restarted since."""
        instance = self._execs.get(exec_id)
        if instance is None or not shown.includes(instance.container):
            raise RefusalError(404, "docker", f"No such exec instance: {exec_id}")
        return instance

    def forget(self, container: Container) -> None:
        """Forget the instances of a container."""
        for exec_id in container.execs:
            self._execs.pop(exec_id, None)

    def start_known(self, instance: Exec, connection: StreamConnection) -> bool:
        """Start an instance whose result the tree knows, without an await; False if `start` has to do it."""
        container = instance.container
        rollout = self._registry.rollout(container)
        # While the main command runs its call is not recorded, so the tree does not know the node after it.
        waits_for_main = self._registry.activity(container).main is not None
        can_start = container.is_running and instance.state is ExecState.CREATED and not instance.spec.stdin
        if rollout is None or waits_for_main or not can_start:
            return False
        known = self._calls.known(rollout, instance.spec.call())
        if known is None:
            return False
        record, answer = known
        # `known` has taken the step, so from here on the instance must not run again.
        instance.exit(ending(answer.body).exit_code, answer.marks)
        headers = (("cache-status", "forkpoint; hit"), ("x-forkpoint-node", f"n{record.target.id}"), *answer.marks)
        connection.answer(_client_output(instance, answer.body), tty=instance.spec.tty, headers=headers)
        return True

    async def start(self, instance: Exec, connection: StreamConnection) -> None:
        """Start an instance, and send its output until it ends or its client leaves. Raises RefusalError."""
        # Errors before the stream is open are shown as the client expects its output.
        connection.tty = instance.spec.tty
        rollout, spec = await self._begin(instance), instance.spec
        activity = self._registry.activity(instance.container)
        sink = OutputSink(connection.send, spec.streams, tty=spec.tty)
        open_stream = partial(connection.open, tty=spec.tty)
        listener = OutputListener([sink], open_stream, connection.disconnected)
        # Normally the start of the process opens the stream, so that errors before it are HTTP responses.
        opening = asyncio.get_running_loop().call_later(HEAD_DELAY_S, open_stream)
        # Listed, so that stopping the container can detach it.
        activity.running.add(listener)
        try:
            if spec.stdin:
                # The client sends stdin once it has the head.
                open_stream()
            stdin = await connection.input(self._max_stdin_bytes) if spec.stdin else b""
            answer = await self._calls.answer(rollout, spec.call(stdin), listener)
        # Cancellation too: clients ask for the exit code of an instance whose stream broke.
        except BaseException:
            instance.exit(FAILED_EXIT_CODE)
            raise
        finally:
            opening.cancel()
            activity.running.discard(listener)
        instance.exit(ending(answer.body).exit_code, answer.marks)
        open_stream()
        # A hit runs nothing, so the listener received nothing: send the recorded output.
        if not sink.has_output:
            await connection.send(_client_output(instance, answer.body))

    def fail(self, instance: Exec) -> None:
        """Note that an instance was not run, unless it has an exit code."""
        if instance.exit_code is None:
            instance.exit(FAILED_EXIT_CODE)

    async def start_detached(self, instance: Exec, request: DockerRequest) -> Local:
        """Start an instance in the background. Raises RefusalError: 400 if it cannot be or wants a stream, or 409."""
        if not request.json().get("Detach"):
            raise RefusalError(
                400, "docker", "An exec that is not detached takes its connection over. Use POST with HTTP/1.1."
            )
        rollout = await self._begin(instance)
        try:
            body = await self._calls.run(rollout, instance.spec.call(detach=True))
        except BaseException:
            instance.exit(FAILED_EXIT_CODE)
            raise
        instance.exit(ending(body).exit_code)
        if instance.exit_code is not None:
            # A detached call returns an exit code only if the command could not be started.
            raise RefusalError(400, "docker", output(body, OUT).decode(errors="replace").strip())
        return Local(200, headers=())

    async def _begin(self, instance: Exec) -> Rollout:
        """Claim an instance, and return its rollout."""
        if instance.state is not ExecState.CREATED:
            raise RefusalError(409, "docker", f"Error: Exec command {instance.id} is already running")
        require_running(instance.container)
        # Claimed before the first await, so that a concurrent start is refused.
        instance.state = ExecState.RUNNING
        try:
            rollout = await self._registry.require_rollout(instance.container)
        except BaseException:
            instance.exit(FAILED_EXIT_CODE)
            raise
        main = self._registry.activity(instance.container).main
        if main is not None:
            # Calls of a rollout run one at a time: the main command would block every exec until it exits.
            main.detach()
        return rollout


def _client_output(instance: Exec, body: bytes) -> bytes:
    return client_output(body, instance.spec.streams, tty=instance.spec.tty)


def require_running(container: Container) -> None:
    """Raise RefusalError (409) if a request's container does not run."""
    if not container.is_running:
        why = f": {container.lost}" if container.lost else ""
        raise RefusalError(409, "docker", f"Container {container.id} is not running{why}")
