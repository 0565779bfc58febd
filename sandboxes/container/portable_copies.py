"""Export and import of frozen states of the `container` driver; see `sandboxes.portability`.

A state travels as two parts, both tars of `host.layer_tar`:

1. Its copy, with the digest that the copy must give at a restore.
2. Its image. The image that the spec names does not travel: the part says which one it is. What set-up changed of it is
   an image that only the exporting machine has, so the part holds this layer. At the first restore the driver lays it
   over the spec's image and commits the result.

An imported file is hostile. A part that was unpacked is packed again, and its digest must be the expected one. Paths of
hard links are those of files and directories that the tar itself has, so none leads out of the copy.
"""

import contextlib
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from sandboxes.container.daemon import Daemon
from sandboxes.container.keeper.copies import MOUNTED
from sandboxes.container.state_copies import StateCopies
from sandboxes.driver import FrozenState
from sandboxes.errors import NotFreezableError, SandboxError, SpecError, StateGoneError
from sandboxes.guest.files.scan import TRUSTED_MARKS
from sandboxes.host import layer_tar
from sandboxes.linux.files import remove_tree
from sandboxes.open_sandboxes import Holding
from sandboxes.portability import NotPortableError

FORM = layer_tar.TarForm("head", TRUSTED_MARKS)
"""The first member of a part's tar is JSON: the digest of a copy, or the image below an image."""

_FIELDS = {"copy", "image", "born_ns", "sessions", "pristine"}
_DIGEST, _IMAGE = re.compile(r"[0-9a-f]{64}"), re.compile(r"sha256:[0-9a-f]{64}")


def part_of(image: str) -> str:
    """Return the name of the part that holds an image (pure)."""
    return image.replace(":", "-")


@dataclass(frozen=True, slots=True)
class ImportedImage:
    """An image that was imported as the layer that it adds to another one.

    Attributes:
        base: The id of the image below.
        adds: Whether it adds anything; otherwise it is the image below.
    """

    base: str
    adds: bool


class CopyPorter:
    """A `Porter` of container states, whose parts are copies and the layers of images."""

    def __init__(self, states: StateCopies, daemon: Daemon, holding: Holding) -> None:
        """Work on the copies of one data directory and on the images of a daemon."""
        self._states, self._daemon, self._holding = states, daemon, holding

    def carries(self, kind: str) -> bool:
        """Return whether states of a kind are plain data: images of live processes fit only their machine's kernel."""
        return kind == "files"

    def pack(self, part: str) -> Iterator[bytes]:
        """Yield a part's canonical tar, in pieces."""
        if self._states.exists(part):
            return _packed(self._states.folder / part)
        return self._image(part.replace("-", ":", 1))

    def _image(self, image: str) -> Iterator[bytes]:
        try:
            base, layer = self._daemon.layer(image)
        except (SandboxError, SpecError) as error:
            raise NotFreezableError(f"image {image} cannot be read: {error}") from error
        head = _json({"base": base, "adds": layer is not None})
        if layer is not None:
            yield from layer_tar.pack(layer, head, FORM)
            return
        with tempfile.TemporaryDirectory() as folder:
            empty = Path(folder) / "diff"
            empty.mkdir(mode=0o700)
            # A fixed time, so that the part has the same bytes each time.
            os.utime(empty, (0, 0))
            yield from layer_tar.pack(Path(folder), head, FORM)

    @contextmanager
    def unpacking(self) -> "Iterator[CopyUnpacking]":
        """Import parts and states; nothing collects the parts before the end of the context."""
        with contextlib.ExitStack() as held:
            yield CopyUnpacking(self._states, lambda part: held.enter_context(self._holding((part,))))


class CopyUnpacking:
    """One import. Every part becomes a copy with a new name."""

    def __init__(self, states: StateCopies, hold: Callable[[str], None]) -> None:
        """Start with no parts.

        Args:
            states: The copies of one data directory.
            hold: Keeps a copy from being collected until the import ends.
        """
        self._states, self._hold = states, hold
        self._names: dict[str, str] = {}
        self._counted: set[str] = set()

    def part(self, name: str, data: BinaryIO, sha256: str) -> None:
        """Write one part. If the process is killed meanwhile, the next start removes it."""
        copy, folder = self._states.allocate()
        try:
            (folder / "diff").mkdir(parents=True)
            unpacked = layer_tar.unpack(data, folder, FORM, link=False)
            _check(unpacked.head, unpacked.links)
            meta = {
                **json.loads(unpacked.head),
                "links": _below_diff(unpacked.links),
                "added_bytes": 0,
                "sha256": sha256,
            }
            # Last, as the keeper does it: a copy without `meta.json` does not exist.
            (folder / "meta.json").write_bytes(_json(meta))
            require_intact(folder)
            # Held before it exists: a collection may run in between.
            self._hold(copy)
            self._states.keep(copy)
        except StateGoneError as error:
            remove_tree(folder)
            raise NotPortableError(str(error)) from error
        except BaseException:
            remove_tree(folder)
            raise
        self._names[name] = copy

    def state(self, frozen: FrozenState) -> FrozenState:
        """Return a state with the new names of its copy and its image."""
        payload = frozen.payload
        # A member too many could change what a restore does, so the set must be exact.
        if set(payload) != _FIELDS or not _plain(payload) or frozen.parts != _parts(payload):
            raise NotPortableError("its payload does not have the members of a container's state")
        if missing := [part for part in frozen.parts if part not in self._names]:
            raise NotPortableError(f"its part {missing[0]} was not imported")
        # Every name in the state is replaced, so a file from elsewhere cannot refer to a copy or image of this machine.
        copy, image = (self._names[part] for part in frozen.parts)
        if imported_image(self._states.folder / copy) or not imported_image(self._states.folder / image):
            raise NotPortableError("its parts are not a copy and an image")
        size = self._states.size_bytes({copy, image} - self._counted)
        self._counted |= {copy, image}
        return replace(frozen, payload={**payload, "copy": copy, "image": image}, parts=(copy, image), size_bytes=size)


def require_intact(folder: Path) -> None:
    """Check an imported copy against its tar; 1 s for some 300 MB.

    Raises:
        StateGoneError: Its files have another digest than the tar: the tar was not canonical, this machine's file
            system lost attributes, or something has changed them since.
    """
    digest = hashlib.sha256()
    try:
        for piece in _packed(folder):
            digest.update(piece)
    except (NotFreezableError, OSError) as error:
        raise StateGoneError(f"the imported copy cannot be read: {error}") from error
    if digest.hexdigest() != _meta(folder)["sha256"]:
        raise StateGoneError(
            "written here, its digest is another: the tar is not canonical, or this file system lost attributes"
        )


def imported_image(folder: Path) -> ImportedImage | None:
    """Return the image that was imported as a copy; None if the copy is that of a state."""
    meta = _meta(folder)
    return ImportedImage(meta["base"], meta["adds"]) if "base" in meta else None


def _packed(folder: Path) -> Iterator[bytes]:
    meta = _meta(folder)
    head: dict[str, Any] = {name: meta[name] for name in ("digest", "base", "adds") if name in meta}
    links = {f"diff/{path}": f"diff/{first}" for path, first in meta["links"].items()}
    return layer_tar.pack(folder, _json(head), FORM, links)


def _meta(folder: Path) -> dict[str, Any]:
    meta: dict[str, Any] = json.loads((folder / "meta.json").read_bytes())
    return meta


def _json(value: dict[str, Any]) -> bytes:
    # The standard library's: names of files may be no UTF-8, which surrogates stand for.
    return json.dumps(value, separators=(",", ":"), sort_keys=True).encode()


def _below_diff(links: dict[str, str]) -> dict[str, str]:
    return {path.removeprefix("diff/"): first.removeprefix("diff/") for path, first in links.items()}


def _check(head: bytes, links: dict[str, str]) -> None:
    """Raise unless a tar's head and links are such as `_packed` writes."""
    try:
        value = orjson.loads(head) if len(head) < 1_000 else None
    except orjson.JSONDecodeError:
        value = None
    if not isinstance(value, dict) or not (_is_copy(value) or _is_image(value)):
        raise NotPortableError("its head is neither that of a copy nor that of an image")
    # A restore makes the links in the container, where these directories are mounts that the copy does not have.
    for path in (*links, *links.values()):
        if path.split("/")[1] in MOUNTED:
            raise NotPortableError(f"{path!r} is a hard link where containers have mounts")


def _is_copy(value: dict[str, Any]) -> bool:
    digest = value.get("digest")
    return set(value) == {"digest"} and isinstance(digest, str) and bool(_DIGEST.fullmatch(digest))


def _is_image(value: dict[str, Any]) -> bool:
    base = value.get("base")
    is_named = isinstance(base, str) and bool(_IMAGE.fullmatch(base))
    return set(value) == {"base", "adds"} and is_named and isinstance(value["adds"], bool)


def _parts(payload: dict[str, Any]) -> tuple[str, ...]:
    return payload["copy"], part_of(payload["image"])


def _plain(payload: dict[str, Any]) -> bool:
    """Return whether the members of a payload have the types that `ContainerSandbox` writes."""
    return (
        isinstance(payload["copy"], str)
        and isinstance(payload["image"], str)
        and type(payload["born_ns"]) is int
        and isinstance(payload["sessions"], dict)
        and isinstance(payload["pristine"], dict | None)
    )
