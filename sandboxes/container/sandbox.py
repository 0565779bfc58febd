"""One live container, seen from the proxy.

The keeper does the work; this side orders it. A state without live processes stays valid until a call changes
something, so a second freeze returns the first one's state (`_frozen`). With live processes nothing stays valid.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from sandboxes.calls import Execution, ToolCall
from sandboxes.checkpointing import Checkpointer, MappedFiles
from sandboxes.container.boxes import Box
from sandboxes.container.portable_copies import part_of
from sandboxes.container.service_commands import call_in_service, frame_of
from sandboxes.container.spares import Spares
from sandboxes.container.state_copies import StateCopies
from sandboxes.driver import FrozenState
from sandboxes.effects import Effect
from sandboxes.egress.gateway import EgressGateway, variables
from sandboxes.errors import NotFreezableError, SandboxError, SpecError, StateGoneError
from sandboxes.host.defaults import ENVIRONMENT
from sandboxes.host.machine_sandbox import MachineSandbox
from sandboxes.host.server_calls import ServerCalls
from sandboxes.ipc.codec import with_members
from sandboxes.ipc.messages import CallDone
from sandboxes.ipc.server_messages import ServerOrder
from sandboxes.ipc.state_messages import (
    BeginSandbox,
    CopiedState,
    CopyFiles,
    DumpProcesses,
    FinishProcessRestore,
    FreezeContainer,
    NotFreezable,
    ProcessTree,
    SandboxBegun,
)
from sandboxes.listener import Listener
from sandboxes.spec import EnvironmentSpec


class ContainerSandbox(MachineSandbox):
    """A sandbox that is a container.

    Attributes:
        image: The image that it was started from.
        parts: The stored states that it needs while it is open.
    """

    def __init__(
        self,
        box: Box,
        spec: EnvironmentSpec,
        image: str,
        born_ns: int,
        spares: Spares,
        states: StateCopies,
        checkpointer: Checkpointer,
        born_with: Mapping[str, str],
        egress: EgressGateway,
        config: Callable[[str], Awaitable[Mapping[str, Any]]],
    ) -> None:
        """Take over a container; `begin` starts the sandbox.

        Args:
            box: The container and its keeper.
            spec: What the sandbox is made for.
            image: The image that the container was started from.
            born_ns: When the spec's root state was built, in ns since 1970.
            spares: What removes the container at the end.
            states: The stored copies.
            checkpointer: Saves and restores its live processes.
            born_with: The environment variables of the image.
            egress: Opens its way to hosts outside, if the spec has one.
            config: Returns the configuration of an image, as Docker reports it.
        """
        # The image's variables are known to the keeper, which adds them to those of tool servers. A process of its own
        # gets its whole environment from here.
        super().__init__(
            box.id, box.channel, spec, states.folder, spares.read_only,
            server_environment=variables(spec), process_environment={**born_with, **variables(spec)},
        )  # fmt: skip
        self.image = image
        self.parts: tuple[str, ...] = ()
        self._box, self._born_ns = box, born_ns
        self._spares, self._states, self._checkpointer = spares, states, checkpointer
        self._frozen: FrozenState | None = None
        self._outlets, self._config = egress, config

    @property
    def container(self) -> str:
        """Docker's id of the container."""
        return self._box.container

    async def begin(self, frozen: FrozenState | None) -> None:
        """Start the sandbox; return when its shell is ready.

        Args:
            frozen: The state to start at; None starts at the spec's root state.

        Raises:
            SandboxError: The container or its shell does not start.
        """
        payload = {"sessions": {}, "pristine": None} if frozen is None else frozen.payload
        order = BeginSandbox(
            defaults=ENVIRONMENT,
            environment={**variables(self._spec), **self._spec.env},
            workdir=self._spec.workdir,
            output_bytes=self._spec.limits.output_bytes,
            born_ns=self._born_ns,
            sessions=payload["sessions"],
            pristine=payload["pristine"],
            copy="" if frozen is None else str(self._states.folder / frozen.payload["copy"]),
            checkpoint=payload.get("checkpoint"),
            criu_arguments=[],
            egress=self._spec.egress is not None,
        )
        if frozen is not None:
            self.parts = frozen.parts
            # A sandbox that was restored from files equals its state until a call changes something.
            self._frozen = frozen if order.checkpoint is None else None
        if frozen is None or order.checkpoint is None:
            begun = await self._begin(order)
            if begun.shell_error is not None:
                # Without a first shell, no later call could run either.
                self.link.die(begun.shell_error)
                raise SandboxError(f"sandbox {self.id} died: {begun.shell_error}")
            return

        # The keeper answers this order before CRIU has restored anything. It then waits for `FinishProcessRestore`,
        # which follows once CRIU has reported its success to this side.
        async def start_criu(arguments: list[str], files: list[int]) -> None:
            await self._begin(with_members(order, criu_arguments=arguments), files)

        await self._checkpointer.restore(frozen.payload["images"], start_criu, [])
        await self.link.ask(FinishProcessRestore())

    async def _begin(self, order: BeginSandbox, files: Sequence[int] = ()) -> SandboxBegun:
        """Send the order to the keeper, and serve the listening socket that comes back with egress.

        Raises:
            StateGoneError: The copied files are not what was frozen.
            SandboxError: The container or the egress proxy failed.
        """
        answer = await self.link.ask(order, fds=files)
        if answer.fds:
            self.egress = await self._outlets.open_outlet(self.id, self._spec, answer.fds[0])
        begun = answer.message
        if begun.damaged is not None:
            self.link.die("its files are not what was frozen")
            raise StateGoneError(
                f"sandbox {self.id}: the stored files have changed on disk: {begun.damaged}. Replay their path instead."
            )
        # Without its listening socket the agent would have no egress, and would get no error that says so.
        if order.egress and self.egress is None:
            self.link.die("its egress was not made")
            raise SandboxError(f"sandbox {self.id} died: its egress was not made")
        return begun

    async def start_services(self, orders: Sequence[ServerOrder]) -> None:
        """Start the side services, one after the other. If one does not get ready, the sandbox is closed.

        Raises:
            ServerError: One of them did not get ready; the error has the end of its log.
        """
        if not orders:
            return
        try:
            await ServerCalls(self).start(orders)
        except BaseException:
            await self.close()
            raise

    # -- calls -------------------------------------------------------------------------------------------------------

    async def execute(self, call: ToolCall, listener: Listener | None = None) -> Execution:
        """Run a call. A frozen state stays valid as long as calls change nothing.

        Raises:
            SpecError: The call is for a side service that the spec does not have.
        """
        if call.endpoint in {"process", "archive", "shell"} and (service := call.arguments.get("service")):
            call = await self._for_service(call, str(service))
        ran = await super().execute(call, listener)
        if ran.effect is not Effect.NONE:
            self._frozen = None
        return ran

    async def _for_service(self, call: ToolCall, name: str) -> ToolCall:
        service = self._spec.services.get(name)
        if service is None:
            raise SpecError(f"there is no service {name!r}: the spec has {sorted(self._spec.services) or 'none'}.")
        return call_in_service(call, frame_of(name, service, await self._config(service.image)))

    def _begin_after_call(self, done: CallDone) -> None:
        """Do nothing: a container needs nothing between calls."""

    async def _settle(self) -> None:
        """Do nothing: a call leaves nothing to wait for."""

    def _forget_frozen(self) -> None:
        self._frozen = None

    @property
    def _disk(self) -> str:
        return "where Docker keeps containers" if self._box.started else "where the proxy keeps its data"

    def _kill(self) -> None:
        # The keeper kills the container when its channel closes.
        self.link.close()

    # -- freezing ----------------------------------------------------------------------------------------------------

    async def freeze(self) -> FrozenState:
        """Copy what was written over the image, unless nothing has changed since the last freeze.

        Raises:
            NotFreezableError: Processes run that cannot be saved.
            SandboxError: The container or the machine failed.
        """
        self._tools.require_still()
        known = self._frozen
        if known is not None and self._states.exists(known.payload["copy"]):
            return known
        # The keeper writes to `<name>.part`. If this process is killed before `keep`, the next start removes that
        # directory.
        name, folder = self._states.allocate()
        possible = await self._checkpointer.is_available()
        images: tuple[str, ...] = ()
        copy = CopyFiles(str(folder), str(self._states.folder / name))
        try:
            frozen = (await self.link.ask(FreezeContainer(copy.folder, copy.becomes, possible))).message
            if isinstance(frozen, ProcessTree):
                frozen, images = await self._checkpoint(frozen.pid, copy)
        except asyncio.CancelledError:
            self.link.die("its freezing was cancelled")
            raise
        if isinstance(frozen, NotFreezable):
            why = "" if possible else f"; {self._checkpointer.unavailable_reason}"
            raise NotFreezableError(f"sandbox {self.id}: {frozen.reason}{why}")
        # The rename makes the state exist, as a whole (rename(2)).
        self._states.keep(name)
        self.parts = (name, part_of(self.image), *images)
        payload = {
            "copy": name,
            "image": self.image,
            "born_ns": self._born_ns,
            "sessions": frozen.sessions,
            "pristine": frozen.pristine,
        }
        added = frozen.added_bytes
        if images:
            payload |= {"images": images[0], "checkpoint": frozen.checkpoint, "young_s": self.settle_s}
            added += await asyncio.to_thread(self._checkpointer.size_bytes, images)
            return FrozenState("container", "processes", payload, added, frozen.state.digest, self.parts)
        self._frozen = FrozenState("container", "files", payload, added, frozen.state.digest, self.parts)
        return self._frozen

    async def _checkpoint(self, tree: int, copy: CopyFiles) -> tuple[CopiedState, tuple[str, ...]]:
        """Dump a tree of processes, and copy the files of the same moment; the processes run on.

        Args:
            tree: The pid of its root in the container.
            copy: Where the copy goes.

        Returns:
            The copied state, and the name of the checkpoint.
        """
        copied: list[CopiedState] = []

        async def start_criu(arguments: list[str], files: list[int]) -> None:
            await self.link.ask(DumpProcesses(arguments), fds=files)

        async def copy_files(mapped: MappedFiles) -> None:
            # CRIU holds all processes of the tree at this moment, so memory and files belong together.
            copied_state = (await self.link.ask(copy)).message
            if isinstance(copied_state, NotFreezable):
                raise NotFreezableError(copied_state.reason)
            copied.append(copied_state)
            if mapped:
                raise NotFreezableError(f"{min(mapped.values())} is mapped from below the container's file system")

        images = await self._checkpointer.dump(start_criu, tree, copy_files)
        return copied[-1], (images,)

    # -- closing -----------------------------------------------------------------------------------------------------

    async def _close(self) -> None:
        self._tools.close()
        await self._spares.boxes.throw_away(self._box)
        self.closed = True
