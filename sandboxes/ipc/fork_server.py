"""Fork servers: child processes that have loaded everything once, and fork other processes on request.

A fork takes a millisecond, a fresh interpreter some fifty. Two kinds exist: the launcher of `local` sandboxes and the
zygote of query workers. Each has a module with a `main` that uses `ipc.fork_child`.
"""

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import cast

import msgspec

from sandboxes import IMPORT_ROOT
from sandboxes.errors import SandboxError
from sandboxes.ipc.channel import Channel, ChannelClosedError, PeerFailedError
from sandboxes.ipc.codec import AnswerT, Envelope, IpcMessage, IpcRequest, answers_of, decode
from sandboxes.ipc.frames import MalformedFrameError
from sandboxes.ipc.launch_messages import ForkServerReady
from sandboxes.ipc.launched_process import LaunchedProcess, launch
from sandboxes.ipc.messages import Failed

START_S = 30.0
"""Longest wait for a fork server to start or to respond: either takes milliseconds, seconds on a busy machine."""

STOP_S = 10.0
"""Longest wait for a fork server to exit after its socket was closed; it is killed then."""

_LIBRARY_ROOT = str(Path(msgspec.__file__).parent.parent)
"""The directory that msgspec lies in, for children that load no other installed package."""
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}


def command_of(module: str, end: int, arguments: Sequence[str], *, site_packages: bool = False) -> list[str]:
    """Return the command that runs a module's `main` with a descriptor and further arguments (pure)."""
    # The path is set before the first import, because -I and -S leave an interpreter without ours. A child without
    # installed packages gets msgspec all the same, and nothing else from where it lies.
    library = f"sys.path.insert(0, {_LIBRARY_ROOT!r}); import msgspec; del sys.path[0]; "
    program = (
        f"import sys; {'' if site_packages else library}"
        f"sys.path.insert(0, {IMPORT_ROOT!r}); from {module} import main; main()"
    )
    # -I: nothing of the user's environment. -S: no site-packages. -B: no bytecode files beside the sources.
    flags = ["-I", "-B"] if site_packages else ["-I", "-S", "-B"]
    return [sys.executable, *flags, "-c", program, str(end), *arguments]


class ForkServer:
    """A child process that forks on request, and the channel to it.

    The child exits when this process closes its end of their socket, or dies. What the child has forked ends with it,
    by death signals or by its own code.
    """

    def __init__(
        self,
        name: str,
        module: str,
        arguments: Sequence[str] = (),
        *,
        hint: str = "",
        site_packages: bool = False,
        environment: Mapping[str, str] = ENVIRONMENT,
        prepare: Callable[[int], None] = lambda _pid: None,
        service: str = "",
    ) -> None:
        """Describe a child that runs the `main` of a module; `start` starts it.

        `hint` ends the error text of a child that does not start. Without `site_packages` a child starts faster.
        `prepare` gets the pid of each child before it forks anything. `service` is the socket of a service that starts
        the child instead of this process (`launched_process`).
        """
        self._name, self._module, self._arguments, self._hint = name, module, arguments, hint
        self._site_packages, self._environment, self._prepare = site_packages, environment, prepare
        self._service = service
        self._channel: Channel | None = None
        self._process: asyncio.subprocess.Process | LaunchedProcess | None = None
        # Several sandboxes may find the child dead at once; one of them starts the next.
        self._restarting = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        """The child's pid; None before `start` and after `close`."""
        return None if self._process is None else self._process.pid

    @property
    def is_open(self) -> bool:
        """Whether the fork server was started and not closed; the child may have died all the same."""
        return self._channel is not None

    @property
    def has_died(self) -> bool:
        """Whether the child exited without being closed, and everything that it forked with it."""
        # The kernel is asked too: the end of what the child has forked may be read before its own, and a process that
        # it has just forked holds its end of the socket open.
        return self._channel is not None and (self._channel.lost is not None or self._has_exited())

    def _has_exited(self) -> bool:
        if self._process is None:
            return False
        if self._process.returncode is not None:
            return True
        if isinstance(self._process, LaunchedProcess):
            return False
        try:
            # Not reaped here (WNOWAIT): that is the event loop's part.
            return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            # The loop has reaped it, and has yet to say so.
            return True

    async def start(self) -> ForkServerReady:
        """Start the child, and return its first message."""
        # Closed by the kernel when either process dies, however it dies: no file, no name, nothing to clean up.
        ours, theirs = socket.socketpair()
        # Our copy of the child's end must go: as long as it is open, the death of the child is not seen.
        with theirs:
            try:
                self._process = await self._start_process(theirs)
            except BaseException:
                ours.close()
                raise
        self._channel = Channel(ours)
        # The first message comes unasked, after the child has loaded everything.
        try:
            async with asyncio.timeout(START_S):
                ready = (await self._channel.next(ForkServerReady)).message
        # The process stays: `close`, which the driver calls after a failed start, ends it. A child that fails says what
        # it lacks, such as a right or a kernel feature.
        except (ChannelClosedError, PeerFailedError, TimeoutError) as error:
            raise SandboxError(self._start_failure(str(error) or f"no response within {START_S:g} s")) from error
        self._prepare(self._process.pid)
        return ready

    async def _start_process(self, end: socket.socket) -> "asyncio.subprocess.Process | LaunchedProcess":
        if self._service:
            try:
                return await launch(self._service, end, self._arguments)
            except (OSError, ValueError) as error:
                raise SandboxError(self._start_failure(str(error))) from error
        command = command_of(self._module, end.fileno(), self._arguments, site_packages=self._site_packages)
        # A session of its own: the proxy's may have a niceness, which sandboxes would show.
        return await asyncio.create_subprocess_exec(
            *command, start_new_session=True, pass_fds=[end.fileno()], env=dict(self._environment), cwd="/",
            stdin=asyncio.subprocess.DEVNULL,
        )  # fmt: skip

    def _start_failure(self, reason: str) -> str:
        return f"{self._name} does not start: {reason}. {self._hint}".rstrip()

    async def ensure_running(self) -> None:
        """Start another child if this one died: a sandbox that starts now need not suffer for the earlier ones."""
        async with self._restarting:
            # Looked at behind the lock: another sandbox may have started the child meanwhile.
            if self.has_died:
                if self._channel is not None:
                    # Whoever still waits for an answer is told.
                    self._channel.close("it ended")
                if self._process is not None:
                    # Reaped first, so that no zombie stays.
                    await self._process.wait()
                await self.start()

    async def ask(self, request: IpcRequest[AnswerT], fds: Sequence[int] = ()) -> Envelope[AnswerT]:
        """Send the child a request and return its answer, whose descriptors are the caller's to close."""
        if self._channel is None:
            raise SandboxError(f"{self._name} is not running: the driver is not open")
        try:
            # Limited, because a child in an uninterruptible system call answers never.
            async with asyncio.timeout(START_S):
                frame = await self._channel.request(request, fds=fds)
        # The answer may still come; the channel keeps its position, so it does not go to the next caller.
        except TimeoutError as error:
            raise SandboxError(f"{self._name} gave no response within {START_S:g} s") from error
        except ChannelClosedError as error:
            raise SandboxError(f"{self._name} ended: {error}. Retry: the next sandbox starts another.") from error
        try:
            answer = decode(frame, *answers_of(type(request)), Failed)
        except MalformedFrameError as error:
            # The kernel drops descriptors for which this process has no room (recvmsg(2)).
            raise SandboxError(f"{self._name}: {error}. Raise the limit of open files: ulimit -n.") from error
        # An error is an answer: the child goes on, and its channel is in order.
        if isinstance(answer.message, Failed):
            raise SandboxError(f"{self._name}: the kernel refused: {answer.message.error}")
        return cast("Envelope[AnswerT]", answer)

    async def post(self, message: IpcMessage, fds: Sequence[int] = ()) -> None:
        """Send the child a message that it does not answer; the descriptors stay open here."""
        if self._channel is not None:
            await self._channel.post(message, fds)
        # Looked at afterwards: the channel may have been lost by the send itself.
        if self._channel is None or self._channel.lost is not None:
            raise SandboxError(f"{self._name} is not running. Retry: the next sandbox starts another.")

    def disconnect(self) -> None:
        """Close the socket, which tells the child to exit. Idempotent."""
        # Forgotten before the close, so that a second call finds nothing to do.
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    async def close(self) -> None:
        """Disconnect and return when the child has exited; kill it after `STOP_S`. Idempotent."""
        self.disconnect()
        # Taken out first: `pid` must not name a process that is ending.
        process, self._process = self._process, None
        if process is None:
            return
        try:
            async with asyncio.timeout(STOP_S):
                await process.wait()
        except TimeoutError:
            # It may end by itself between the timeout and the kill.
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            # Also after a kill: a process that is not reaped stays as a zombie.
            await process.wait()
