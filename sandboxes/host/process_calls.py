"""Calls that run a process, whose output goes to the client at once, or that are about one in the background."""

import asyncio
import socket
from collections.abc import Mapping
from dataclasses import replace

from sandboxes.calls import Execution, ToolCall, ToolResult
from sandboxes.effects import Effect
from sandboxes.errors import SandboxError
from sandboxes.guest.files.operations import problem
from sandboxes.host.guest import Guest
from sandboxes.host.guest_link import GRACE_S
from sandboxes.host.translate import execution
from sandboxes.ipc.codec import Envelope
from sandboxes.ipc.messages import CallDone, Detach, ProcessOutcome, RunProcess, UseBackgroundProcess
from sandboxes.listener import Detachable, Listener
from sandboxes.process_output import ERR, MEDIA_TYPE, OUT, Frames, Incoming, ending, environment, frame, output, refusal
from sandboxes.spec import EnvironmentSpec
from sandboxes.task_owner import start

_CHUNK_BYTES = 1 << 16
"""How much output is read at once."""
_BACKGROUND_TOOLS = frozenset({"list", "attend", "write", "close", "resize", "signal", "watch", "unwatch"})


class ProcessCalls:
    """Runs processes of their own in one sandbox, and polls those in the background."""

    def __init__(self, guest: Guest, spec: EnvironmentSpec, environment: Mapping[str, str]) -> None:
        """Prepare for a sandbox's calls; `environment`, which is the image's, gives way to the spec's variables."""
        self._guest, self._spec, self._environment = guest, spec, environment

    @staticmethod
    def handles(call: ToolCall) -> bool:
        """Whether a call runs a process of its own, or is about one in the background."""
        return call.endpoint == "process" and (call.tool == "run" or call.tool in _BACKGROUND_TOOLS)

    async def execute(self, call: ToolCall, listener: Listener | None) -> Execution:
        """Carry a call out. The listener receives the output of a process while it comes, but not its exit code."""
        return await (self._run(call, listener) if call.tool == "run" else self._use_background(call))

    async def _run(self, call: ToolCall, listener: Listener | None) -> Execution:
        reason = refusal(call.arguments.get("argv"), call.arguments.get("env") or {})
        if reason:
            return Execution(ToolResult(*problem(400, "Bad process", reason)), Effect.NONE, 0.0)
        timeout_s = float(call.arguments.get("timeout_s") or self._spec.limits.timeout_s)
        # The answer says only that the process was started; its end comes unasked.
        started = await self._guest.ask(self._request(call, timeout_s), call.body, timeout_s)
        link = self._guest.link
        try:
            # The socket with the output ends first; then the supervisor reports how the call ended.
            frames = await self._pass_on(started.fds[0], listener, within_s=timeout_s + GRACE_S)
            return _ran(call, frames, self._guest.conclude(await link.next(CallDone)), self._spec)
        # The unasked `CallDone` of this call could be taken for the answer to the next request.
        except asyncio.CancelledError:
            link.die("its call was cancelled")
            raise
        # Also for errors that the link did not see, such as an output that never ended.
        except SandboxError as error:
            link.die(str(error))
            raise

    def _request(self, call: ToolCall, timeout_s: float) -> RunProcess:
        arguments = {**call.arguments, "cwd": call.arguments.get("cwd") or self._spec.directory}
        base, given = {**self._environment, **self._spec.env}, call.arguments.get("env") or {}
        variables = environment(base, given, tty=bool(call.arguments.get("tty")))
        # Clients may send numbers as values.
        return RunProcess(arguments, {name: str(value) for name, value in variables.items()}, timeout_s)

    async def _pass_on(self, end: int, listener: Listener | None, *, within_s: float) -> Frames:
        frames, incoming, loop = Frames(), Incoming(), asyncio.get_running_loop()
        # Beside the output, because a client may leave while the process prints nothing.
        detaching = start(self._detach_on_request(listener))
        connection = socket.socket(fileno=end)
        connection.setblocking(False)
        try:
            # The supervisor kills the process when its time is up; this limit is for one that does not.
            async with asyncio.timeout(within_s):
                if listener is not None:
                    # The head goes out before any output, so that a client knows at once that its process runs.
                    await listener.head(200, (("Content-Type", MEDIA_TYPE),))
                # The supervisor closes the socket when the process ends or goes to the background.
                while data := await loop.sock_recv(connection, _CHUNK_BYTES):
                    for kind, piece in incoming.feed(data):
                        # Recorded first: a client that is slow or gone must not change the record.
                        frames.add(kind, piece)
                        if listener is not None:
                            await listener.data(frame(kind, piece))
        except TimeoutError as error:
            raise SandboxError("a process gave no sign of its end in time") from error
        finally:
            # Cancelled before the socket is closed, so that no `Detach` follows a process that has ended.
            detaching.cancel()
            await asyncio.gather(detaching, return_exceptions=True)
            connection.close()
        return frames

    async def _detach_on_request(self, listener: Listener | None) -> None:
        if isinstance(listener, Detachable):
            await listener.detached()
            # Not answered: the process may end at the same moment.
            await self._guest.link.post(Detach())

    async def _use_background(self, call: ToolCall) -> Execution:
        timeout_s = self._spec.limits.timeout_s
        request = UseBackgroundProcess(call.tool, dict(call.arguments), timeout_s)
        return _used(call, self._guest.conclude(await self._guest.ask(request, call.body, timeout_s)))


def _ran(call: ToolCall, frames: Frames, done: Envelope[CallDone], spec: EnvironmentSpec) -> Execution:
    outcome = done.message.outcome
    assert isinstance(outcome, ProcessOutcome), "the supervisor ran a process"
    body = frames.end(outcome.exit_code, timed_out=outcome.timed_out)
    ran = execution(done, ToolResult(200, MEDIA_TYPE, body, marks=() if frames.whole else ("output",)))
    # What was typed at a terminal, and when, shows in its output: it holds for this rollout alone.
    steady = ran.shareable and frames.whole and not ("process" in call.arguments and call.arguments.get("tty"))
    if outcome.kept and outcome.exit_code is None:
        # A replay leaves the process when as much output has come as now.
        until = {str(stream): len(output(body, stream)) for stream in (OUT, ERR)}
        replay = replace(call, arguments={**call.arguments, "until": until})
        return replace(ran, shareable=steady, effect=ran.effect | Effect.PROCESSES, replay=replay)
    # A process without exit code that was not left on purpose was cut off: that is no result to share.
    abandoned = outcome.exit_code is None and not outcome.detached
    in_time = spec.shares_timeouts or not outcome.timed_out
    return replace(ran, shareable=steady and in_time and not abandoned)


def _used(call: ToolCall, done: Envelope[CallDone]) -> Execution:
    """Return what came of a call about a background process (pure)."""
    # A poll that returned output creates a new node, because restoring it must not return the same output again.
    # Writing to a process's stdin does too, whether or not the process has read it.
    ran = execution(done)
    # A list and a refusal change nothing.
    if call.tool == "list" or ran.result.status != 200:
        return ran
    if call.tool != "attend":
        # What happens in a watched directory depends on the moment, so it is for this rollout alone.
        return replace(ran, effect=ran.effect | Effect.PROCESSES, shareable=ran.shareable and call.tool != "watch")
    exit_code = ending(ran.result.body).exit_code
    # Sizes and not bytes: a replay reads until as much has come, whatever the pieces were.
    sizes = {str(stream): len(output(ran.result.body, stream)) for stream in (OUT, ERR)}
    replay = replace(call, arguments={**call.arguments, "until": {**sizes, "ended": exit_code is not None}})
    # No output and no end: there is nothing to record, and the next poll has the same key.
    is_empty = not any(sizes.values()) and exit_code is None
    return replace(ran, effect=ran.effect | Effect.PROCESSES, replay=replay, is_empty=is_empty)
