"""The `container` driver: sandboxes out of Docker containers, of any image that has /bin/sh."""

import asyncio
import contextlib
import hashlib
import secrets
import socket
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import orjson

from sandboxes.checkpointing import Checkpointer, NoCheckpointer
from sandboxes.container.daemon import HOST, INSTANCE, PLACE, ROOT, SANDBOX, Daemon
from sandboxes.container.orphans import kill_orphans
from sandboxes.container.root_images import RootImage, RootImages
from sandboxes.container.sandbox import ContainerSandbox
from sandboxes.container.spares import Spares
from sandboxes.container.state_copies import States
from sandboxes.driver import FrozenState
from sandboxes.errors import NotFreezableError, SandboxError, SpecError, StateGoneError
from sandboxes.host.provision import furnish
from sandboxes.host.source_digest import SourceDigests
from sandboxes.linux.dir_lock import Ownership, is_unowned
from sandboxes.spec import EnvironmentSpec
from sandboxes.task_owner import start

VERSION = 2
"""Part of every identity: raise it when equal calls would give other answers or other digests than before."""
_PRESENT = ("/", "/root", "/tmp")  # noqa: S108 - a path inside the sandbox
REAP_S = 30.0


class ContainerDriver:
    """See `sandboxes.driver.Driver`. One instance owns its data directory; a lock in it keeps a second one out.

    Args:
        data_dir: The driver's own directory.
        checkpointer: Saves states with live processes; None reaches such states by replay.
        spares: How many started containers wait for each image, so that a restore takes milliseconds.
    """

    name = "container"

    def __init__(self, data_dir: Path, checkpointer: Checkpointer | None = None, *, spares: int = 2) -> None:
        self.data_dir = data_dir.resolve()
        self.daemon = Daemon()
        self.states = States(self.data_dir / "states")
        self.spares = Spares(self.daemon, self.data_dir, spares=spares)
        self.roots = RootImages(self.data_dir / "roots")
        self.checkpointer = checkpointer or NoCheckpointer()
        self._sources = SourceDigests()
        self._sandboxes: set[ContainerSandbox] = set()
        self._ownership = Ownership(self.data_dir)
        self._instance = ""
        self._reaper: asyncio.Task[None] | None = None
        self._building: dict[str, asyncio.Lock] = {}
        self._configs: dict[str, dict[str, Any]] = {}

    # -- life --------------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """See `Driver.open`.

        Raises:
            SandboxError: another process uses this data directory, or no Docker daemon answers.
        """
        self.data_dir.mkdir(parents=True, exist_ok=True)
        self._ownership.acquire()
        try:
            await asyncio.to_thread(self._get_ready)
            await self.spares.open(self._instance)
            self._reaper = start(self._reap(), name="remove dead containers")
        except BaseException:
            await self.aclose()
            raise

    def _get_ready(self) -> None:
        told = self.daemon.check()
        facts = told.get("DriverStatus") or []
        if (
            told.get("Driver") != "overlay2"
            or ["Native Overlay Diff", "true"] not in facts
            or ["userxattr", "true"] in facts
        ):
            raise SandboxError(
                f"Docker at {self.daemon.where} stores its containers with {told.get('Driver')!r}; the driver "
                'needs `overlay2` with native diffs: set "storage-driver" in /etc/docker/daemon.json.'
            )
        place = self.data_dir / "instance"
        if not place.exists():
            place.write_text(secrets.token_hex(8))
        self._instance = place.read_text()
        # Boxes are reached from inside containers, by whatever user; the rest is private.
        self.data_dir.chmod(0o711)
        self.states.open()
        self.roots.open()
        self._sweep()
        self._sweep_images()

    def _sweep(self) -> None:
        """Remove the containers of dead instances on this machine, and images of those that are gone for good.

        Of this instance, those that it does not know: an earlier process made them, or a daemon that went away did not
        say that it had, or has forgotten them itself.
        """
        for container, labels in self.daemon.labelled():
            if labels.get(INSTANCE) == self._instance:
                dead = labels.get(SANDBOX) not in self.spares.names
            else:
                dead = labels.get(HOST) == socket.gethostname() and is_unowned(Path(labels.get(PLACE, "/")))
            if dead:
                with contextlib.suppress(SandboxError):
                    self.daemon.remove(container)
        kill_orphans(self.spares.boxes, self.spares.names)
        for image, labels in self.daemon.images():
            if labels.get(HOST) == socket.gethostname() and not Path(labels.get(PLACE, "/")).exists():
                with contextlib.suppress(SandboxError):
                    self.daemon.forget_image(image)

    def _sweep_images(self) -> None:
        """Remove the images that an earlier process had committed, and was killed before it noted them as roots."""
        known = self.roots.images()
        for image, labels in self.daemon.images():
            if labels.get(INSTANCE) == self._instance and image not in known:
                with contextlib.suppress(SandboxError):
                    self.daemon.forget_image(image)

    async def _reap(self) -> None:
        """From time to time remove what died beside us."""
        while True:
            await asyncio.sleep(REAP_S)
            with contextlib.suppress(SandboxError, SpecError):
                await asyncio.to_thread(self._sweep)

    async def aclose(self) -> None:
        """See `Driver.aclose`. Idempotent."""
        if self._reaper is not None:
            self._reaper.cancel()
            await asyncio.wait([self._reaper])
            self._reaper = None
        await asyncio.gather(*(sandbox.close() for sandbox in self.sandboxes.values()))
        await self.spares.close()
        await asyncio.to_thread(self.daemon.close)
        self._ownership.release()

    @property
    def sandboxes(self) -> dict[str, ContainerSandbox]:
        """Those that are not closed yet, by id, dead ones included."""
        self._sandboxes = {sandbox for sandbox in self._sandboxes if not sandbox.closed}
        return {sandbox.id: sandbox for sandbox in self._sandboxes}

    # -- states ------------------------------------------------------------------------------------------------------

    async def identity(self, spec: EnvironmentSpec) -> str:
        """See `Driver.identity`: the image's id, whatever its name points to tomorrow."""
        image = await asyncio.to_thread(self.daemon.image, _image(spec))
        digest = hashlib.blake2b(f"container\0{VERSION}\0{image}".encode(), digest_size=32)
        for source in spec.brought:
            digest.update((await asyncio.to_thread(self._sources.of, Path(source))).encode())
        return digest.hexdigest()

    async def config(self, image: str) -> dict[str, Any]:
        """Return an image's id and what its containers are started with by default, in Docker's words.

        Raises:
            SpecError: Docker has no such image.
        """
        known = self._configs.get(image)
        if known is None:
            known = await asyncio.to_thread(self.daemon.config, image)
            if image == known["Id"]:
                # What a name means may change; what an id means does not.
                self._configs[image] = known
        return known

    async def start(self, spec: EnvironmentSpec) -> ContainerSandbox:
        """See `Driver.start`. The root state of a spec is built once, as an image; then a spare is taken."""
        root = await self._root(spec)
        sandbox = await self._launch(spec, root.image, root.born_ns, None)
        try:
            await sandbox.start_servers()
        except BaseException:
            await sandbox.close()
            raise
        return sandbox

    async def restore(self, spec: EnvironmentSpec, frozen: FrozenState) -> ContainerSandbox:
        """See `Driver.restore`: a spare, the copy laid over it, and its shells from their dumps."""
        copy, image = frozen.payload["copy"], frozen.payload["image"]
        with self.states.holding(copy):
            images = frozen.payload.get("images")
            if not self.states.there(copy) or not (images is None or images in self.checkpointer.names()):
                raise StateGoneError(f"state {copy} is gone; replay its path instead")
            try:
                sandbox = await self._launch(spec, image, frozen.payload["born_ns"], frozen)
            except SpecError as error:
                raise StateGoneError(f"the image of this state is gone: {error}") from error
            sandbox.be_young(frozen.payload.get("young_s", 0.0))
            return sandbox

    async def collect(self, keep: Iterable[str]) -> int:
        """See `Driver.collect`. Parts are copies; images of root states that nobody has used for long go too."""
        # What there was, and what lived, before the first await: see LocalDriver.collect.
        there, before = self.states.all() | self.checkpointer.names(), self._in_use()
        wanted = set(keep)
        kept = {name for name in wanted if self.states.there(name)}
        size = await asyncio.to_thread(self.states.size_bytes, kept)
        size += await asyncio.to_thread(self.checkpointer.size_bytes, wanted)
        unneeded = there - wanted - before - self._in_use() - set(self.states.held)
        await asyncio.to_thread(self.states.drop, unneeded - self.checkpointer.names())
        await asyncio.to_thread(self.checkpointer.drop, unneeded)
        needed = {sandbox.image for sandbox in self.sandboxes.values()}
        for image in await asyncio.to_thread(self.roots.unused):
            if image not in needed:
                with contextlib.suppress(SandboxError):
                    await asyncio.to_thread(self.daemon.forget_image, image)
        return size

    def _in_use(self) -> set[str]:
        return {part for sandbox in self.sandboxes.values() for part in sandbox.parts}

    async def _root(self, spec: EnvironmentSpec) -> RootImage:
        """Return spec's root state; build it where it is not there (any more)."""
        image = await asyncio.to_thread(self.daemon.image, _image(spec))
        if not (spec.brought or spec.files or spec.setup or spec.workdir not in _PRESENT):
            return RootImage(image, time.time_ns())
        beside = {"limits", "merge", "cache", "image", "servers", "mcp_servers"}
        told = orjson.dumps(spec.model_dump(exclude=beside), option=orjson.OPT_SORT_KEYS)
        key = hashlib.blake2b(told + (await self.identity(spec)).encode(), digest_size=16).hexdigest()
        async with self._building.setdefault(key, asyncio.Lock()):
            known = await asyncio.to_thread(self.roots.find, key)
            if known is not None and await self._has(known.image):
                return known
            root = await self._build_root(spec, image, key)
            if known is not None and known.content != root.content:
                raise SpecError(
                    "the task's root state was lost, and its set-up, run again, gave another one than its tree was "
                    "recorded on. Delete the task, or make its set-up reproducible (fixed dates, no random names)."
                )
            await asyncio.to_thread(self.roots.save, key, root)
            return root

    async def _has(self, image: str) -> bool:
        try:
            return bool(await asyncio.to_thread(self.daemon.image, image))
        except SpecError:
            return False

    async def _build_root(self, spec: EnvironmentSpec, image: str, key: str) -> RootImage:
        """Run set-up in a container of the image, and commit that: one layer over the image, once for a spec."""
        at_top = spec.model_copy(update={"workdir": "/"})
        sandbox = await self._launch(at_top, image, time.time_ns(), None, spare=False)
        try:
            await furnish(sandbox, spec)
            state = await sandbox.freeze()
            # Only its digest was wanted.
            await asyncio.to_thread(self.states.drop, state.parts)
            labels = {**self.spares.labels, ROOT: key}
            made = await asyncio.to_thread(
                self.daemon.commit, sandbox.container, labels, (f"forkpoint-root-{self._instance}", key)
            )
        except NotFreezableError as error:
            raise SpecError(
                f"set-up leaves something running ({error}): end it, or start it in a call instead"
            ) from error
        finally:
            await sandbox.close()
        content = state.state.content.hex() if state.state is not None else ""
        return RootImage(made, time.time_ns(), content)

    # -- sandboxes ---------------------------------------------------------------------------------------------------

    async def _launch(
        self, spec: EnvironmentSpec, image: str, born_ns: int, frozen: FrozenState | None, *, spare: bool = True
    ) -> ContainerSandbox:
        born_with = variables(await self.config(image))
        box = await (self.spares.take if spare else self.spares.make)(image, spec.limits)
        sandbox = ContainerSandbox(box, spec, image, born_ns, self.spares, self.states, self.checkpointer, born_with)
        self._sandboxes.add(sandbox)
        try:
            await sandbox.begin(frozen)
        except BaseException:
            await sandbox.close()
            raise
        if spare:
            self.spares.restock()
        return sandbox


def variables(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables that an image's containers are born with (pure)."""
    return dict(entry.split("=", 1) for entry in config.get("Env") or () if "=" in entry)


def _image(spec: EnvironmentSpec) -> str:
    if spec.image is None:
        raise SpecError('the container driver needs an image: name one in the spec, such as "image": "debian:12".')
    if spec.base != "host":
        raise SpecError("the container driver has images, not bases: leave `base` out.")
    return spec.image
