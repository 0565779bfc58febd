"""The `container` driver: sandboxes in Docker containers, of any image that has /bin/sh.

A state is a copy of what the container wrote over its image, and the dumps of its sessions; with live processes also a
checkpoint. Root states are images that this driver commits. Containers and images carry labels, so that the next
instance, or another one on this machine, can remove what a killed instance left.
"""

import asyncio
import contextlib
import hashlib
import secrets
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sandboxes.checkpointing import Checkpointer, NoCheckpointer
from sandboxes.container.daemon import DATA_DIR, HOST, INSTANCE, ROOT, SANDBOX, Daemon
from sandboxes.container.orphans import kill_orphans
from sandboxes.container.portable_copies import CopyPorter, ImportedImage, imported_image, require_intact
from sandboxes.container.sandbox import ContainerSandbox
from sandboxes.container.services import bring_services, service_orders
from sandboxes.container.spares import Spares
from sandboxes.container.state_copies import StateCopies
from sandboxes.driver import FrozenState
from sandboxes.egress.gateway import EgressGateway
from sandboxes.egress.portable_recordings import PortableRecordings
from sandboxes.errors import SandboxError, SpecError, StateGoneError
from sandboxes.host.provision import furnish
from sandboxes.host.root_states import RootState, RootStates, needs_setup, root_key
from sandboxes.host.source_digest import SourceDigests
from sandboxes.linux.cgroups import hides_other_groups
from sandboxes.linux.dir_lock import DirLock, is_unowned
from sandboxes.open_sandboxes import OpenSandboxes
from sandboxes.sources import SourceRules
from sandboxes.spec import EnvironmentSpec
from sandboxes.task_owner import start

VERSION = 5
"""Part of every identity. Raise it when equal calls would give other results or other digests than before."""

REAP_S = 30.0
"""Interval of the sweep that removes containers of dead instances; a sweep takes some ten milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RootImage(RootState):
    """The root state of a spec, as an image that this driver committed.

    Attributes:
        image: Docker's id of the image.
    """

    image: str


class ContainerDriver:
    """The driver of containers. One instance owns its data directory; a lock keeps a second one out."""

    name = "container"
    state_version = str(VERSION)

    def __init__(
        self,
        data_dir: Path,
        checkpointer: Checkpointer | None = None,
        sources: SourceRules | None = None,
        *,
        spares: int = 2,
        docker_starts: bool = False,
    ) -> None:
        """Create the driver; `open` connects to the daemon.

        Args:
            data_dir: The driver's own directory.
            checkpointer: Saves states with live processes; None reaches such states by replay.
            sources: What specs may name; None allows all paths to those that are not confined.
            spares: How many started containers wait at least for each image, so that a restore takes milliseconds.
            docker_starts: Whether Docker starts the container of each sandbox; see `patterns`.
        """
        self.data_dir, self.sources = data_dir.resolve(), sources or SourceRules()
        self.daemon = Daemon()
        self.states = StateCopies(self.data_dir / "states")
        self.spares = Spares(self.daemon, self.data_dir, spares=spares, docker_starts=docker_starts)
        self.roots = RootStates(self.data_dir / "roots", RootImage)
        self.checkpointer = checkpointer or NoCheckpointer()
        self.egress = EgressGateway(self.data_dir / "egress")
        self._digests = SourceDigests()
        self.sandboxes = OpenSandboxes[ContainerSandbox]()
        self.porter = CopyPorter(self.states, self.daemon, self.sandboxes.holding)
        self._ownership = DirLock(self.data_dir)
        self._instance = ""
        self._reaper: asyncio.Task[None] | None = None
        self._configs: dict[str, dict[str, Any]] = {}

    # -- life --------------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Take the data directory, remove what killed instances left, and start the keeper launcher.

        Raises:
            SandboxError: Another process uses this data directory, or no suitable Docker daemon responds.
        """
        # The kernel drops this lock when the process dies, however it dies. The sweeps of other instances test it
        # (`is_unowned`). The mode lets containers reach their boxes, as any user; everything else in it is private.
        self._ownership.acquire(0o711)
        try:
            info = await asyncio.to_thread(self._prepare)
            await self.spares.open(self._instance, info)
            self._reaper = start(self._reap(), name="remove dead containers")
        except BaseException:
            await self.aclose()
            raise

    def _prepare(self) -> dict[str, Any]:
        """Check the daemon's storage, make the directories, and sweep; return the daemon's description of itself.

        Raises:
            SandboxError: The daemon does not store containers as overlay2 with native diffs.
        """
        info = self.daemon.check()
        status = info.get("DriverStatus") or []
        # A keeper reads a container's upper directory as overlayfs wrote it. Other storage drivers have none, and with
        # `userxattr` or without native diffs its marks are different.
        if (
            info.get("Driver") != "overlay2"
            or ["Native Overlay Diff", "true"] not in status
            or ["userxattr", "true"] in status
        ):
            raise SandboxError(
                f"Docker at {self.daemon.where} stores its containers with {info.get('Driver')!r}; the driver "
                'needs `overlay2` with native diffs: set "storage-driver" in /etc/docker/daemon.json.'
            )
        if hides_other_groups():
            raise SandboxError(
                "the control groups of containers are not visible here, so no sandbox could be started. In a "
                "container, mount /sys/fs/cgroup from the machine, as compose.yaml does."
            )
        instance_file = self.data_dir / "instance"
        if not instance_file.exists():
            # The id is made once and stays with the directory, so that a restarted proxy recognizes its own containers.
            instance_file.write_text(secrets.token_hex(8))
        self._instance = instance_file.read_text()
        # The sweep comes after these and before `Spares.open`, which empties the directory of the boxes: orphans are
        # known by boxes in it.
        self.states.open()
        self.roots.open()
        self._sweep()
        self._sweep_images()
        return info

    def _sweep(self) -> None:
        """Remove containers of dead instances on this machine, and images of instances whose directory is gone."""
        for container, labels in self.daemon.labelled():
            if labels.get(INSTANCE) == self._instance:
                # This instance's label but an unknown name: an earlier process made the container, or the daemon died
                # before it reported the start, or it has forgotten the container itself.
                dead = labels.get(SANDBOX) not in self.spares.boxes.names
            else:
                # Another machine may share the Docker daemon. Its locks cannot be tested from here, so its containers
                # are left alone.
                dead = labels.get(HOST) == socket.gethostname() and is_unowned(Path(labels.get(DATA_DIR, "/")))
            if dead:
                with contextlib.suppress(SandboxError):
                    self.daemon.remove(container)
        kill_orphans(self.spares.boxes.folder, self.spares.boxes.names)
        for image, labels in self.daemon.images():
            # Unlike a container, an image is kept while its data directory exists: the next process of that instance
            # uses it.
            if labels.get(HOST) == socket.gethostname() and not Path(labels.get(DATA_DIR, "/")).exists():
                with contextlib.suppress(SandboxError):
                    self.daemon.forget_image(image)

    def _sweep_images(self) -> None:
        """Remove images that an earlier process committed but was killed before it saved them as root states."""
        # Between `commit` and the saved root state a kill -9 leaves an image that no file names.
        known = {root.image for root in self.roots.all()}
        for image, labels in self.daemon.images():
            if labels.get(INSTANCE) == self._instance and image not in known:
                with contextlib.suppress(SandboxError):
                    self.daemon.forget_image(image)

    async def _reap(self) -> None:
        """Sweep every `REAP_S`: other instances may die while this one runs."""
        while True:
            await asyncio.sleep(REAP_S)
            with contextlib.suppress(SandboxError, SpecError):
                await asyncio.to_thread(self._sweep)
            # Spares that a burst has left end when no other one comes.
            self.spares.restock()

    async def aclose(self) -> None:
        """Close every sandbox, the spares and the keeper launcher. Idempotent."""
        if self._reaper is not None:
            self._reaper.cancel()
            # wait() does not raise the task's CancelledError here.
            await asyncio.wait([self._reaper])
            self._reaper = None
        await self.sandboxes.close()
        # After the sandboxes, because a sandbox that closes has its box removed by `Spares`. The lock comes last:
        # everything above still writes.
        await self.spares.close()
        await self.egress.close()
        await asyncio.to_thread(self.daemon.close)
        self._digests.directories.close()
        self._ownership.release()

    # -- states ------------------------------------------------------------------------------------------------------

    async def identity(self, spec: EnvironmentSpec) -> str:
        """Return a digest of the image's id and of every source that the spec names.

        Raises:
            SpecError: Docker has no such image, or a source is missing or cannot be read.
        """
        image = await asyncio.to_thread(self.daemon.image, _image(spec))
        # The image's id is a digest of its content, so equal images give equal identities on every machine.
        digest = hashlib.blake2b(f"container\0{VERSION}\0{image}".encode(), digest_size=32)
        for name, service in sorted(spec.services.items()):
            digest.update(f"{name}\0{await asyncio.to_thread(self.daemon.image, service.image)}\0".encode())
        for source in spec.copied_sources:
            source_digest = await asyncio.to_thread(
                self._digests.of_source, source, self.sources, confined=spec.confined
            )
            digest.update(source_digest.encode())
        return digest.hexdigest()

    async def tags(self) -> list[str]:
        """Return the names of all images."""
        return await asyncio.to_thread(self.daemon.tags)

    async def config(self, image: str) -> dict[str, Any]:
        """Return the configuration of an image, as Docker's API reports it, with its id.

        Raises:
            SpecError: Docker has no such image.
        """
        known = self._configs.get(image)
        if known is None:
            known = await asyncio.to_thread(self.daemon.config, image)
            if image == known["Id"]:
                # A name may point to another image tomorrow; an id does not, so only ids are cached.
                self._configs[image] = known
        return known

    async def start(self, spec: EnvironmentSpec) -> ContainerSandbox:
        """Start a sandbox at a spec's root state, which is built once, as an image.

        Raises:
            SpecError: The spec cannot be built.
            SandboxError: Docker or the machine failed.
        """
        root = await self._root(spec)
        configs = {name: await self.config(service.image) for name, service in spec.services.items()}
        services = service_orders(spec, configs)
        sandbox = await self._launch(spec, root.image, root.born_ns, None)
        await sandbox.start_services(services)
        await sandbox.start_servers()
        return sandbox

    async def restore(self, spec: EnvironmentSpec, frozen: FrozenState) -> ContainerSandbox:
        """Start a sandbox at a frozen state: lay its copy over a spare container, and restore its shells.

        Raises:
            StateGoneError: Its copy, images or image are gone.
            SandboxError: Docker or the machine failed.
        """
        copy, image = frozen.payload["copy"], frozen.payload["image"]
        # Held before the check: a collection between the check and the restore would delete the copy.
        with self.sandboxes.holding(frozen.parts):
            images = frozen.payload.get("images")
            if not self.states.exists(copy) or not (images is None or images in self.checkpointer.names()):
                raise StateGoneError(f"state {copy} is gone. Replay its path instead.")
            try:
                if self.states.exists(image):
                    image = await self._imported(spec, image, frozen.payload["born_ns"])
                sandbox = await self._launch(spec, image, frozen.payload["born_ns"], frozen)
            except SpecError as error:
                raise StateGoneError(f"the image of this state is gone: {error}") from error
            sandbox.begin_settling(frozen.payload.get("young_s", 0.0))
            return sandbox

    def recordings(self, spec: EnvironmentSpec) -> PortableRecordings | None:
        """Return what sandboxes of a spec received from hosts outside; None without egress."""
        return self.egress.recordings(spec)

    async def collect(self, keep: Iterable[str]) -> int:
        """Delete copies and checkpoints that are neither kept nor in use, and images of root states out of use.

        See `sandboxes.driver.Driver.collect`.
        """
        # Both sets are read before the first await, for the reason that `LocalDriver.collect` gives.
        present, in_use = self.states.all() | self.checkpointer.names(), self.sandboxes.parts_in_use()
        wanted = set(keep)
        kept = {name for name in wanted if self.states.exists(name)}
        size = await asyncio.to_thread(self.states.size_bytes, kept)
        size += await asyncio.to_thread(self.checkpointer.size_bytes, wanted)
        unneeded = present - wanted - in_use - self.sandboxes.parts_in_use()
        copies = unneeded - self.checkpointer.names()
        # Without an await in between: a restore that begins while the thread deletes must find its copy missing, and
        # not lay the rest of one that is half deleted over its container.
        self.states.disown(copies)
        await asyncio.to_thread(self.states.drop, copies)
        await asyncio.to_thread(self.checkpointer.drop, unneeded)
        needed = {sandbox.image for sandbox in self.sandboxes}
        # Docker refuses to remove an image that a container uses. Open sandboxes are left out all the same, because
        # their frozen states need the image later.
        for image in {root.image for root in await asyncio.to_thread(self.roots.unused)} - needed:
            with contextlib.suppress(SandboxError):
                await asyncio.to_thread(self.daemon.forget_image, image)
        return size

    async def _root(self, spec: EnvironmentSpec) -> RootImage:
        """Return a spec's root state; build it if its image is missing."""
        image = await asyncio.to_thread(self.daemon.image, _image(spec))
        if not needs_setup(spec):
            return RootImage(image=image, born_ns=time.time_ns())
        # The image's name is left out of the key: the identity has its id.
        key = root_key(spec, await self.identity(spec), without=frozenset({"image"}))
        return await self.roots.get(
            key, lambda known: self._has(known.image), lambda: self._build_root(spec, image, key)
        )

    async def _imported(self, spec: EnvironmentSpec, copy: str, born_ns: int) -> str:
        """Return the image that was imported as a copy; make it if it is missing.

        Raises:
            StateGoneError: The spec has another image by now, or the copy was damaged.
        """
        folder = self.states.folder / copy
        imported = await asyncio.to_thread(imported_image, folder)
        below = await asyncio.to_thread(self.daemon.image, _image(spec))
        if imported is None or imported.base != below:
            raise StateGoneError(f"the image of this state is not {spec.image!r}. Replay its path instead.")
        if not imported.adds:
            return below
        root = await self.roots.get(
            f"imported-{copy}",
            lambda known: self._has(known.image),
            lambda: self._lay_image(spec, imported, copy, born_ns),
        )
        return root.image

    async def _lay_image(self, spec: EnvironmentSpec, imported: ImportedImage, copy: str, born_ns: int) -> RootImage:
        """Commit an imported layer over the image below it."""
        await asyncio.to_thread(require_intact, self.states.folder / copy)
        payload = {"copy": copy, "image": imported.base, "born_ns": born_ns, "sessions": {}, "pristine": None}
        frozen = FrozenState(self.name, "files", payload, 0, None, (copy,))
        sandbox = await self._launch(
            spec.model_copy(update={"workdir": "/"}), imported.base, born_ns, frozen, spare=False
        )
        return RootImage(image=await self._commit(sandbox, f"imported-{copy}"), born_ns=born_ns)

    async def _commit(self, sandbox: ContainerSandbox, key: str) -> str:
        """Make an image of a sandbox, which is closed; return its id."""
        labels = {**self.spares.boxes.labels, ROOT: key}
        try:
            return await asyncio.to_thread(
                self.daemon.commit, sandbox.container, labels, (f"forkpoint-root-{self._instance}", key)
            )
        finally:
            await sandbox.close()

    async def _has(self, image: str) -> bool:
        try:
            return bool(await asyncio.to_thread(self.daemon.image, image))
        except SpecError:
            return False

    async def _build_root(self, spec: EnvironmentSpec, image: str, key: str) -> RootImage:
        """Run set-up in a container of the image and commit it, as one layer over the image."""
        at_top = spec.model_copy(update={"workdir": "/"})
        sandbox = await self._launch(at_top, image, time.time_ns(), None, spare=False)
        try:
            # First, so that files and set-up commands may change files of services.
            await bring_services(sandbox, spec, self.daemon, self.spares.boxes.labels)
            await furnish(sandbox, spec, self.sources)
            state = await sandbox.freeze()
            # The copy is not needed: only its digest is, beside the committed image.
            # A kill -9 before this line leaves a state that no record names; the next `collect` deletes it.
            await asyncio.to_thread(self.states.drop, state.parts[:1])
        except BaseException:
            await sandbox.close()
            raise
        made = await self._commit(sandbox, key)
        content = state.state.content.hex() if state.state is not None else ""
        return RootImage(image=made, born_ns=time.time_ns(), content=content)

    # -- sandboxes ---------------------------------------------------------------------------------------------------

    async def _launch(
        self, spec: EnvironmentSpec, image: str, born_ns: int, frozen: FrozenState | None, *, spare: bool = True
    ) -> ContainerSandbox:
        self.sources.check_egress(spec)
        born_with = variables(await self.config(image))
        box = await (self.spares.take if spare else self.spares.boxes.start_by_docker)(image, spec.limits)
        sandbox = ContainerSandbox(
            box, spec, image, born_ns, self.spares, self.states, self.checkpointer, born_with, self.egress, self.config
        )
        # Known before `begin`, so that `aclose` and `collect` see a sandbox that is still starting.
        self.sandboxes.add(sandbox)
        try:
            await sandbox.begin(frozen)
        except BaseException:
            await sandbox.close()
            raise
        if spare:
            self.spares.restock()
        return sandbox


def variables(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment variables of an image's containers (pure)."""
    return dict(entry.split("=", 1) for entry in config.get("Env") or () if "=" in entry)


def _image(spec: EnvironmentSpec) -> str:
    if spec.image is None:
        raise SpecError('the container driver needs an image: name one in the spec, such as "image": "debian:12".')
    if spec.base != "host":
        raise SpecError("the container driver has images, not bases: remove `base` from the spec.")
    return spec.image
