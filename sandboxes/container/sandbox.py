"""One live container, seen from the driver's side."""

import asyncio
from collections.abc import Mapping
from typing import Any

from sandboxes.calls import Execution, ToolCall, ToolResult
from sandboxes.checkpointing import Checkpointer, MappedFiles
from sandboxes.container.spares import Box, Spares
from sandboxes.container.state_copies import States
from sandboxes.driver import SETTLE_S, FrozenState
from sandboxes.effects import Effect
from sandboxes.errors import NotFreezableError, SandboxError
from sandboxes.host.defaults import ENVIRONMENT, RESERVE_BYTES
from sandboxes.host.inspect import state_look
from sandboxes.host.pty import Pty
from sandboxes.host.tool_calls import Hosting
from sandboxes.host.translate import digest, execution, refuse, request, sql_execution
from sandboxes.inspection import StateView
from sandboxes.ipc.frames import Message
from sandboxes.listener import Listener
from sandboxes.spec import EnvironmentSpec
from sandboxes.task_owner import start


class ContainerSandbox(Hosting):
    """See `sandboxes.driver.Sandbox`."""

    def __init__(
        self,
        box: Box,
        spec: EnvironmentSpec,
        image: str,
        born_ns: int,
        spares: Spares,
        states: States,
        checkpointer: Checkpointer,
        born_with: Mapping[str, str],
    ) -> None:
        super().__init__(box.id, box.channel)
        # Its environment is the image's, which the keeper knows, and below that the spec's and the server's.
        self.hosts(spec, {}, states.folder, spares.read_only, born_with)
        self.image = image
        self.closed = False
        self.parts: tuple[str, ...] = ()
        self._box, self._spec, self._born_ns = box, spec, born_ns
        self._spares, self._states, self._checkpointer = spares, states, checkpointer
        self._frozen: FrozenState | None = None
        self._closing: asyncio.Task[None] | None = None

    @property
    def container(self) -> str:
        """Docker's id of it."""
        return self._box.container

    async def begin(self, frozen: FrozenState | None) -> None:
        """Become spec's sandbox, at its root state or at frozen; return when its shell is ready.

        Raises:
            SandboxError: it fails, or what has to be a shell does not start.
        """
        told = {"sessions": {}, "pristine": None} if frozen is None else frozen.payload
        fields = {
            "op": "begin",
            "defaults": ENVIRONMENT,
            "environment": self._spec.env,
            "workdir": self._spec.workdir,
            "output_bytes": self._spec.limits.output_bytes,
            "born_ns": self._born_ns,
            "sessions": told["sessions"],
            "pristine": told["pristine"],
            "copy": "" if frozen is None else str(self._states.folder / frozen.payload["copy"]),
        }
        checkpoint = None if frozen is None else frozen.payload.get("checkpoint")
        fields["checkpoint"] = checkpoint
        if frozen is not None:
            self.parts = frozen.parts
            self._frozen = frozen if checkpoint is None else None
        if frozen is None or checkpoint is None:
            begun = await self._talk(fields)
            if "cannot_start" in begun.fields:
                self._die(str(begun.fields["cannot_start"]))
                raise SandboxError(f"sandbox {self.id} died: {begun.fields['cannot_start']}")
            return

        async def start_criu(program: list[str], files: list[int]) -> None:
            await self._talk({**fields, "program": program}, b"", files)

        await self._checkpointer.restore(frozen.payload["images"], start_criu, [])
        await self._talk({"op": "restored"})

    # -- calls -------------------------------------------------------------------------------------------------------

    async def execute(self, call: ToolCall, listener: Listener | None = None) -> Execution:
        """See `Sandbox.execute`. A cancelled execution leaves a dead sandbox: nobody knows how far it came.

        listener: hears the answer of a tool server while it comes.
        """
        if self.is_hosted(call):
            served = await self.serve(call, listener)
            if served.effect is not Effect.NONE:
                self._frozen = None
            return served
        refusal = refuse(call)
        if refusal is not None:
            return Execution(ToolResult(*refusal), Effect.NONE, 0.0, None)
        limits = self._spec.limits
        timeout_s = float(call.arguments.get("timeout_s", limits.timeout_s))
        fields, body = request(call, self._spec, timeout_s)
        answer = self._concluded(await self.ask(fields, body, timeout_s))
        if call.endpoint == "sql":
            done = sql_execution(answer, call, self._spec)
        else:
            done = execution(answer, float(answer.fields["seconds"]))
        if done.effect is not Effect.NONE:
            self._frozen = None
        return done

    def _concluded(self, answer: Message) -> Message:
        """See `Hosting._concluded`: nothing is left to do here.

        Raises:
            SandboxError: the machine may be why it went as it did.
        """
        if answer.fields.get("young"):
            self.be_young(SETTLE_S)
        if answer.fields.get("host_full"):
            self._die("the machine's disk is full")
            raise SandboxError(
                f"sandbox {self.id}: less than {RESERVE_BYTES >> 20} MB of disk are free where Docker keeps containers"
            )
        return answer

    async def ask(self, fields: dict[str, Any], body: bytes, timeout_s: float, fds: list[int] | None = None) -> Message:
        """Send the keeper a call and return its answer.

        Raises:
            SandboxError: the container is dead, or silent for longer than the call may take.
        """
        return await self._run(fields, body, timeout_s, fds or [])

    async def inspect(self) -> StateView:
        """See `InspectableSandbox.inspect`."""
        return state_look(await self._talk({"op": "describe"}))

    async def open_terminal(self, columns: int, rows: int) -> Pty:
        """See `TerminalSandbox.open_terminal`."""
        self._frozen = None
        return await self._open_terminal(columns, rows)

    def _kill(self) -> None:
        # Its keeper then kills the container.
        self._channel.close(self._dead or "closed")

    # -- freezing ----------------------------------------------------------------------------------------------------

    async def freeze(self) -> FrozenState:
        """See `Sandbox.freeze`: a copy of what was written over the image, unless nothing has changed since."""
        self.require_still()
        known = self._frozen
        if known is not None and self._states.there(known.payload["copy"]):
            return known
        name, folder = self._states.allocate()
        fields = {"op": "freeze", "folder": str(folder), "becomes": str(self._states.folder / name)}
        possible = await self._checkpointer.is_available()
        images: tuple[str, ...] = ()
        try:
            told = (await self._talk({**fields, "checkpoint": possible})).fields
            if "tree" in told:
                told, images = await self._checkpoint(int(told["tree"]), fields)
        except asyncio.CancelledError:
            self._die("its freezing was cancelled")
            raise
        if "not_freezable" in told:
            why = "" if possible else f"; {self._checkpointer.unavailable_reason}"
            raise NotFreezableError(f"sandbox {self.id}: {told['not_freezable']}{why}")
        self._states.keep(name)
        self.parts = (name, *images)
        payload = {
            "copy": name,
            "image": self.image,
            "born_ns": self._born_ns,
            "sessions": told["sessions"],
            "pristine": told["pristine"],
        }
        added = int(told["added_bytes"])
        if images:
            payload |= {"images": images[0], "checkpoint": told["checkpoint"], "young_s": self.young_s}
            added += await asyncio.to_thread(self._checkpointer.size_bytes, images)
            return FrozenState("container", "processes", payload, added, None, self.parts)
        self._frozen = FrozenState("container", "files", payload, added, digest(told["state"]), self.parts)
        return self._frozen

    async def _checkpoint(self, tree: int, fields: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Dump the processes below tree, and copy the files of the same moment; they run on."""
        told: dict[str, Any] = {}

        async def start_criu(program: list[str], files: list[int]) -> None:
            await self._talk({"op": "dump", "program": program}, b"", files)

        async def held(mapped: MappedFiles) -> None:
            told.update((await self._talk({**fields, "op": "copy"})).fields)
            if mapped:
                raise NotFreezableError(f"{min(mapped.values())} is mapped from below the container's file system")

        return told, (await self._checkpointer.dump(start_criu, tree, held),)

    # -- closing -----------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """See `Sandbox.close`. Runs to its end even when the caller is cancelled."""
        if self._closing is None:
            self._dead = self._dead or "it was closed"
            self._closing = start(self._close(), name=f"close {self.id}")
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        self.close_sockets()
        await self._spares.throw_away(self._box)
        self.closed = True
