"""A process of its own, asked for from the driver's side; what the sandboxes of both drivers share."""

import asyncio
import contextlib
import socket
from collections.abc import Coroutine, Mapping
from dataclasses import replace
from typing import Any

from sandboxes.calls import Execution, ToolCall, ToolResult
from sandboxes.effects import Effect
from sandboxes.errors import SandboxError
from sandboxes.guest.file_ops import problem
from sandboxes.host.guest_link import GRACE_S
from sandboxes.host.translate import execution
from sandboxes.ipc.frames import Message
from sandboxes.listener import Detachable, Listener
from sandboxes.process_output import ERR, MEDIA_TYPE, OUT, Frames, Incoming, ending, environment, frame, output, refusal
from sandboxes.spec import EnvironmentSpec

HOST = "sandbox"
"""What `hostname` says in every sandbox."""
_CHUNK = 1 << 16
_TENDING = frozenset({"list", "attend", "write", "close", "resize", "signal", "watch", "unwatch"})


def is_process(call: ToolCall) -> bool:
    """Whether call runs a process of its own."""
    return call.endpoint == "process" and call.tool == "run"


def is_tending(call: ToolCall) -> bool:
    """Whether call is about processes that were left running."""
    return call.endpoint == "process" and call.tool in _TENDING


def tended(call: ToolCall, answer: Message) -> Execution:
    """Return what came of a call about such processes (pure).

    One that was told of what a process has said makes a state: in a sandbox that stands there it has said so much. So
    does one that gave a process something: whether or not it has taken that up yet, it is there.
    """
    done = execution(answer, float(answer.fields["seconds"]))
    if call.tool == "list" or done.result.status != 200:
        return done
    if call.tool != "attend":
        # What happens in a directory that is watched hangs on the moment: that is for who watches alone.
        return replace(done, effect=done.effect | Effect.PROCESSES, shareable=call.tool != "watch")
    told = ending(done.result.body)
    said = {str(place): len(output(done.result.body, place)) for place in (OUT, ERR)}
    until = {**said, "ended": told.exit_code is not None}
    replay = replace(call, arguments={**call.arguments, "until": until})
    nothing = not any(said.values()) and told.exit_code is None
    return replace(done, effect=done.effect | Effect.PROCESSES, replay=replay, is_empty=nothing)


def request(call: ToolCall, spec: EnvironmentSpec, base: Mapping[str, str], timeout_s: float) -> dict[str, Any]:
    """Return what pid 1, or a keeper, is asked for call; base: the variables of the image (pure)."""
    asked = {**call.arguments, "cwd": call.arguments.get("cwd") or spec.workdir}
    told = environment({**base, **spec.env}, call.arguments.get("env") or {}, HOST, tty=bool(call.arguments.get("tty")))
    return {"op": "process", "arguments": asked, "environment": told, "timeout_s": timeout_s}


def refused(call: ToolCall) -> Execution | None:
    """Return the answer to a call that no sandbox needs to see (pure)."""
    why = refusal(call.arguments.get("argv"), call.arguments.get("env") or {})
    return Execution(ToolResult(*problem(400, "Bad process", why)), Effect.NONE, 0.0) if why else None


class ProcessConversation:
    """One process and who listens to it. hears: what its sandbox's other side says; tell: says something to it."""

    def __init__(self, call: ToolCall, listener: Listener | None) -> None:
        self._call, self._listener = call, listener
        self.frames = Frames()

    async def hear(self, end: int, leave: Coroutine[Any, Any, None], *, within_s: float) -> None:
        """Take the frames that come on end until it is closed, and pass them on; leave: awaited if the client leaves.

        Raises:
            SandboxError: nothing has ended after within_s.
        """
        leaving = asyncio.ensure_future(self._departure(leave))
        connection = socket.socket(fileno=end)
        connection.setblocking(False)
        try:
            async with asyncio.timeout(within_s + GRACE_S):
                if self._listener is not None:
                    await self._listener.head(200, (("Content-Type", MEDIA_TYPE),))
                await self._pass_on(connection)
        except TimeoutError as error:
            raise SandboxError("a process gave no sign of its end in time") from error
        finally:
            leaving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await leaving
            leave.close()
            connection.close()

    async def _pass_on(self, connection: socket.socket) -> None:
        incoming, loop = Incoming(), asyncio.get_running_loop()
        while data := await loop.sock_recv(connection, _CHUNK):
            for kind, piece in incoming.feed(data):
                self.frames.add(kind, piece)
                if self._listener is not None:
                    await self._listener.data(frame(kind, piece))

    async def _departure(self, leave: Coroutine[Any, Any, None]) -> None:
        if isinstance(self._listener, Detachable):
            await self._listener.detached()
            await leave

    def execution(self, answer: Message) -> Execution:
        """Return what came of it; answer: what pid 1, or a keeper, saw."""
        told: Mapping[str, Any] = answer.fields
        body = self.frames.end(told["exit_code"], timed_out=told["timed_out"])
        done = execution(answer, float(told["seconds"]), ToolResult(200, MEDIA_TYPE, body))
        if told.get("kept") and told["exit_code"] is None:
            return self._left(done, body)
        gone = told["exit_code"] is None and not told.get("detached")
        return replace(done, shareable=self._steady and not told["timed_out"] and not gone)

    def _left(self, done: Execution, body: bytes) -> Execution:
        """Return what is known of a process that is kept track of: a replay leaves it when it has said as much."""
        until = {str(place): len(output(body, place)) for place in (OUT, ERR)}
        replay = replace(self._call, arguments={**self._call.arguments, "until": until})
        return replace(done, shareable=self._steady, effect=done.effect | Effect.PROCESSES, replay=replay)

    @property
    def _steady(self) -> bool:
        """Whether others may be answered with it: what somebody can type at shows what came in which moment."""
        typed_at = "process" in self._call.arguments and self._call.arguments.get("tty")
        return self.frames.whole and not typed_at
