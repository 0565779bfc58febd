"""Bases: the root file systems below all layers, each with a digest that identifies it.

A base is the host itself ("host", see `host_base`), a directory, a tarball, which is unpacked once, or an image. Under
each of the others lies the *skeleton*, a layer with the directories that every root needs as mount points. Over an
image lies its *dress*, which holds what a container runtime adds (`image_dress`).
"""

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from sandboxes.errors import SpecError
from sandboxes.guest import users
from sandboxes.host.root_states import root_key
from sandboxes.host.source_digest import SourceDigests, raise_machine_error
from sandboxes.host.source_watch import Watched
from sandboxes.images import root_tar
from sandboxes.images.built_trees import BuiltTrees
from sandboxes.images.config import ImageConfig, ImageError
from sandboxes.images.docker_layers import first_missing
from sandboxes.images.store import Image, ImageStore
from sandboxes.ipc.launch_messages import ServiceMounts
from sandboxes.linux.plain_paths import open_plain
from sandboxes.linux.spawn import BASH
from sandboxes.local import host_base as hostbase
from sandboxes.local import image_dress
from sandboxes.local.lower_view import has_file, lines_of
from sandboxes.local.service_commands import SERVICES
from sandboxes.local.services import mounts_of
from sandboxes.sources import SourceRules
from sandboxes.spec import EnvironmentSpec


@dataclass(frozen=True, slots=True)
class Base:
    """A base."""

    identity: str  # What it is, and a digest of its content.
    lowers: tuple[str, ...]  # Its directories, the topmost first; at least two.
    binds: tuple[str, ...] = ()  # Directories of the host that a sandbox sees read-only, at their own paths.
    hidden: tuple[str, ...] = ()  # Paths in these directories that a sandbox must not see.
    foreign: tuple[str, ...] = ()  # Those of its directories that another program keeps, and may remove.
    own_bash: bool = True  # Whether it has a bash. Otherwise sandboxes have one of this machine's.
    images: tuple[str, ...] = ()  # The ids of the images that it has files of.
    image: ImageConfig | None = None  # The configuration of the main image; None for a base that is none.
    user: str = ""  # The user of its sandboxes; empty for a root with the usual home and no further groups.
    hostname: str = "sandbox"
    services: ServiceMounts = ServiceMounts([], [])  # noqa: RUF009 - a frozen value
    service_images: Mapping[str, ImageConfig] = field(default_factory=dict)
    bare: tuple[str, ...] = ()  # Those of its directories that the spec names, without services; none for the host.

    def completed(self, spec: EnvironmentSpec) -> EnvironmentSpec:
        """Return a spec with the working directory that it leaves to its image."""
        if spec.workdir is not None or self.image is None:
            return spec
        return spec.model_copy(update={"workdir": self.image.workdir or "/"})

    def image_config(self, spec: EnvironmentSpec) -> ImageConfig:
        """Return the configuration of an image of a spec's states."""
        config = self.image or ImageConfig()
        environment = {**config.environment, **spec.env}
        return replace(config, environment=environment, workdir=self.completed(spec).directory)

    def removed(self) -> str | None:
        """Return a directory that the program that kept it has removed; microseconds."""
        return first_missing(self.foreign)


class Bases:
    """The bases of one data directory, each built once. Methods block: run them in a thread."""

    def __init__(
        self, data_dir: Path, images: ImageStore, *, privileged: bool, rules: SourceRules | None = None
    ) -> None:
        """Name the directories; `open` makes them. The rules' private paths are hidden where the host is the base."""
        self._data = data_dir
        self._folder = data_dir / "bases"
        self._trees, self._images = BuiltTrees(self._folder), images
        # Where the launcher, in its own mounts only, has the host's root, at `root` below it.
        self.host_view = data_dir / "host"
        self._privileged = privileged
        self._rules = rules or SourceRules()
        # Those that lie where the host base shows nothing need no hole.
        self._hidden = sorted({path for path in (data_dir, *self._rules.private) if hostbase.in_sight(path)})
        self.sources = SourceDigests()
        # The host is looked at again only after inotify has reported something.
        self._host_fingerprint = Watched(hostbase.fingerprint)
        self._known: dict[str, Base] = {}
        self._former: dict[str, set[str]] = {}

    def open(self) -> None:
        """Make the directories, and remove bases that a killed process left half built."""
        self._trees.open()
        self.host_view.mkdir(exist_ok=True)
        # The number is part of the name, so that a changed skeleton gets another directory and old states keep theirs.
        self._trees.make("skeleton-2", hostbase.skeleton)

    def base(self, spec: EnvironmentSpec) -> Base:
        """Return the base of a spec, as `refresh` last saw it."""
        known = self._known.get(name := name_of(spec))
        if known is None:
            return self.refresh(spec)
        if name == "host":
            # Its mask hides what not everybody may read, so a new secret of the host needs a new mask.
            return known if self._host_fingerprint.known() is not None else self.refresh(spec)
        if spec.image is not None and first_missing(known.lowers) is not None:
            # Nothing has used it for a while, or Docker has removed it.
            return self.refresh(spec)
        # The known base, not a fresh look: the caller has just compared its identity, or compares it afterwards. Only
        # what the spec may name is looked at again.
        self._require_allowed(spec)
        return known

    def known(self, spec: EnvironmentSpec) -> str | None:
        """Return the identity of a base if it is certainly unchanged since `refresh`; microseconds, no blocking."""
        name = name_of(spec)
        # The name of an image may stand for another image by now.
        if spec.image is not None or (base := self._known.get(name)) is None:
            return None
        content = self._host_fingerprint.known() if name == "host" else self.sources.known(name)
        return None if content is None else base.identity

    def frozen(self, spec: EnvironmentSpec, identity: str) -> Base | None:
        """Return the base on which a state was frozen, or what a rollout would see of it now; None if it is gone."""
        kind, _, digest = identity.partition(":")
        # Only what this name has meant: an imported state could name any tarball that another task uses.
        former = identity in self._former.get(name_of(spec), ())
        if kind == "tar" and former and (self._folder / f"tar-{digest}").is_dir():
            self._require_allowed(spec)
            return self._base(identity, (str((self._folder / f"tar-{digest}").resolve()), self._skeleton))
        base = self.base(spec)
        is_host = kind == base.identity.partition(":")[0] and kind.startswith("host")
        return base if is_host or base.identity == identity else None

    def _require_allowed(self, spec: EnvironmentSpec) -> None:
        if (path := path_of(spec)) is not None:
            self._rules.real(path, confined=spec.confined)

    def close(self) -> None:
        """End all watches."""
        self._host_fingerprint.close()
        self.sources.directories.close()

    def refresh(self, spec: EnvironmentSpec) -> Base:
        """Return the base of a spec as it is now. `SpecError` is the spec's fault, `OSError` the machine's."""
        name = name_of(spec)
        try:
            if spec.image is not None:
                base = self._of_image(spec)
            elif name == "host":
                base = self._host()
            else:
                base = self._named(Path(name), confined=spec.confined)
        except (OSError, ImageError) as error:
            # A full disk is the machine's fault and stays an OSError; only the rest is the spec's.
            raise_machine_error(error)
            raise SpecError(
                f"base {name!r} cannot be used: {error}. Name a directory or tarball that this proxy can read."
            ) from error
        self._known[name] = base
        self._former.setdefault(name, set()).add(base.identity)
        return base

    def _of_image(self, spec: EnvironmentSpec) -> Base:
        assert spec.image is not None
        image = self._image(spec, spec.image)
        services = {
            name: self._image(spec, service.image, below=f"{SERVICES}/{name}".lstrip("/"))
            for name, service in sorted(spec.services.items())
        }
        lowers = (*(lower for service in services.values() for lower in service.lowers), *image.lowers)
        volumes = [path.strip("/") for path in image.config.volumes]
        for name, service in services.items():
            volumes += [f"{SERVICES}/{name}/{path}".strip("/") for path in service.config.volumes]
        identity = "image:" + " ".join([image.id, *(f"{name}={service.id}" for name, service in services.items())])
        dress = image_dress.Dress(hostname_of(spec, image.id), tuple(services), spec.aliases, tuple(volumes))
        digest = hashlib.blake2b(f"{identity} {dress}".encode(), digest_size=16).hexdigest()
        layer = self._trees.make(f"dress-2-{digest}", lambda target: image_dress.build(dress, lowers, target))
        return Base(
            identity, (str(layer), *lowers), own_bash=has_file(image.lowers, BASH),
            images=(image.id, *(service.id for service in services.values())), image=image.config,
            foreign=tuple(lower for lower in lowers if not Path(lower).is_relative_to(self._data)),
            user=image.config.user or _root_user(image.lowers), hostname=dress.hostname, services=mounts_of(spec),
            service_images={name: service.config for name, service in services.items()}, bare=image.lowers,
        )  # fmt: skip

    def _image(self, spec: EnvironmentSpec, name: str, below: str = "") -> Image:
        known = self._rules.real(name, confined=spec.confined) if name.startswith("/") else name
        return self._images.resolve(known, below=below)

    def _host(self) -> Base:
        # If sandboxes would see files of the proxy's own, these are hidden, and their paths become part of the
        # identity. Otherwise the identity is the same on equal hosts, so that trees can be moved between them.
        hole = b"\0".join(os.fsencode(path) for path in self._hidden)
        identity = hashlib.blake2b(self._host_fingerprint.value() + hole, digest_size=16).hexdigest()
        if self._privileged:
            # Over the host's root: whiteouts in the mask hide what sandboxes must not see.
            mask = self._trees.make(f"mask-2-{identity}", lambda target: hostbase.build_mask(target, self._hidden))
            return Base(f"host:{identity}", (str(mask), str(self.host_view / "root")))
        copy = self._trees.make(f"host-2-{identity}", lambda target: hostbase.build_copy(target, self._hidden))
        # The kernel refuses an overlay of `/` in a user namespace, so these directories come as bind mounts.
        binds = tuple(folder for folder in hostbase.BOUND if Path(folder).is_dir())
        return Base(f"host-user:{identity}", (str(copy), self._skeleton), binds, tuple(map(str, self._hidden)))

    @property
    def _skeleton(self) -> str:
        return str(self._folder / "skeleton-2")

    def _named(self, name: Path, *, confined: bool) -> Base:
        real = Path(self._rules.real(name, confined=confined))
        # Opened once: the digest, the content and the check for bash are of the same directory or file.
        with open_plain(real) as path:
            if not path.is_dir():
                digest = self.sources.of_file(path, name=str(name))
                folder = self._trees.make(f"tar-{digest}", lambda target: root_tar.unpack(path, target), checked=True)
                return self._base(f"tar:{digest}", (str(folder.resolve()), self._skeleton))
            # A directory is used in place, so it may change at any time.
            identity = f"directory:{self.sources.of_directory(path, name=str(name), real=str(real))}"
            own_bash = has_file((str(path),), BASH)
        # The launcher opens it by this path again, without following links.
        return Base(identity, (str(real), self._skeleton), own_bash=own_bash, bare=(str(real),))

    def _base(self, identity: str, lowers: tuple[str, ...]) -> Base:
        return Base(identity, lowers, own_bash=has_file(lowers, BASH), bare=lowers[:1])


def _root_user(lowers: Sequence[str]) -> str:
    """Return what names an image's root: nothing, or 0 if its files give root another home, or further groups."""
    passwd, group = (lines_of(lowers, f"etc/{name}") for name in ("passwd", "group"))
    return "" if users.resolve("", passwd, group) == users.ROOT else "0"


def name_of(spec: EnvironmentSpec) -> str:
    """Return the name of a spec's base: the same for equal bases of one proxy (pure)."""
    if spec.image is None:
        return spec.base
    # The dress is of the spec too.
    return f"image {spec.image} {hostname_of(spec, spec.image)}"


def path_of(spec: EnvironmentSpec) -> str | None:
    """Return the path that a spec names its base by; None for the host and for an image's name (pure)."""
    if spec.image is not None:
        return spec.image if spec.image.startswith("/") else None
    return None if spec.base == "host" else spec.base


def hostname_of(spec: EnvironmentSpec, image: str) -> str:
    """Return the host name of a spec's sandboxes: twelve hexadecimal digits, as Docker gives, equal in all of them."""
    return spec.hostname or root_key(spec, image)[:12]
