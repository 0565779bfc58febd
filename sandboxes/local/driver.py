"""The `local` driver: sandboxes out of namespaces, overlay layers and a live bash, on this machine, with no daemon."""

import asyncio
import contextlib
import hashlib
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import orjson

from sandboxes.checkpointing import Checkpointer, NoCheckpointer
from sandboxes.driver import FrozenState
from sandboxes.errors import NotFreezableError, SandboxError, SpecError, StateGoneError
from sandboxes.host.provision import furnish
from sandboxes.ipc.channel import ChannelClosedError
from sandboxes.linux.cgroups import sweep
from sandboxes.linux.dir_lock import Ownership
from sandboxes.local.bases import Base, Bases
from sandboxes.local.machine import START_S, Machine
from sandboxes.local.portable_layers import LayerPorter
from sandboxes.local.root_states import RootState, RootStates
from sandboxes.local.sandbox import LocalSandbox
from sandboxes.spec import EnvironmentSpec

VERSION = 2
"""Part of every identity: raise it when equal calls would give other answers or other digests than before."""
_PRESENT = ("/", "/root", "/tmp")  # noqa: S108 - a path inside the sandbox
"""Working directories that every base has."""


class LocalDriver:
    """See `sandboxes.driver.Driver`. One instance owns its data directory; a lock in it keeps a second one out.

    Args:
        data_dir: The driver's own directory.
        checkpointer: Saves states with live processes; None reaches such states by replay.
    """

    name = "local"

    def __init__(self, data_dir: Path, checkpointer: Checkpointer | None = None) -> None:
        self.data_dir = data_dir.resolve()
        self.bases = Bases(self.data_dir, privileged=os.geteuid() == 0)
        self.machine = Machine(self.data_dir, self.bases.host_view, checkpointer or NoCheckpointer())
        self.roots = RootStates(self.data_dir / "roots", self.machine.layers)
        self.porter = LayerPorter(self.machine.layers, self.machine.holding)
        self._sandboxes: set[LocalSandbox] = set()
        self._ownership = Ownership(self.data_dir)
        self._building: dict[str, asyncio.Lock] = {}

    # -- life --------------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """See `Driver.open`.

        Raises:
            SandboxError: another process uses this data directory, or the machine cannot run sandboxes.
        """
        self.data_dir.mkdir(parents=True, exist_ok=True)
        self._ownership.acquire()
        try:
            await asyncio.to_thread(self._sweep)
            self.machine.cgroups.open()
            (self.data_dir / "instance.json").write_bytes(
                orjson.dumps({"cgroups": sorted({str(path) for path in self.machine.cgroups.parents.values()})})
            )
            await self.machine.open()
        except BaseException:
            await self.aclose()
            raise

    def _sweep(self) -> None:
        """Remove what a killed instance left, and get the directories ready."""
        with contextlib.suppress(OSError, ValueError):
            for group in orjson.loads((self.data_dir / "instance.json").read_bytes())["cgroups"]:
                if Path(group).name.startswith("forkpoint-"):
                    sweep(Path(group))
        self.data_dir.chmod(0o700)
        self.machine.layers.open()
        self.bases.open()
        self.roots.open()

    async def aclose(self) -> None:
        """See `Driver.aclose`. Idempotent."""
        await asyncio.gather(*(sandbox.close() for sandbox in self.sandboxes.values()))
        await self.machine.close()
        self._ownership.release()

    @property
    def sandboxes(self) -> dict[str, LocalSandbox]:
        """Those that are not closed yet, by id, dead ones included."""
        self._sandboxes = {sandbox for sandbox in self._sandboxes if not sandbox.closed}
        return {sandbox.id: sandbox for sandbox in self._sandboxes}

    # -- states ------------------------------------------------------------------------------------------------------

    async def identity(self, spec: EnvironmentSpec) -> str:
        """See `Driver.identity`. 10 ms for the host; a walk or one reading of everything else that spec names."""
        base = await asyncio.to_thread(self.bases.look_again, spec.base)
        digest = hashlib.blake2b(f"local\0{VERSION}\0{base.identity}".encode(), digest_size=32)
        for source in spec.brought:
            digest.update((await asyncio.to_thread(self.bases.sources.of, Path(source))).encode())
        return digest.hexdigest()

    async def start(self, spec: EnvironmentSpec) -> LocalSandbox:
        """See `Driver.start`. The root state of a spec is built once; then a start takes milliseconds."""
        base = await asyncio.to_thread(self.bases.base, spec.base)
        root = await self._root(spec, base)
        with self.machine.holding(root.layers):
            sandbox = await self._launch(spec, base, root, root.layers, _state({}, {}))
        try:
            await sandbox.start_servers()
        except BaseException:
            await sandbox.close()
            raise
        return sandbox

    async def restore(self, spec: EnvironmentSpec, frozen: FrozenState) -> LocalSandbox:
        """See `Driver.restore`."""
        payload = frozen.payload
        layers = tuple(payload["layers"])
        root = RootState(layers[len(layers) - payload["root_layers"] :], payload["born_ns"])
        with self.machine.holding(frozen.parts):
            if missing := self.machine.layers.missing(layers):
                raise StateGoneError(f"layers {', '.join(missing)} of this state are gone; replay its path instead")
            base = await asyncio.to_thread(self.bases.base, spec.base)
            if base.identity != payload["base"]:
                raise StateGoneError(f"base {spec.base!r} is not what it was when this state was frozen")
            images = payload.get("images")
            if images is not None and images not in self.machine.checkpointer.names():
                raise StateGoneError(f"the images of these processes ({images}) are gone; replay their path instead")
            delta = self.machine.layers.meta(layers[0])["delta"] if len(layers) > len(root.layers) else {}
            state = _state(payload["sessions"], delta, payload["pristine"], payload.get("checkpoint"))
            sandbox = await self._launch(spec, base, root, layers, state, images=images)
            sandbox.be_young(payload.get("young_s", 0.0))
            return sandbox

    async def collect(self, keep: Iterable[str]) -> int:
        """See `Driver.collect`. Parts are layers, deleted in a thread. Those of root states in use stay anyway."""
        # What there was, and what lived, before the first await: a sandbox that freezes and ends meanwhile has made a
        # state that keep does not know of.
        checkpointer = self.machine.checkpointer
        there, before = self.machine.layers.all() | checkpointer.names(), self._in_stacks()
        kept = set(keep) | await asyncio.to_thread(self.roots.in_use)
        size = sum(self.machine.layers.size_bytes(layer) for layer in kept if not self.machine.layers.missing([layer]))
        size += await asyncio.to_thread(checkpointer.size_bytes, kept)
        unneeded = there - kept - before - self._in_stacks() - self.machine.held
        # At once: a restore that begins while the thread deletes must find them missing, not half there.
        self.machine.layers.disown(unneeded)
        await asyncio.to_thread(self.machine.layers.drop, unneeded)
        await asyncio.to_thread(checkpointer.drop, unneeded)
        return size

    def _in_stacks(self) -> set[str]:
        return {part for sandbox in self.sandboxes.values() for part in sandbox.parts}

    async def _root(self, spec: EnvironmentSpec, base: Base) -> RootState:
        """Return spec's root state; build it where it is not there (any more)."""
        told = orjson.dumps(
            spec.model_dump(exclude={"limits", "merge", "cache", "servers", "mcp_servers"}), option=orjson.OPT_SORT_KEYS
        )
        identity = (await self.identity(spec)) if spec.brought else base.identity
        key = hashlib.blake2b(told + identity.encode(), digest_size=16).hexdigest()
        async with self._building.setdefault(key, asyncio.Lock()):
            known = await asyncio.to_thread(self.roots.find, key)
            if known is not None and not self.machine.layers.missing(known.layers):
                return known
            root = await self._build_root(spec, base)
            if known is not None and known.content != root.content:
                raise SpecError(
                    "the task's root state was lost, and its set-up, run again, gave another one than its tree was "
                    "recorded on. Delete the task, or make its set-up reproducible (fixed dates, no random names)."
                )
            await asyncio.to_thread(self.roots.save, key, root)
            return root

    async def _build_root(self, spec: EnvironmentSpec, base: Base) -> RootState:
        bare = RootState((), time.time_ns())
        if not (spec.brought or spec.files or spec.setup or spec.workdir not in _PRESENT):
            return bare
        at_top = spec.model_copy(update={"workdir": "/"})
        sandbox = await self._launch(at_top, base, bare, (), _state({}, {}), seals=False)
        try:
            await furnish(sandbox, spec)
            state = await sandbox.freeze(root=True)
        except NotFreezableError as error:
            raise SpecError(
                f"set-up leaves something running ({error}): end it, or start it in a call instead"
            ) from error
        finally:
            await sandbox.close()
        content = state.state.content.hex() if state.state is not None else ""
        return RootState(tuple(state.payload["layers"]), time.time_ns(), content)

    # -- sandboxes ---------------------------------------------------------------------------------------------------

    async def _launch(
        self,
        spec: EnvironmentSpec,
        base: Base,
        root: RootState,
        layers: tuple[str, ...],
        state: dict[str, Any],
        *,
        images: str | None = None,
        seals: bool = True,
    ) -> LocalSandbox:
        try:
            return await self._launch_in_one(spec, base, root, layers, state, images=images, seals=seals)
        except SandboxError:
            if not self.machine.launcher.has_died:
                raise
        # The launcher died and took its spares along, which shows only now. The next spare has another launcher.
        return await self._launch_in_one(spec, base, root, layers, state, images=images, seals=seals)

    async def _launch_in_one(
        self,
        spec: EnvironmentSpec,
        base: Base,
        root: RootState,
        layers: tuple[str, ...],
        state: dict[str, Any],
        *,
        images: str | None,
        seals: bool,
    ) -> LocalSandbox:
        try:
            async with asyncio.timeout(START_S):
                spare = await self.machine.spare()
        except (ChannelClosedError, TimeoutError, OSError) as error:
            raise SandboxError(f"a sandbox could not be started: {error}") from error
        sandbox = LocalSandbox(self.machine, spare, spec, base, root, layers, seals=seals)
        self._sandboxes.add(sandbox)
        try:
            async with asyncio.timeout(START_S):
                await sandbox.begin(state, images)
        except BaseException as error:
            await sandbox.close()
            if isinstance(error, ChannelClosedError | TimeoutError | OSError):
                raise SandboxError(f"a sandbox could not be started: {error}") from error
            raise
        self.machine.restock()
        return sandbox


def _state(
    sessions: dict[str, Any],
    delta: dict[str, Any] | None,
    pristine: dict[str, Any] | None = None,
    checkpoint: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return what pid 1 is told of the state that its sandbox begins with."""
    return {"sessions": sessions, "delta": delta, "pristine": pristine, "checkpoint": checkpoint}
