"""Images as directories that sandboxes have as their lower layers.

An image of the daemon's comes in one of two ways. Where Docker keeps its layers as directories that fit
(`docker_layers`), they are used in place: nothing is copied, and a container that is never started keeps them. Any
other image is saved by the daemon and unpacked, as an image in a file is. Both ways show the same files.

What is in the folder:

    sha256-<id>          the files of an image; `sha256-<id>.digest` is a digest of them
    sha256-<id>.json     its configuration
    root                 an empty directory, the topmost of Docker's layers: it gives the root the same time everywhere
    pins                 exists once a container keeps an image for this folder
    *.part               something unfinished, which `open` removes
"""

import contextlib
import hashlib
import json
import logging
import os
import re
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from sandboxes.errors import SandboxError, SpecError
from sandboxes.host.source_digest import raise_machine_error
from sandboxes.images import docker_layers
from sandboxes.images.archives import ImageArchive, require_platform
from sandboxes.images.built_trees import BuiltTrees
from sandboxes.images.config import ImageConfig, ImageError
from sandboxes.images.daemon import DaemonImage, ImageDaemon
from sandboxes.linux import syscalls as kernel
from sandboxes.linux.files import write_whole
from sandboxes.linux.plain_paths import open_plain
from sandboxes.rights import held

_log = logging.getLogger(__name__)

_ID = re.compile(r"sha256:[0-9a-f]{64}")
_ID_CHARS = len("sha256:") + 64


@dataclass(frozen=True, slots=True)
class Image:
    """An image that sandboxes can use."""

    id: str  # `sha256:` and the digest that Docker knows it by; equal ids have equal files.
    config: ImageConfig
    # Its directories, topmost first. The caller looks whether they exist before it mounts them.
    lowers: tuple[str, ...]


class ImageStore:
    """The images of one folder, which all tasks share. Methods block: call them in a thread."""

    def __init__(self, folder: Path, *, in_place: bool = True) -> None:
        """Name the folder, which the caller has locked; `in_place` needs the right to read overlayfs' marks."""
        self._folder, self._in_place = folder, in_place and kernel.holds(kernel.CAP_SYS_ADMIN)
        self._trees = BuiltTrees(folder)
        self.daemon = ImageDaemon()
        # What `docker_layers` says of the layers that this process has looked at.
        self._obstacles: dict[tuple[str, ...], str] = {}
        # How many images are being made, and which were returned since the last `collect`: their users may not be known
        # to its caller yet.
        self._resolving, self._recent = 0, set[str]()
        self._changing = threading.Lock()

    @property
    def empty(self) -> str:
        """An empty directory."""
        return str(self._folder / "root")

    def open(self) -> None:
        """Make the folder, and remove what a killed process left unfinished."""
        self._trees.open()
        self._trees.make("root", lambda target: os.utime(target, (0, 0)))

    def close(self) -> None:
        """Close the connections to the daemon. The images stay."""
        self.daemon.close()

    def resolve(self, name: str, *, below: str = "") -> Image:
        """Return an image; unpack it if that is necessary: some seconds for a gigabyte.

        The name is an unpacked image's id, the name or id of an image of the daemon's, or the absolute path, without
        links, of a file or directory (`sources.SourceRules.real`). All files are below `below`, such as
        `.services/web`. SpecError: there is no such image, or it cannot be used. OSError: the machine is short of
        memory, descriptors or disk.
        """
        with self._in_use():
            with _errors_of(name):
                image = self._unpacked(name, below) or (
                    self._archived(name, below) if name.startswith("/") else self._docker_image(name, below)
                )
            self._recent.add(image.id)
            return image

    def describe(self, name: str) -> tuple[str, ImageConfig]:
        """Return the id and the configuration of an image; see `resolve`. None of the daemon's is unpacked."""
        if name.startswith("/"):
            image = self.resolve(name)
            return image.id, image.config
        with _errors_of(name):
            found = self.daemon.image(name)
            return found.id, ImageConfig.parse(found.config)

    @contextlib.contextmanager
    def _in_use(self) -> Iterator[None]:
        """Let `collect` remove nothing meanwhile."""
        with self._changing:
            self._resolving += 1
        try:
            yield
        finally:
            with self._changing:
                self._resolving -= 1

    def collect(self, keep: set[str]) -> None:
        """Remove images and containers that are neither kept nor returned since the last call."""
        with self._changing:
            if self._resolving:
                return
            keep, self._recent = keep | self._recent, set()
            for config in self._folder.glob("sha256-*.json"):
                if config.stem[:_ID_CHARS].replace("-", ":") not in keep:
                    # The configuration last: a kill in between leaves it for the next call.
                    self._trees.forget(config.stem)
                    config.unlink()
            # A daemon that is away is asked again by the next call.
            with contextlib.suppress(SandboxError):
                self._unpin(keep)

    def _unpin(self, keep: set[str]) -> None:
        if not (self._folder / "pins").exists():
            return
        for pin in self.daemon.pins(socket.gethostname()):
            is_own = pin.owner == str(self._folder)
            if pin.image not in keep if is_own else not Path(pin.owner).exists():
                self.daemon.unpin(pin.name)

    # -- where an image comes from -----------------------------------------------------------------------------------

    def _unpacked(self, id_: str, below: str) -> Image | None:
        name = _folder_name(id_, below)
        config = self._folder / f"{name}.json"
        if not _ID.fullmatch(id_) or not config.exists() or not self._trees.is_intact(name):
            return None
        return Image(id_, ImageConfig.parse(json.loads(config.read_bytes())), (str(self._folder / name),))

    def _archived(self, path: str, below: str) -> Image:
        with open_plain(path) as opened, ImageArchive(opened) as archive:
            return self._made(archive.id, archive.config, archive.unpack, below)

    def _docker_image(self, name: str, below: str) -> Image:
        found = self.daemon.image(name)
        if not _ID.fullmatch(found.id):
            raise ImageError(f"Docker's id of it is {found.id!r}")
        require_platform(found.platform)
        config = ImageConfig.parse(found.config)
        if not below and self._fits(found):
            return Image(found.id, config, (self.empty, *found.layers))

        def unpack(target: Path) -> None:
            # Not unpacked while it comes: the order of its layers is at its end.
            with tempfile.TemporaryFile(dir=self._folder) as file:
                self.daemon.save(found.id, cast("BinaryIO", file))
                file.flush()
                with ImageArchive(Path(f"/proc/self/fd/{file.fileno()}")) as archive:
                    archive.unpack(target)

        return self._made(found.id, config, unpack, below)

    def _made(self, id_: str, config: ImageConfig, unpack: Callable[[Path], None], below: str) -> Image:
        name = _folder_name(id_, below)

        def build(target: Path) -> None:
            (target / below).mkdir(parents=True, exist_ok=True)
            held.give_to_root(target)
            unpack(target / below)
            for above in Path(below).parents:
                # Those that the image does not have: the same everywhere.
                os.utime(target / above, (0, 0))
            write_whole(self._folder / f"{name}.json", json.dumps(config.members()).encode(), sync=True)

        return Image(id_, config, (str(self._trees.make(name, build, checked=True)),))

    def _fits(self, found: DaemonImage) -> bool:
        if not self._in_place or not found.layers or docker_layers.first_missing(found.layers) is not None:
            return False
        folder = hashlib.blake2b(os.fsencode(self._folder), digest_size=6).hexdigest()
        pin = f"forkpoint-pin-{folder}-{found.id.removeprefix('sha256:')[:12]}"
        (self._folder / "pins").touch()
        # Each time, because others may have removed it. Before the look: what is looked at must stay.
        self.daemon.pin(found.id, pin, str(self._folder), socket.gethostname())
        if docker_layers.first_missing(found.layers) is not None:
            return False
        if (obstacle := self._obstacles.get(found.layers)) is None:
            obstacle = self._obstacles[found.layers] = docker_layers.obstacle(found.layers)
        if obstacle:
            _log.info("image %s is copied, because the layers that Docker has of it do not fit: %s", found.id, obstacle)
            self.daemon.unpin(pin)
        return not obstacle


def _folder_name(id_: str, below: str) -> str:
    return id_.replace(":", "-") + below.replace("/", "-")


@contextlib.contextmanager
def _errors_of(name: str) -> Iterator[None]:
    try:
        yield
    except (ImageError, OSError) as error:
        raise_machine_error(error)
        raise SpecError(
            f"image {name!r} cannot be used: {error}. Name an image that Docker has, or the file or directory of one."
        ) from error
