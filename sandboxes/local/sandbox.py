"""One live sandbox of the `local` driver, seen from the proxy.

Theory of operation. The sandbox's root is an overlay: an *upper*, which it writes to, on a stack of read-only layers.

1. Sealing. After each call that wrote something, pid 1 pauses and reports its rows. The upper becomes a layer, and the
   sandbox continues on a fresh upper (`_seal`). If the call's changes cancelled out, the upper is discarded instead.
   Both run in the background after the call has its result; the next call waits for them (`Guest.settle`).
2. Freezing without live processes then costs nothing: the stack of layers and the sessions' dumps *are* the state.
3. Freezing with live processes cannot exchange the upper, because they have files of it open. CRIU freezes and dumps
   them; meanwhile the upper is copied into a new layer (`_checkpoint`). Then they run on, and the next call may come,
   while the checkpoint is completed (`_complete`). The next freeze waits for that.
4. Many small layers are merged into one, so that lookups stay cheap (`SandboxLayers`).

`SandboxLayers` has the layers. Those in `_held` are in a state that the caller does not know of yet.
"""

import asyncio
import contextlib
import math
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sandboxes.calls import Course, Execution, ToolCall, ToolResult
from sandboxes.checkpointing import FreezeHook, MappedFiles, ProgramStarter, StandStill
from sandboxes.driver import FrozenState
from sandboxes.effects import Effect
from sandboxes.egress.gateway import variables
from sandboxes.errors import NotFreezableError, SandboxError, SpecError
from sandboxes.guest.checkpoints import ptrace
from sandboxes.guest.files.manifest import Manifest
from sandboxes.host.defaults import ENVIRONMENT, RESERVE_BYTES
from sandboxes.host.guest import Guest
from sandboxes.host.harness_calls import HarnessCalls
from sandboxes.host.inspect import entries_of, state_look
from sandboxes.host.mcp_calls import McpCalls
from sandboxes.host.process_calls import ProcessCalls
from sandboxes.host.pty import Pty
from sandboxes.host.server_calls import ServerCalls
from sandboxes.host.tool_calls import ToolCalls
from sandboxes.host.translate import command_execution, refuse, request, sql_execution
from sandboxes.inspection import FileEntry, StateView
from sandboxes.ipc.codec import with_members
from sandboxes.ipc.inherited import inherited
from sandboxes.ipc.launch_messages import RunCriu, SetLastPid
from sandboxes.ipc.messages import CallDone, DescribeState, ExpectCourse, OpenTerminal, RunFileOperation, TerminalFailed
from sandboxes.ipc.server_messages import ServerOrder
from sandboxes.ipc.state_messages import (
    FinishRestore,
    InspectHeld,
    LayerState,
    NotFreezable,
    Pause,
    ProcessTree,
    SandboxStarted,
    StartSandbox,
)
from sandboxes.linux.descriptors import Opened
from sandboxes.linux.processes import pid_of
from sandboxes.listener import Listener
from sandboxes.local.bases import Base
from sandboxes.local.layers import LayerMeta, Upper, undo
from sandboxes.local.machine import Machine, Spare, ended
from sandboxes.local.sandbox_layers import SandboxLayers
from sandboxes.local.service_commands import call_in_service, frame_of
from sandboxes.spec import EnvironmentSpec
from sandboxes.task_owner import start

if TYPE_CHECKING:
    from sandboxes.effects import StateDigest
    from sandboxes.egress.gateway import SandboxEgress

_UNACCEPTED_S = (0.01, 0.05)
"""The pauses before a dump is tried again that has found a connection which its server had not accepted yet."""
LOOK_S = 30.0
"""Timeout for reading files and their attributes, for people who look at a state."""


class LocalSandbox:
    """A sandbox of namespaces and overlay layers."""

    def __init__(
        self,
        machine: Machine,
        spare: Spare,
        spec: EnvironmentSpec,
        base: Base,
        root_layers: tuple[str, ...],
        born_ns: int,
        layers: tuple[str, ...],
        *,
        seals: bool,
    ) -> None:
        """Take over a spare. The layers are topmost first, the root state's last; `seals`: each call makes one."""
        # The descriptor names pid 1 until it is closed, so signals never reach another process (pidfd_open(2)).
        self._process: int | None = spare.process
        # What surrounds the spec's own variables: those of the image below, and of the egress.
        self._given = {**({} if base.image is None else base.image.environment), **variables(spec)}
        # `closed`: whether nothing is left of it.
        self.id, self.closed = spare.id, False
        self.egress: SandboxEgress | None = None  # Its way to hosts outside; None without one.
        self.guest = Guest(spare.id, spare.channel, self._kill, self._after_call, machine.data_dir)
        self.link = self.guest.link  # The link to its supervisor: pid 1.
        self._spec = spec
        servers, server_environment = ServerCalls(self.guest), {**ENVIRONMENT, **self._given}
        self._processes = ProcessCalls(self.guest, spec, {"HOSTNAME": base.hostname, **self._given})
        self._tools = ToolCalls(servers, spec, server_environment, machine.data_dir)
        self._mcp = McpCalls(self.guest, servers, spec, server_environment, machine.read_only)
        self._harness = HarnessCalls(servers, spec, server_environment)
        self._closing: asyncio.Task[None] | None = None
        self._seals = seals
        self.begun_at: StateDigest | None = None  # The digest of the state that it began at; None if processes ran.
        # What a new session looked like when it began; None if that is not known.
        self.pristine: dict[str, Any] | None = None
        self._held: tuple[str, ...] = ()
        self._is_still = False
        # The checkpoint that its processes come from, or the last one that was made of them, and its completion.
        self._images: str | None = None
        self._completing: asyncio.Task[int] | None = None
        self._sealed: LayerState | None = None
        self._machine = machine
        self._base = base
        self._root_layers, self._born_ns = root_layers, born_ns
        self._layers = SandboxLayers(machine, self.link, base, root_layers, layers, spare.switches)

    @property
    def alive(self) -> bool:
        """Whether calls can be run."""
        return self.link.alive

    @property
    def parts(self) -> tuple[str, ...]:
        """The layers, checkpoints and images that must not be collected while this sandbox is open."""
        return (*self._layers.stack, *self._held, *self._base.images)

    # -- starting ----------------------------------------------------------------------------------------------------

    async def begin(self, state: dict[str, Any], images: str | None = None) -> None:
        """Give the spare its layers and its state; return when its shell is ready."""
        # The state is the sessions and what a checkpoint stored, and `images` the checkpoint whose processes are
        # restored in it; None starts fresh shells.
        other_user = self._base.user not in {"", "0"}
        if self._machine.shell is None and (other_user or not self._base.own_bash):
            raise SpecError(
                f"base {self._spec.image or self._spec.base!r} has no /bin/bash, or another user than root, and this "
                "machine's bash cannot be used for it: `forkpoint doctor` says why."
            )
        # Pid 1 gets the mounts from the launcher itself, and its order meanwhile.
        await self._layers.mount()
        limits, cgroups = self._spec.limits, self._machine.cgroups
        memory_bytes = limits.memory_mb << 20
        # Before the order: the spare has run without limits, and the agent's first process must not.
        cgroups.limit(self.id, memory_bytes=memory_bytes, pids=limits.pids, cpus=limits.cpus)
        # Before the descriptor of the table is opened: a start that is cancelled here must not leave it open.
        keeps_links = await self._layers.keep_links()
        tables, table = self._machine.layers.tables.of_state(self._layers.above_root)
        order = StartSandbox(
            binds=list(self._base.binds),
            hidden=list(self._base.hidden) if self._base.binds else [],
            disk_bytes=limits.disk_mb << 20,
            # Without control groups of its own the sandbox limits itself, with rlimits.
            memory_bytes=None if cgroups.writable else memory_bytes,
            pids=None if cgroups.writable else limits.pids,
            # Pid 1 knows the user's name and home.
            environment={**ENVIRONMENT, **self._given, **self._spec.env},
            workdir=self._spec.directory,
            output_bytes=limits.output_bytes,
            tail_bytes=limits.output_bytes // 2 if limits.output_keep == "ends" else 0,
            below_bytes=sum(map(self._machine.layers.size_bytes, self._layers.above_root)),
            born_ns=self._born_ns,
            reserve_bytes=RESERVE_BYTES,
            seals=self._seals,
            keeps_links=keeps_links,
            # Layers got hard links only where a sandbox had looked.
            regular_below=self._layers.linked or self._base.lowers in self._machine.regular_bases,
            linked_below=self._layers.linked,
            linked_root=self._layers.linked_root,
            sessions=state["sessions"],
            pristine=state["pristine"],
            checkpoint=state["checkpoint"],
            keeps_locks=self._spec.stands_still and ptrace.WORKS,
            criu_arguments=[],
            egress=self._spec.egress is not None,
            cpus=None if limits.cpus is None else math.ceil(limits.cpus),
            hostname=self._base.hostname,
            user=self._base.user,
            services=self._base.services,
        )
        with Opened(table):
            if images is None:
                answer = await self.link.ask(order, tables, [table])
                started, handed_over = answer.message, answer.fds
                assert isinstance(started, SandboxStarted), "nothing is restored without a checkpoint"
            else:
                # The order goes to pid 1 together with CRIU's program and descriptors. Pid 1 starts CRIU before it
                # gives up its rights, and reports on `FinishRestore`, once CRIU has restored the processes.
                async def start_criu(arguments: list[str], files: list[int]) -> None:
                    await self.link.ask(with_members(order, criu_arguments=arguments), tables, [table, *files])

                checkpoint = state["checkpoint"]
                stillness = self._stillness(checkpoint)
                await self._machine.checkpointer.restore(images, start_criu, inherited(checkpoint), stillness)
                finished = await self.link.ask(FinishRestore())
                started, handed_over = finished.message, finished.fds
        # The mount namespace of pid 1, for moves to a fresh upper. Pid 1 itself passes it: after this it is confined.
        self._layers.enter(handed_over[0])
        if self._spec.egress is not None:
            self.egress = await self._machine.egress.open_outlet(self.id, self._spec, handed_over[1])
        if started.shell_error is not None and not self._layers.stack:
            raise SpecError(f"base {self._spec.image or self._spec.base!r}: {started.shell_error}")
        self.begun_at, self.pristine = started.state.digest, started.pristine
        if images is not None:
            self._images = images

    async def start_servers(self) -> None:
        """Start the tool servers that belong to the root state. If one fails, the sandbox is closed."""
        try:
            # In this order, because an MCP server over HTTP may be one of the tool servers.
            await self._tools.start()
            await self._mcp.start()
        except BaseException:
            await self.close()
            raise

    async def start_services(self, orders: Sequence[ServerOrder]) -> None:
        """Start the side services one after the other. If one fails, the sandbox is closed."""
        try:
            if orders:
                await ServerCalls(self.guest).start(orders)
        except BaseException:
            await self.close()
            raise

    # -- calls -------------------------------------------------------------------------------------------------------

    async def execute(self, call: ToolCall, listener: Listener | None = None) -> Execution:
        """Run a call; see `Sandbox.execute`. If it is cancelled, the sandbox is dead."""
        if call.endpoint in {"process", "archive", "shell"} and (service := call.arguments.get("service")):
            call = self._for_service(call, str(service))
        self._move_on()
        execution = await self._run(call, listener)
        if execution.state is None:
            await self._stand_still()
        if self.egress is not None:
            execution = await self._conclude_egress(self.egress, execution)
        # Docker keeps an image's directories as long as a container of ours exists, which anybody may remove. It
        # renames a directory before it deletes what is in it. A call that saw a part of an image must not be recorded.
        if gone := self._base.removed():
            self.link.die(f"Docker has removed {gone}")
            raise SandboxError(f"sandbox {self.id} was ended: Docker has removed its image, at {gone}")
        return execution

    def _for_service(self, call: ToolCall, name: str) -> ToolCall:
        service, config = self._spec.services.get(name), self._base.service_images.get(name)
        if service is None or config is None:
            raise SpecError(f"there is no service {name!r}: the spec has {sorted(self._spec.services) or 'none'}.")
        return call_in_service(call, frame_of(name, service, config))

    async def _conclude_egress(self, egress: "SandboxEgress", execution: Execution) -> Execution:
        try:
            return await egress.conclude(execution)
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
        if call.endpoint == "harness":
            return await self._harness.execute(call)
        if self._tools.handles(call):
            return await self._tools.execute(call, listener)
        # Before the supervisor gets it, so a wrong call neither wakes the sandbox nor changes its state.
        refusal = refuse(call)
        if refusal is not None:
            return Execution(ToolResult(*refusal), Effect.NONE, 0.0, None)
        timeout_s = float(call.arguments.get("timeout_s", self._spec.limits.timeout_s))
        message, body = request(call, self._spec, timeout_s)
        done = self.guest.conclude(await self.guest.ask(message, body, timeout_s))
        translated = sql_execution(done, call, self._spec) if call.endpoint == "sql" else None
        return translated or command_execution(done, self._spec)

    def _after_call(self, done: CallDone) -> "asyncio.Task[None] | None":
        # The last state is out of date as soon as a call has run, whether or not the call wrote.
        self._sealed = None
        spawn = self._machine.background.spawn
        if done.discard:
            return spawn(f"discard upper of {self.id}", self._discard_upper(), awaited=True)
        return spawn(f"seal layer of {self.id}", self._seal(), awaited=True) if done.seal else None

    def _stillness(self, checkpoint: dict[str, Any]) -> StandStill | None:
        """Return how restored processes stand still until their first call; None if the spec lets them run."""
        # `SandboxError` says that they must not run, because they would lack locks.
        pids, locks = checkpoint["pids"], checkpoint.get("locks", [])
        if not self._spec.stands_still:
            if locks:
                raise SandboxError("the checkpoint has record locks, which only frozen processes get again")
            return None

        async def freeze() -> int:
            await self._stand_still(pids)
            return self._machine.cgroups.open_freezer(self.id)

        return StandStill(freeze, pids, locks)

    async def _stand_still(self, only: Collection[int] | None = None) -> None:
        """Freeze the processes until the next call, if the spec wants that. Otherwise answers beside them grow old."""
        # Other processes than `only` are not the agent's; None stands for all.
        if not self._spec.stands_still or self._process is None:
            return
        try:
            await asyncio.to_thread(self._machine.cgroups.freeze, self.id, pid_of(self._process), only)
        except OSError as error:
            self.link.die("its processes do not stand still")
            raise SandboxError(f"sandbox {self.id} was ended: {error}") from error
        self._is_still = True

    def _move_on(self) -> None:
        if self._is_still:
            self._machine.cgroups.thaw(self.id)
            self._is_still = False

    def _kill(self) -> None:
        # The death of pid 1 ends every process of its pid namespace (pid_namespaces(7)).
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._process, signal.SIGKILL)

    # -- time --------------------------------------------------------------------------------------------------------

    @property
    def settle_s(self) -> float:
        """Seconds until the processes that a call left running count as started."""
        return self.guest.settle_s

    async def settle(self) -> None:
        """See `Settling.settle`."""
        await self.guest.settle()

    async def rest(self, dwell_s: float) -> None:
        """See `Resting.rest`."""
        await self.guest.rest(dwell_s)

    async def expect(self, course: Course) -> None:
        """See `Repeating.expect`."""
        # The last call's clean-up looks at the files once more, and would take the order for its own.
        await self.guest.settle()
        expected = (await self.link.ask(ExpectCourse(course.order, course.last_pid))).message
        if course.last_pid in (0, expected.last_pid):
            return
        async with self._at_launcher() as process:
            forked = await self._machine.launcher.ask(SetLastPid(course.last_pid), [process])
        for child in forked.fds:
            await ended(child, within_s=1.0)
            # One that a process of the sandbox has stopped. The replay gets other pids then, and what it tells differs.
            with Opened(child), contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(child, signal.SIGKILL)

    @contextlib.asynccontextmanager
    async def _at_launcher(self) -> AsyncIterator[int]:
        if self._process is None:
            raise SandboxError(f"sandbox {self.id} was closed")
        # A copy: the sandbox may be closed before this is sent, and the number be another sandbox's then.
        with Opened(os.dup(self._process)) as process:
            yield process

    # -- inspection --------------------------------------------------------------------------------------------------

    async def inspect(self) -> StateView:
        """See `InspectableSandbox.inspect`."""
        # People look while no call runs; the last call's clean-up must not change what they see.
        await self.guest.settle()
        return state_look((await self.link.ask(DescribeState())).message)

    async def entries(self, paths: Sequence[str], *, content_bytes: int) -> Mapping[str, FileEntry]:
        """See `InspectableSandbox.entries`."""
        arguments = {"paths": list(paths), "content_bytes": content_bytes}
        operation = RunFileOperation("entries", arguments, LOOK_S)
        return entries_of(self.guest.conclude(await self.guest.ask(operation, b"", LOOK_S)), paths)

    async def open_terminal(self, columns: int, rows: int) -> Pty:
        """See `TerminalSandbox.open_terminal`."""
        await self.guest.settle()
        self._move_on()
        # A person may change anything in a terminal, so a frozen copy no longer stands for this sandbox.
        self._sealed = None
        opened = await self.link.ask(OpenTerminal(columns, rows))
        if isinstance(opened.message, TerminalFailed):
            raise SandboxError(f"sandbox {self.id}: {opened.message.error}")
        return Pty(opened.fds[0])

    # -- freezing ----------------------------------------------------------------------------------------------------

    async def freeze(self, *, root: bool = False) -> FrozenState:
        """Freeze the sandbox; see `Sandbox.freeze`. A freeze that is cancelled kills the sandbox."""
        return await (await self.begin_freeze(root=root))

    async def begin_freeze(self, *, root: bool = False) -> Awaitable[FrozenState]:
        """See `EarlyFreezing.begin_freeze`. If it is cancelled, the sandbox is dead."""
        # In the root state of a spec, hard links to files of the base are allowed: copying them up breaks them for all
        # sandboxes of the spec alike.
        await self.guest.settle()
        # One completion at a time: the next checkpoint shares pages with this one.
        if self._completing is not None:
            await asyncio.wait([self._completing])
        was_still = self._is_still
        self._move_on()
        try:
            try:
                frozen = await self._freeze(root=root)
            finally:
                if was_still and self.alive:
                    await self._stand_still()
        except asyncio.CancelledError:
            self.link.die("its freezing was cancelled")
            raise
        return self._completed(frozen)

    async def _completed(self, frozen: FrozenState) -> FrozenState:
        """Return a state whose checkpoint, if any, is complete."""
        if frozen.kind != "processes":
            return frozen
        assert self._completing is not None, "only a checkpoint makes such a state"
        # The sandbox may be closed meanwhile, and no snapshot names the parts yet.
        with self._machine.holding(frozen.parts):
            added = await asyncio.shield(self._completing)
        return replace(frozen, size_bytes=frozen.size_bytes + added)

    async def _freeze(self, *, root: bool) -> FrozenState:
        self._tools.require_still()
        # Case 1: the last call's changes are a layer already, and nothing has run since.
        state = self._sealed
        if state is None:
            # Case 2: pid 1 pauses, and either reports its state or names the tree of live processes to dump.
            checkpoint = await self._machine.checkpointer.is_available()
            paused = await self.link.ask(Pause(root, checkpoint))
            if isinstance(paused.message, ProcessTree):
                # Case 3: processes run.
                return await self._checkpoint(paused.message)
            state = await self._on_new_layer(paused.message, paused.body)
        added, stack = self._layers.keep(), self._layers.stack
        return FrozenState("local", "files", self._payload(state, stack), added, state.state.digest, stack)

    def _payload(self, state: LayerState, layers: tuple[str, ...]) -> dict[str, Any]:
        return {
            "layers": list(layers),
            "root_layers": len(self._root_layers),
            "born_ns": self._born_ns,
            "base": self._base.identity,
            "sessions": state.sessions,
            "pristine": state.pristine,
        }

    async def _checkpoint(self, tree: ProcessTree) -> FrozenState:
        states: list[LayerState] = []
        copies: list[Upper] = []

        async def start_criu(arguments: list[str], files: list[int]) -> None:
            async with self._at_launcher() as process:
                await self._machine.launcher.ask(RunCriu(arguments, tree.has_segments), [process, *files])

        async def copy_files(mapped: MappedFiles) -> None:
            # CRIU holds the agent's processes, but not pid 1, which therefore still answers.
            held = await self.link.ask(InspectHeld(list(mapped.values())))
            state = held.message
            if isinstance(state, NotFreezable):
                raise NotFreezableError(state.reason)
            # A restore maps a file by its path. If a call has replaced the file since, the process would get other code
            # or data.
            if state.differing:
                raise NotFreezableError(f"{min(state.differing)} may have been changed since it was mapped")
            # A restore opens mapped files by path, so their names are stored with the checkpoint.
            states.append(with_members(state, checkpoint={**(state.checkpoint or {}), "mapped": mapped}))
            if not state.empty:
                copies.append(layers.allocate())
                # Held before it exists as a layer: a collection may run between its making and the end of this freeze.
                self._held = (copies[0].id,)
                await asyncio.to_thread(self._layers.copy_upper, copies[0], _meta(state), held.body)

        layers = self._machine.layers
        try:
            before, images = self._images, await self._dump(start_criu, tree.pid, copy_files)
        except BaseException:
            self._held = ()
            # Nothing refers to the copies, so they go at once.
            await asyncio.to_thread(undo, layers, copies)
            raise
        self._images = images
        layer = tuple(copy.id for copy in copies)
        # Held until the next freeze: the caller learns the names later.
        self._held = (*layer, images)
        stack = (*layer, *self._layers.stack)
        payload = self._payload(states[-1], stack)
        payload |= {"images": images, "checkpoint": states[-1].checkpoint, "young_s": self.settle_s}
        # Before any other await: a sandbox that is closed meanwhile deletes the layers that no frozen state has.
        added = self._layers.keep() + sum(map(layers.size_bytes, layer))
        frozen = FrozenState("local", "processes", payload, added, states[-1].state.digest, (*stack, images))
        completion = self._complete(frozen.parts, images, before)
        self._completing = self._machine.background.spawn(f"complete {images}", completion, awaited=True)
        return frozen

    async def _complete(self, parts: tuple[str, ...], images: str, before: str | None) -> int:
        with self._machine.holding(parts):
            return await self._machine.checkpointer.finish(images, before)

    async def _dump(self, start: ProgramStarter, pid: int, on_frozen: FreezeHook) -> str:
        """Dump the processes, and again if a connection was just being made: its server accepts it a moment later."""
        for pause_s in _UNACCEPTED_S:
            try:
                return await self._machine.checkpointer.dump(start, pid, on_frozen)
            except NotFreezableError as error:
                if "In-flight connection" not in str(error):
                    raise
            await asyncio.sleep(pause_s)
        return await self._machine.checkpointer.dump(start, pid, on_frozen)

    async def _seal(self) -> None:
        """Make a layer of what a call wrote, whether or not its state will be kept."""
        # A program can see how files are spread over layers, in link counts of directories and in the order of their
        # entries. One layer for each changing call depends on the calls alone, so a restored sandbox looks like one
        # that was never frozen.
        with contextlib.suppress(SandboxError, NotFreezableError):
            # The reported state is valid until the next call.
            paused = await self.link.next(LayerState, NotFreezable)
            self._sealed = await self._on_new_layer(paused.message, paused.body)
            await self._machine.learn_pages(self.link)

    async def _on_new_layer(self, paused: LayerState | NotFreezable, table: bytes) -> LayerState:
        if isinstance(paused, NotFreezable):
            why = self._machine.checkpointer.unavailable_reason
            raise NotFreezableError(f"sandbox {self.id}: {paused.reason}{'; ' if why else ''}{why}")
        if not paused.empty:
            await self._layers.switch(_meta(paused), table)
        return paused

    async def _discard_upper(self) -> None:
        """Replace an upper that differs in nothing from the layers below, as a restored sandbox has none."""
        with contextlib.suppress(SandboxError):
            await self.link.next(LayerState, NotFreezable)
            await self._layers.switch(None, b"")

    # -- closing -----------------------------------------------------------------------------------------------------

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

    async def _close(self) -> None:
        self._kill()
        self._tools.close()
        self.link.close()
        await self._layers.close()
        if self._process is not None:
            await ended(self._process)
            os.close(self._process)
            self._process = None
        if self.guest.pending is not None:
            # The seal ends by itself, with an error that it handles. Cancelling it would leave an upper half moved.
            await asyncio.wait([self.guest.pending])
        # Only now: the kernel refuses to remove a group that still has processes (cgroups(7)).
        await self._machine.forget_group(self.id)
        self._layers.remove()
        self.closed = True


def _meta(state: LayerState) -> LayerMeta:
    return LayerMeta(state.size_bytes, Manifest(state.manifest.stats, state.manifest.contents), state.links)
