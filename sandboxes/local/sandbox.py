"""One live sandbox of the `local` driver, seen from the proxy.

Theory of operation. The sandbox's root is an overlay: an *upper*, which it writes to, on a stack of read-only layers.

1. Sealing. After each call that wrote something, pid 1 pauses and reports its rows. The upper becomes a layer, and the
   sandbox continues on a fresh upper (`_seal`). If the call's changes cancelled out, the upper is discarded instead.
   Both run in the background after the call has its result; the next call waits for them (`_settle`).
2. Freezing without live processes then costs nothing: the stack of layers and the sessions' dumps *are* the state.
3. Freezing with live processes cannot exchange the upper, because they have files of it open. CRIU freezes and dumps
   them; meanwhile the upper is copied into a new layer (`_checkpoint`).
4. Many small layers are merged into one, so that lookups stay cheap (`SandboxLayers`).

`SandboxLayers` has the layers. Those in `_held` are in a state that the caller does not know of yet.
"""

import asyncio
import contextlib
import math
import os
import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sandboxes.calls import Execution, ToolCall
from sandboxes.checkpointing import MappedFiles
from sandboxes.driver import FrozenState
from sandboxes.egress.gateway import variables
from sandboxes.errors import NotFreezableError, SandboxError, SpecError
from sandboxes.guest.files.manifest import Manifest
from sandboxes.host.defaults import ENVIRONMENT, RESERVE_BYTES
from sandboxes.host.machine_sandbox import MachineSandbox
from sandboxes.host.server_calls import ServerCalls
from sandboxes.ipc.codec import with_members
from sandboxes.ipc.inherited import inherited
from sandboxes.ipc.launch_messages import RunCriu
from sandboxes.ipc.messages import CallDone
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
from sandboxes.listener import Listener
from sandboxes.local.bases import Base
from sandboxes.local.layers import LayerMeta, Upper, undo
from sandboxes.local.machine import Machine, Spare, ended
from sandboxes.local.sandbox_layers import SandboxLayers
from sandboxes.local.service_commands import call_in_service, frame_of
from sandboxes.spec import EnvironmentSpec

if TYPE_CHECKING:
    from sandboxes.effects import StateDigest


class LocalSandbox(MachineSandbox):
    """A sandbox of namespaces and overlay layers.

    Attributes:
        begun_at: The digest of the state that it began at; None if processes ran.
        pristine: What a new session looked like when it began; None if that is not known.
    """

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
        """Take over a spare; `begin` starts it.

        Args:
            machine: The shared parts of the driver.
            spare: The spare sandbox.
            spec: What the sandbox is made for.
            base: The spec's base, below all layers.
            root_layers: The layers of the spec's root state.
            born_ns: When that root state was built.
            layers: The sandbox's layers, the topmost first; the root state's are the last of them.
            seals: Whether each call's changes become a layer; set-up needs one layer for all of its commands.
        """
        # The descriptor names pid 1 until it is closed, so signals never reach another process (pidfd_open(2)).
        self._process: int | None = spare.process
        # What surrounds the spec's own variables: those of the image below, and of the egress.
        self._given = {**({} if base.image is None else base.image.environment), **variables(spec)}
        super().__init__(
            spare.id, spare.channel, spec, machine.data_dir, machine.read_only,
            server_environment={**ENVIRONMENT, **self._given},
            process_environment={"HOSTNAME": base.hostname, **self._given},
        )  # fmt: skip
        self._seals = seals
        self.begun_at: StateDigest | None = None
        self.pristine: dict[str, Any] | None = None
        self._held: tuple[str, ...] = ()
        self._sealed: LayerState | None = None
        self._machine = machine
        self._base = base
        self._root_layers, self._born_ns = root_layers, born_ns
        self._layers = SandboxLayers(machine, self.link, base, root_layers, layers, spare.switches)
        self._pending: asyncio.Task[None] | None = None

    @property
    def parts(self) -> tuple[str, ...]:
        """The layers, checkpoints and images that must not be collected while this sandbox is open."""
        return (*self._layers.stack, *self._held, *self._base.images)

    @property
    def cpu_s(self) -> float | None:
        """The seconds of CPU time that its processes have used; None if they are not counted. 20 µs."""
        return self._machine.cgroups.cpu_s(self.id)

    def set_background(self, *, background: bool) -> bool:
        """See `sandboxes.driver.Metered`."""
        return self._machine.cgroups.set_background(self.id, background=background)

    # -- starting ----------------------------------------------------------------------------------------------------

    async def begin(self, state: dict[str, Any], images: str | None = None) -> None:
        """Give the spare its layers and its state; return when its shell is ready.

        Args:
            state: The sessions, and what a checkpoint stored.
            images: The checkpoint whose processes are restored in it; None starts fresh shells.

        Raises:
            SpecError: The base cannot run a shell.
            SandboxError: The sandbox or the machine failed.
        """
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
            below_bytes=sum(map(self._machine.layers.size_bytes, self._layers.above_root)),
            born_ns=self._born_ns,
            reserve_bytes=RESERVE_BYTES,
            seals=self._seals,
            sessions=state["sessions"],
            pristine=state["pristine"],
            checkpoint=state["checkpoint"],
            criu_arguments=[],
            egress=self._spec.egress is not None,
            cpus=None if limits.cpus is None else math.ceil(limits.cpus),
            hostname=self._base.hostname,
            user=self._base.user,
            services=self._base.services,
        )
        try:
            if images is None:
                answer = await self.link.ask(order, tables, [table])
                started, handed_over = answer.message, answer.fds
                assert isinstance(started, SandboxStarted), "nothing is restored without a checkpoint"
            else:
                # The order goes to pid 1 together with CRIU's program and descriptors. Pid 1 starts CRIU before it
                # gives up its rights, and reports on `FinishRestore`, once CRIU has restored the processes.
                async def start_criu(arguments: list[str], files: list[int]) -> None:
                    await self.link.ask(with_members(order, criu_arguments=arguments), tables, [table, *files])

                await self._machine.checkpointer.restore(images, start_criu, inherited(state["checkpoint"]))
                finished = await self.link.ask(FinishRestore())
                started, handed_over = finished.message, finished.fds
        finally:
            os.close(table)
        # The mount namespace of pid 1, for moves to a fresh upper. Pid 1 itself passes it: after this it is confined.
        self._layers.enter(handed_over[0])
        if self._spec.egress is not None:
            self.egress = await self._machine.egress.open_outlet(self.id, self._spec, handed_over[1])
        if started.shell_error is not None and not self._layers.stack:
            raise SpecError(f"base {self._spec.image or self._spec.base!r}: {started.shell_error}")
        self.begun_at, self.pristine = started.state.digest, started.pristine

    async def start_services(self, orders: Sequence[ServerOrder]) -> None:
        """Start the side services one after the other. If one fails, the sandbox is closed.

        Raises:
            ServerError: One of them ended, or did not get ready in time.
        """
        try:
            if orders:
                await ServerCalls(self).start(orders)
        except BaseException:
            await self.close()
            raise

    # -- calls -------------------------------------------------------------------------------------------------------

    async def execute(self, call: ToolCall, listener: Listener | None = None) -> Execution:
        """Run a call; see `MachineSandbox.execute`.

        Raises:
            SpecError: The call is for a side service that the spec does not have.
        """
        if call.endpoint in {"process", "archive", "shell"} and (service := call.arguments.get("service")):
            call = self._for_service(call, str(service))
        execution = await super().execute(call, listener)
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

    def _begin_after_call(self, done: CallDone) -> None:
        # The last state is out of date as soon as a call has run, whether or not the call wrote.
        self._sealed = None
        if done.discard:
            self._pending = self._machine.background.spawn(
                f"discard upper of {self.id}", self._discard_upper(), awaited=True
            )
        elif done.seal:
            self._pending = self._machine.background.spawn(f"seal layer of {self.id}", self._seal(), awaited=True)

    async def _settle(self) -> None:
        if self._pending is not None:
            # Shielded: if the next call is cancelled, the move to the new layer must not stop halfway.
            await asyncio.shield(self._pending)
            self._pending = None

    def _forget_frozen(self) -> None:
        self._sealed = None

    @property
    def _disk(self) -> str:
        return f"at {self._machine.data_dir}"

    def _kill(self) -> None:
        # The death of pid 1 ends every process of its pid namespace (pid_namespaces(7)).
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._process, signal.SIGKILL)

    # -- freezing ----------------------------------------------------------------------------------------------------

    async def freeze(self, *, root: bool = False) -> FrozenState:
        """Freeze the sandbox; see `Sandbox.freeze`. A freeze that is cancelled kills the sandbox.

        Args:
            root: Freeze the root state of a spec. Hard links to files of the base are allowed then: copying them up
                breaks them for all sandboxes of the spec alike.

        Raises:
            NotFreezableError: Processes run that cannot be saved, or hard links would break.
            SandboxError: The sandbox or the machine failed.
        """
        await self._settle()
        try:
            return await self._freeze(root=root)
        except asyncio.CancelledError:
            self.link.die("its freezing was cancelled")
            raise

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
                return await self._checkpoint(paused.message.pid)
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

    async def _checkpoint(self, tree: int) -> FrozenState:
        """Dump the processes below a pid of the sandbox, with a copy of the files of the same moment.

        Raises:
            NotFreezableError: CRIU cannot dump them; the text gives its reason.
        """
        states: list[LayerState] = []
        copies: list[Upper] = []

        async def start_criu(arguments: list[str], files: list[int]) -> None:
            if self._process is None:
                raise SandboxError(f"sandbox {self.id} was closed")
            # A copy: the sandbox may be closed before this is sent, and the number be another sandbox's then.
            process = os.dup(self._process)
            try:
                await self._machine.launcher.ask(RunCriu(arguments), [process, *files])
            finally:
                os.close(process)

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

        checkpointer, layers = self._machine.checkpointer, self._machine.layers
        try:
            images = await checkpointer.dump(start_criu, tree, copy_files)
        except BaseException:
            self._held = ()
            # Nothing refers to the copies, so they go at once.
            await asyncio.to_thread(undo, layers, copies)
            raise
        layer = tuple(copy.id for copy in copies)
        # Held until the next freeze: the caller learns the names only when this method returns.
        self._held = (*layer, images)
        stack = (*layer, *self._layers.stack)
        payload = self._payload(states[-1], stack)
        payload |= {"images": images, "checkpoint": states[-1].checkpoint, "young_s": self.settle_s}
        # Before any other await: a sandbox that is closed meanwhile deletes the layers that no frozen state has.
        added = self._layers.keep() + sum(map(layers.size_bytes, layer))
        added += await asyncio.to_thread(checkpointer.size_bytes, [images])
        return FrozenState("local", "processes", payload, added, states[-1].state.digest, (*stack, images))

    async def _seal(self) -> None:
        """Make a layer of what a call wrote, whether or not its state will be kept.

        A program can see how files are spread over layers, in link counts of directories and in the order of their
        entries. With one layer for each changing call, that depends on the calls alone. So a restored sandbox looks
        like one that was never frozen.
        """
        with contextlib.suppress(SandboxError, NotFreezableError):
            # The reported state is valid until the next call.
            paused = await self.link.next(LayerState, NotFreezable)
            self._sealed = await self._on_new_layer(paused.message, paused.body)
            await self._machine.learn_pages(self.link)

    async def _on_new_layer(self, paused: LayerState | NotFreezable, table: bytes) -> LayerState:
        """Make a layer of the upper if anything was written; return the state.

        Raises:
            NotFreezableError: Processes run, or hard links would break.
        """
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

    async def _close(self) -> None:
        self._kill()
        self._tools.close()
        self.link.close()
        await self._layers.close()
        if self._process is not None:
            await ended(self._process)
            os.close(self._process)
            self._process = None
        if self._pending is not None:
            # The seal ends by itself, with an error that it handles. Cancelling it would leave an upper half moved.
            await asyncio.wait([self._pending])
        # Only now: the kernel refuses to remove a group that still has processes (cgroups(7)).
        await self._machine.forget_group(self.id)
        self._layers.remove()
        self.closed = True


def _meta(state: LayerState) -> LayerMeta:
    return LayerMeta(state.size_bytes, Manifest(state.manifest.stats, state.manifest.contents))
