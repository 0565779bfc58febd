"""What the sandboxes of all machine drivers do alike: they run every kind of call through their supervisor."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sandboxes.calls import Execution, ToolCall, ToolResult
from sandboxes.driver import SETTLE_S
from sandboxes.effects import Effect
from sandboxes.errors import SandboxError
from sandboxes.host.defaults import RESERVE_BYTES
from sandboxes.host.guest_link import GuestLink
from sandboxes.host.inspect import entries_of, state_look
from sandboxes.host.mcp_calls import McpCalls
from sandboxes.host.process_calls import ProcessCalls
from sandboxes.host.pty import Pty
from sandboxes.host.server_calls import ServerCalls
from sandboxes.host.tool_calls import ToolCalls
from sandboxes.host.translate import command_execution, refuse, request, sql_execution
from sandboxes.inspection import FileEntry, StateView
from sandboxes.ipc.channel import Channel
from sandboxes.ipc.codec import AnswerT, Envelope, IpcRequest
from sandboxes.ipc.messages import CallDone, DescribeState, ExpectOrder, OpenTerminal, RunFileOperation, TerminalFailed
from sandboxes.listener import Listener
from sandboxes.spec import EnvironmentSpec
from sandboxes.task_owner import start

if TYPE_CHECKING:
    from sandboxes.egress.gateway import SandboxEgress

LOOK_S = 30.0
"""Timeout for reading files and their attributes, for people who look at a state."""


class MachineSandbox(ABC):
    """A sandbox with a supervisor: pid 1."""

    def __init__(
        self,
        name: str,
        channel: Channel,
        spec: EnvironmentSpec,
        folder: Path,
        known_reads: dict[str, frozenset[str]],
        *,
        server_environment: Mapping[str, str],
        process_environment: Mapping[str, str],
    ) -> None:
        """Take over a channel to the supervisor.

        Long answers of tool servers are stored in `folder` while they come. For `known_reads` see `McpCalls`. The two
        environments are variables of tool servers and of processes; those of the spec replace them.
        """
        self.id, self.closed = name, False
        self.egress: SandboxEgress | None = None  # The sandbox's way to hosts outside.
        # The link kills when it dies, so no path of an error can forget to.
        self.link = GuestLink(name, channel, self._kill)
        self._spec = spec
        servers = ServerCalls(self)
        self._processes = ProcessCalls(self, spec, process_environment)
        self._tools = ToolCalls(servers, spec, server_environment, folder)
        self._mcp = McpCalls(self, servers, spec, server_environment, known_reads)
        # In the past: a sandbox without calls has nothing that is starting.
        self._stirred_at = self._settled_at = 0.0
        self._closing: asyncio.Task[None] | None = None

    @property
    def alive(self) -> bool:
        """Whether calls can be run."""
        return self.link.alive

    # -- what drivers add --------------------------------------------------------------------------------------------

    @abstractmethod
    def _kill(self) -> None:
        """End everything that runs in the sandbox, now."""

    @abstractmethod
    async def _close(self) -> None:
        """End what runs, free what no frozen state holds, and set `closed`. It runs once."""

    @abstractmethod
    async def _settle(self) -> None:
        """Wait for what the last call left to do."""

    @abstractmethod
    def _begin_after_call(self, done: CallDone) -> None:
        """Begin what a call leaves to do."""

    @abstractmethod
    def _forget_frozen(self) -> None:
        """Forget what is known of the current state, which is about to change without a call."""

    @property
    @abstractmethod
    def _disk(self) -> str:
        """Where the disk is that the sandbox fills, for error texts, with its preposition."""

    # -- lifetime ----------------------------------------------------------------------------------------------------

    async def start_servers(self) -> None:
        """Start the tool servers that belong to the root state. If one fails, the sandbox is closed.

        Raises ServerError if one of them did not get ready.
        """
        try:
            # In this order, because an MCP server over HTTP may be one of the tool servers.
            await self._tools.start()
            await self._mcp.start()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Kill all processes and free what no frozen state holds. It completes even if the caller is cancelled."""
        # One close for all callers: a second one waits for the first.
        if self._closing is None:
            # First, so that a call that comes now is refused and not begun in a half-closed sandbox.
            self.link.death = self.link.death or "it was closed"
            self._closing = start(self._end(), name=f"close {self.id}")
        # A cancelled caller must not leave a sandbox half removed; the next `close` waits for `_closing`, too.
        await asyncio.shield(self._closing)

    async def _end(self) -> None:
        try:
            await self._close()
        finally:
            if self.egress is not None:
                await self.egress.close()

    # -- calls -------------------------------------------------------------------------------------------------------

    async def execute(self, call: ToolCall, listener: Listener | None = None) -> Execution:
        """Run a call; see `Sandbox.execute`. If it is cancelled, the sandbox is dead.

        The listener receives the answer of a tool server, or the output of a process, while it comes.
        """
        execution = await self._run(call, listener)
        if self.egress is None:
            return execution
        try:
            return await self.egress.conclude(execution)
        # Cancelled too: what came in with this call would be lost.
        except BaseException as error:
            self.link.die(f"what came through its egress is not known: {error}")
            raise

    async def _run(self, call: ToolCall, listener: Listener | None) -> Execution:
        # Four kinds of calls, each with a conversation of its own; what remains is one request and one answer.
        if self._processes.handles(call):
            return await self._processes.execute(call, listener)
        if call.endpoint == "mcp":
            return await self._mcp.execute(call, listener)
        if self._tools.handles(call):
            return await self._tools.execute(call, listener)
        # Before the supervisor gets it, so a wrong call neither wakes the sandbox nor changes its state.
        refusal = refuse(call)
        if refusal is not None:
            return Execution(ToolResult(*refusal), Effect.NONE, 0.0, None)
        timeout_s = float(call.arguments.get("timeout_s", self._spec.limits.timeout_s))
        message, body = request(call, self._spec, timeout_s)
        done = self.conclude(await self.ask(message, body, timeout_s))
        translated = sql_execution(done, call, self._spec) if call.endpoint == "sql" else None
        return translated or command_execution(done, self._spec)

    async def ask(
        self, request: IpcRequest[AnswerT], body: bytes, timeout_s: float, fds: Sequence[int] = ()
    ) -> Envelope[AnswerT]:
        """See `Guest.ask`."""
        # The last call's seal or clean-up is still under way; a call beside it would change what it works on.
        await self._settle()
        return await self.link.call(request, body, timeout_s, fds)

    def conclude(self, done: Envelope[CallDone]) -> Envelope[CallDone]:
        """See `Guest.conclude`."""
        if done.message.settling:
            self.begin_settling(SETTLE_S)
        # A full disk of the machine fails calls that would succeed elsewhere. Such a result must never be recorded. A
        # sandbox that holds all inotify instances of the machine ends here too.
        if done.message.host_full:
            self.link.die("the machine cannot hold what it does")
            raise SandboxError(
                f"sandbox {self.id} was ended: less than {RESERVE_BYTES >> 20} MB of disk are free {self._disk}, or "
                "it holds the inotify instances or sent descriptors that all sandboxes of this machine share"
            )
        # Begun and not awaited: the agent gets its answer, and the next call waits in `_settle`.
        self._begin_after_call(done.message)
        return done

    # -- time --------------------------------------------------------------------------------------------------------

    @property
    def settle_s(self) -> float:
        """Seconds until the processes that a call left running count as started."""
        return max(0.0, self._settled_at - time.monotonic())

    def begin_settling(self, settle_s: float) -> None:
        """Note that processes were just started, which need `settle_s` seconds until they count as started."""
        # Of the monotonic clock: a clock that is set must not age processes.
        self._stirred_at = time.monotonic()
        self._settled_at = self._stirred_at + settle_s

    async def settle(self) -> None:
        """See `Settling.settle`."""
        await self._settle()

    async def rest(self, dwell_s: float) -> None:
        """See `Resting.rest`."""
        # The shorter of two waits: what is missing to the recorded dwell time, and what is missing to "started".
        if (wait_s := min(dwell_s - (time.monotonic() - self._stirred_at), self.settle_s)) > 0:
            await asyncio.sleep(wait_s)

    async def expect_order(self, order: bytes) -> None:
        """See `Ordering.expect_order`."""
        # The last call's clean-up looks at the files once more, and would take the order for its own.
        await self._settle()
        await self.link.ask(ExpectOrder(order))

    # -- inspection --------------------------------------------------------------------------------------------------

    async def inspect(self) -> StateView:
        """See `InspectableSandbox.inspect`."""
        # People look while no call runs; the last call's clean-up must not change what they see.
        await self._settle()
        return state_look((await self.link.ask(DescribeState())).message)

    async def entries(self, paths: Sequence[str], *, content_bytes: int) -> Mapping[str, FileEntry]:
        """See `InspectableSandbox.entries`."""
        arguments = {"paths": list(paths), "content_bytes": content_bytes}
        operation = RunFileOperation("entries", arguments, LOOK_S)
        return entries_of(self.conclude(await self.ask(operation, b"", LOOK_S)), paths)

    async def open_terminal(self, columns: int, rows: int) -> Pty:
        """See `TerminalSandbox.open_terminal`."""
        await self._settle()
        # A person may change anything in a terminal, so a frozen copy no longer stands for this sandbox.
        self._forget_frozen()
        opened = await self.link.ask(OpenTerminal(columns, rows))
        if isinstance(opened.message, TerminalFailed):
            raise SandboxError(f"sandbox {self.id}: {opened.message.error}")
        return Pty(opened.fds[0])
