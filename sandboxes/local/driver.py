"""The `local` driver: sandboxes made of namespaces, overlay layers and a live bash, on this machine, without a daemon.

A state (`FrozenState`) is a stack of layers and its sessions' dumps; with live processes also a checkpoint. Collecting
deletes what none of these has: the states that the caller keeps, the root states in use, the stacks of open sandboxes,
and the layers of sandboxes that are being started (`OpenSandboxes.holding`).
"""

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncIterator, Callable, Hashable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

import orjson

from sandboxes.calls import ToolCall
from sandboxes.checkpointing import WITHOUT_CHECKPOINTS, Checkpointer, NoCheckpointer
from sandboxes.driver import FrozenState
from sandboxes.egress.portable_recordings import PortableRecordings
from sandboxes.errors import SandboxError, SpecError, StateGoneError
from sandboxes.guest.files.disk_watch import free_of
from sandboxes.host.defaults import LITTLE_ROOM, RESERVE_BYTES
from sandboxes.host.root_states import RootState, RootStates, needs_setup, root_key
from sandboxes.images.images import Images
from sandboxes.images.store import ImageStore
from sandboxes.inspection import FrozenPath
from sandboxes.ipc.channel import ChannelClosedError
from sandboxes.ipc.launch_messages import ServiceMounts
from sandboxes.linux.cgroups import sweep
from sandboxes.linux.dir_lock import DirLock
from sandboxes.local import lower_view
from sandboxes.local.bases import Base, Bases
from sandboxes.local.layers import drop
from sandboxes.local.machine import START_S, Machine, Spare
from sandboxes.local.portable_layers import LayerPorter
from sandboxes.local.provision import furnish, prepare_services
from sandboxes.local.sandbox import LocalSandbox
from sandboxes.local.service_commands import SERVICES
from sandboxes.local.services import service_orders
from sandboxes.open_sandboxes import OpenSandboxes
from sandboxes.rights import held
from sandboxes.sources import SourceRules
from sandboxes.spec import EnvironmentSpec

LookT = TypeVar("LookT")
_MAX_PRISTINE = 256
"""The most specs whose new sessions are remembered, 2 kB each. A start of another spec waits for its first shell."""
VERSION = 6
"""Part of every identity. Raise it when equal calls would give other results or other digests than before."""
STATE_VERSION = 5
"""Version of frozen states. Raise it, too, when earlier ones would be restored over bases that differ from theirs."""


class LocalDriver:
    """The driver of local sandboxes. One instance owns its data directory; a lock keeps a second one out."""

    name = "local"
    state_version = str(STATE_VERSION)

    def __init__(
        self, data_dir: Path, checkpointer: Checkpointer | None = None, sources: SourceRules | None = None
    ) -> None:
        """Create the driver; without a checkpointer, states with live processes are reached by replay."""
        self.sources = sources or SourceRules()
        self.data_dir = data_dir.resolve()
        self.image_store = ImageStore(self.data_dir / "images")
        self.images = Images(self.image_store, self.sources, self.data_dir)
        self.bases = Bases(
            self.data_dir, self.image_store, privileged=held.has_privileged_launcher(), rules=self.sources
        )
        self.sandboxes = OpenSandboxes[LocalSandbox]()
        self.machine = Machine(
            self.data_dir, self.bases.host_view, checkpointer or NoCheckpointer(), self.sandboxes.holding
        )
        self.roots = RootStates(self.data_dir / "roots")
        self.porter = LayerPorter(self.machine.layers, self.sandboxes.holding)
        self._ownership = DirLock(self.data_dir)
        self._pristine: dict[Hashable, dict[str, Any]] = {}

    # -- life --------------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Take the data directory, remove what a killed instance left, and start the launcher."""
        if held.launcher_socket() and (missing := held.missing()):
            raise SandboxError(f"beside its launcher, the proxy lacks the capabilities {', '.join(missing)}")
        # The kernel releases the lock with the process, even after kill -9 (flock(2)). Layers hold set-user-id programs
        # and other users' files; only root, or this user, may reach them.
        self._ownership.acquire()
        try:
            await asyncio.to_thread(self._sweep)
            self.machine.cgroups.open()
            # Before the first sandbox: the next process finds the control groups by this file if this one is killed.
            (self.data_dir / "instance.json").write_bytes(
                orjson.dumps({"cgroups": sorted({str(path) for path in self.machine.cgroups.made})})
            )
            await self.machine.open()
        except BaseException:
            await self.aclose()
            raise

    def _sweep(self) -> None:
        # The file names the control groups of the last instance. Their processes must end before their layers go.
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            for group in orjson.loads((self.data_dir / "instance.json").read_bytes())["cgroups"]:
                if Path(group).name.startswith("forkpoint-"):
                    sweep(Path(group))
        # After the processes are dead: a file that a process has open keeps its disk space after it is removed
        # (unlink(2)).
        self.machine.layers.open()
        self.image_store.open()
        self.bases.open()
        self.roots.open()

    async def trial(self) -> None:
        """Run `true` in a sandbox, see `sandboxes.driver.TriedDriver`."""
        sandbox = await self.start(EnvironmentSpec())
        try:
            call = ToolCall("shell", "exec", {"command": "true", "timeout_s": 10.0, "session": "main"})
            answer = orjson.loads((await sandbox.execute(call)).result.body)
        finally:
            await sandbox.close()
        if answer["exit_code"] != 0:
            raise SandboxError(f"`true` exited with {answer['exit_code']}: {answer['stderr']}".rstrip(": "))

    def require_reserve(self) -> None:
        """Raise SandboxError while the disk has too little room for any call; see `ReservingDriver`."""
        if min(free_of(str(self.machine.layers.uppers))) < RESERVE_BYTES:
            raise SandboxError(f"{LITTLE_ROOM} at {self.data_dir}")

    async def aclose(self) -> None:
        """Close every sandbox, the spares and the launcher. Idempotent."""
        await self.sandboxes.close()
        # The lock is released last, because everything above still deletes files.
        await self.machine.close()
        self.bases.close()
        self.image_store.close()
        self._ownership.release()

    # -- states ------------------------------------------------------------------------------------------------------

    async def identity(self, spec: EnvironmentSpec) -> str:
        """Return a digest of the base and of every source that the spec names, read again if it has changed."""
        # What a confined spec may name is looked at again each time.
        if not spec.confined and (known := self.unchanged(spec)) is not None:
            return _identity(*known)
        base = await asyncio.to_thread(self.bases.refresh, spec)
        look = self.bases.sources.of_source
        return _identity(
            base.identity,
            *[
                await asyncio.to_thread(look, source, self.sources, confined=spec.confined)
                for source in spec.copied_sources
            ],
        )

    def unchanged(self, spec: EnvironmentSpec) -> tuple[str, ...] | None:
        """Return what the base and the sources of a spec are, see `sandboxes.driver.WatchingDriver`."""
        known = self.bases.known(spec), *map(self.bases.sources.known, spec.copied_sources)
        return None if None in known else cast("tuple[str, ...]", known)

    async def start(self, spec: EnvironmentSpec) -> LocalSandbox:
        """Start a sandbox at a spec's root state, which is built once; then a start takes milliseconds."""
        base = await self._look(spec, lambda: self.bases.base(spec))
        spec = base.completed(spec)
        root = await self._root(spec, base)
        # Between here and `_launch` no sandbox has these layers in its stack, and a collection would delete them.
        with self.sandboxes.holding(root.layers):
            # What a new session looks like follows from these. With it, the start need not wait for the first shell.
            same = base.identity, root, spec.directory, tuple(spec.env.items()), spec.limits
            sandbox = await self._launch(spec, base, root, root.layers, _state({}, self._pristine.get(same)))
            self._remember_pristine(same, sandbox.pristine)
        await sandbox.start_services(service_orders(spec, base.service_images))
        await sandbox.start_servers()
        return sandbox

    def _remember_pristine(self, same: Hashable, pristine: dict[str, Any] | None) -> None:
        if pristine is not None:
            self._pristine[same] = pristine
            while len(self._pristine) > _MAX_PRISTINE:
                del self._pristine[next(iter(self._pristine))]

    def advice(self, spec: EnvironmentSpec, /) -> str:
        """Return why states with live processes are dear here; empty until such a state was met, or if they are not."""
        del spec  # any call may leave processes running
        why = self.machine.checkpointer.unavailable_reason
        return f"{why}. {WITHOUT_CHECKPOINTS}" if why else ""

    async def restore(self, spec: EnvironmentSpec, frozen: FrozenState) -> LocalSandbox:
        """Start a sandbox at a frozen state; `StateGoneError` if something of it is gone, or its base has changed."""
        payload = frozen.payload
        layers = tuple(payload["layers"])
        # The root state's layers are the lowest ones; their number is stored with the state.
        root = RootState(layers=layers[len(layers) - payload["root_layers"] :], born_ns=payload["born_ns"])
        with self.sandboxes.holding(frozen.parts):
            base = await self._frozen_base(spec, payload)
            spec = base.completed(spec)
            images = payload.get("images")
            if images is not None and images not in self.machine.checkpointer.names():
                raise StateGoneError(f"the images of these processes ({images}) are gone. Replay their path instead.")
            # States that were saved with the sandbox's own bash as the anchor name no program.
            program, shell = (
                None if images is None else payload["checkpoint"]["anchor"].get("program"),
                self.machine.shell,
            )
            if program not in (None, None if shell is None else shell.digest):
                raise StateGoneError("these processes were saved by another build. Replay their path instead.")
            state = _state(payload["sessions"], payload["pristine"], payload.get("checkpoint"))
            sandbox = await self._launch(spec, base, root, layers, state, images=images)
            if frozen.state is not None and sandbox.begun_at != frozen.state:
                await sandbox.close()
                raise StateGoneError("what is stored of this state is not what was frozen. Replay its path instead.")
            sandbox.guest.begin_settling(payload.get("young_s", 0.0))
            return sandbox

    async def image(self, spec: EnvironmentSpec, frozen: FrozenState, name: str, target: Path | None) -> str:
        """Make a container image of a state, see `sandboxes.portability.ImagingDriver`."""
        self.images.require_possible(spec)
        async with self.images.making, self._frozen_lowers(spec, frozen) as (base, lowers):
            left_out = [SERVICES.strip("/")] if spec.services else []
            return await self.images.make(lowers, base.image_config(spec), left_out, name, target)

    async def open_frozen(self, spec: EnvironmentSpec, frozen: FrozenState, path: str) -> FrozenPath:
        """Return what a path of a state leads to, but nothing of a base that is this machine itself."""
        # Sandboxes see a part of it, and a person may not.
        async with self._frozen_lowers(spec, frozen) as (base, lowers):
            # The content of a file is read later: a layer never changes, and stays while a descriptor of it is open.
            found = await asyncio.to_thread(lower_view.open_path, lowers, path)
            return replace(found, base=bool(base.bare))

    @contextlib.asynccontextmanager
    async def _frozen_lowers(self, spec: EnvironmentSpec, frozen: FrozenState) -> AsyncIterator[tuple[Base, list[str]]]:
        """Yield the base of a state, and the directories of both, topmost first; nothing collects them meanwhile."""
        with self.sandboxes.holding(frozen.parts):
            base = await self._frozen_base(spec, frozen.payload)
            with self.sandboxes.holding(base.images):
                yield base, [*self.machine.layers.lowers(frozen.payload["layers"]), *base.bare]

    async def _frozen_base(self, spec: EnvironmentSpec, payload: dict[str, Any]) -> Base:
        layers = payload["layers"]
        # Checked while held: a layer that exists now stays until the sandbox has it in its stack.
        if missing := self.machine.layers.missing(layers):
            raise StateGoneError(f"layers {', '.join(missing)} of this state are gone. Replay its path instead.")
        if damaged := await self.machine.layer_check.damaged(layers):
            raise StateGoneError(
                f"layers {', '.join(damaged)} of this state were changed on disk. Replay its path instead."
            )
        base = await self._look(spec, lambda: self.bases.frozen(spec, payload["base"]))
        if base is None:
            raise StateGoneError(
                f"base {spec.image or spec.base!r} has changed since this state was frozen. Replay its path."
            )
        return base

    def recordings(self, spec: EnvironmentSpec) -> PortableRecordings | None:
        """Return what sandboxes of a spec received from hosts outside; None without egress."""
        return self.machine.egress.recordings(spec)

    async def collect(self, keep: Iterable[str]) -> int:
        """Delete layers, checkpoints and images that are neither kept nor in use, also by root states."""
        checkpointer = self.machine.checkpointer
        # Both sets are read before the first await. A sandbox that freezes and ends meanwhile makes a state that `keep`
        # does not name: its parts are then either not in `present`, or still in `in_use`.
        present, in_use = self.machine.layers.all() | checkpointer.names(), self.sandboxes.parts_in_use()
        # The caller need not name root states in use, although each rollout of a task starts at one.
        roots = await asyncio.to_thread(self.roots.used)
        kept = set(keep).union(*(root.layers for root in roots))
        size = sum(self.machine.layers.size_bytes(layer) for layer in kept if not self.machine.layers.missing([layer]))
        size += await asyncio.to_thread(checkpointer.size_bytes, kept)
        unneeded = present - kept - in_use - self.sandboxes.parts_in_use()
        # Without an await in between: a restore that begins while the thread deletes must find the layers missing, not
        # half deleted.
        self.machine.layers.disown(unneeded)
        self.machine.reaper.retry(await asyncio.to_thread(drop, self.machine.layers, unneeded))
        await asyncio.to_thread(checkpointer.drop, unneeded)
        # Each state lies over a root state. An image that is removed too early is unpacked again.
        images = {image for root in roots for image in root.images}
        await asyncio.to_thread(self.image_store.collect, images | self.sandboxes.parts_in_use())
        return size

    async def _look(self, spec: EnvironmentSpec, look: Callable[[], LookT]) -> LookT:
        """Return what a function finds out about a base; it runs in a thread if the base has to be walked for it."""
        return look() if self.bases.known(spec) is not None else await asyncio.to_thread(look)

    async def _root(self, spec: EnvironmentSpec, base: Base) -> RootState:
        identity = (await self.identity(spec)) if spec.copied_sources else base.identity

        async def is_present(root: RootState) -> bool:
            missing = self.machine.layers.missing(root.layers)
            return not missing and not await self.machine.layer_check.damaged(root.layers)

        return await self.roots.get(root_key(spec, identity), is_present, lambda: self._build_root(spec, base))

    async def _build_root(self, spec: EnvironmentSpec, base: Base) -> RootState:
        """Run set-up in a sandbox of the bare base, and freeze that."""
        bare = RootState(layers=(), images=base.images, born_ns=time.time_ns())
        if not needs_setup(spec):
            return bare
        # Set-up makes the working directory, so its own sandbox starts at the root.
        at_top = spec.model_copy(update={"workdir": "/"})
        # Without seals: all commands of the set-up become one layer, whose depth does not depend on their number.
        # The directories that services share are made below.
        unshared = replace(base, services=ServiceMounts(base.services.roots, []))
        sandbox = await self._launch(at_top, unshared, bare, (), _state({}), seals=False)
        try:
            await prepare_services(sandbox, spec)
            await furnish(sandbox, spec, self.sources)
            state = await sandbox.freeze(root=True)
        finally:
            await sandbox.close()
        content = state.state.content.hex() if state.state is not None else ""
        root = RootState(
            layers=tuple(state.payload["layers"]), images=base.images, born_ns=time.time_ns(), content=content
        )
        # A whole task depends on its root state. Unlike other layers it must outlive a loss of power.
        await asyncio.to_thread(self.machine.layers.sync, root.layers)
        return root

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
        """Start a sandbox from a spare, with layers over its base, the topmost first."""
        # `state` is what pid 1 needs of the state (`_state`), and `images` the checkpoint to restore; None starts a
        # fresh shell. If it `seals`, each call's changes become a layer.
        self.sources.check_egress(spec)
        if spec.stands_still and self.machine.cgroups.freezer is None:
            raise SpecError(
                "processes cannot be frozen between calls here, as `harness` and `live` want it: the proxy can write "
                "no control group of version 2. `forkpoint doctor` says more."
            )

        # A clock that was set back gives files of calls earlier times than the root state's.
        born_ns = min(root.born_ns, time.time_ns())

        def make(spare: Spare) -> LocalSandbox:
            return LocalSandbox(self.machine, spare, spec, base, root.layers, born_ns, layers, seals=seals)

        launcher = self.machine.launcher.pid
        try:
            return await self._launch_once(make, state, images)
        except SandboxError:
            if not self.machine.launcher.has_died and self.machine.launcher.pid == launcher:
                raise
        # The launcher died and took its spares along, which shows only now. The next spare has another launcher.
        return await self._launch_once(make, state, images)

    async def _launch_once(
        self, make: Callable[[Spare], LocalSandbox], state: dict[str, Any], images: str | None
    ) -> LocalSandbox:
        try:
            async with asyncio.timeout(START_S):
                spare = await self.machine.spare()
            return await self._begin(make(spare), state, images)
        # Cancellation passes unchanged; these three become the error that callers retry.
        except (ChannelClosedError, TimeoutError, OSError) as error:
            raise SandboxError(f"a sandbox could not be started: {error}") from error
        finally:
            self.machine.restock()

    async def _begin(self, sandbox: LocalSandbox, state: dict[str, Any], images: str | None) -> LocalSandbox:
        # Known before `begin`: `aclose` and `collect` must see a sandbox that is still starting.
        self.sandboxes.add(sandbox)
        try:
            async with asyncio.timeout(START_S):
                await sandbox.begin(state, images)
        except BaseException:
            await sandbox.close()
            raise
        return sandbox


def _identity(base: str, *sources: str) -> str:
    digest = hashlib.blake2b(f"local\0{VERSION}\0{base}".encode(), digest_size=32)
    for source in sources:
        digest.update(source.encode())
    return digest.hexdigest()


def _state(
    sessions: dict[str, Any], pristine: dict[str, Any] | None = None, checkpoint: dict[str, Any] | None = None
) -> dict[str, Any]:
    return {"sessions": sessions, "pristine": pristine, "checkpoint": checkpoint}
