"""Overlay layers on disk: each sandbox writes to an upper of its own, and freezing makes the upper a layer.

    uppers/<id>/diff, work          what a live sandbox writes; deleted with the sandbox
    layers/<id>/diff, meta.json     a frozen layer, never changed again
    layers/<id>/rows                the table of what the layer changes of the root state (`guest.files.row_table`)
    layers/<id>/table               instead of `rows`: a complete table, of all that its state changes

Ids are random and never used twice. A layer exists if and only if it has `meta.json`. So freezing writes `meta.json`
last, and deleting removes it first; `open` removes what a crash left in between.
"""

import asyncio
import contextlib
import hashlib
import json
import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from sandboxes.errors import NotFreezableError
from sandboxes.guest.files import delta, manifest, row_table
from sandboxes.guest.files.manifest import Manifest
from sandboxes.ipc.state_messages import Links
from sandboxes.linux import trees
from sandboxes.linux.descriptors import Opened
from sandboxes.linux.file_copy import copy_facts
from sandboxes.linux.file_flags import copy_flags, spread_below
from sandboxes.linux.files import remove_tree, sync_path, write_file
from sandboxes.local.layer_merge import has_entry, lay_over
from sandboxes.local.layer_tables import LayerTables
from sandboxes.task_owner import TaskOwner

_log = logging.getLogger(__name__)

MAX_DEPTH = 24
"""Layers above the root state at which small ones are merged: a lookup costs 0.5 us for each layer and name."""

MERGE_BYTES = 64 << 20
"""Largest total size of layers that are merged: merging copies them while a call waits. The value is an estimate."""

_READY_UPPERS = 8
"""How many are made ahead, of which half may be gone before more are made. With fewer, calls of a burst make theirs
themselves. The value is an estimate."""
_PAUSE_S = 0.01
"""How long after one was taken more are made: after the steps of the call that has taken it."""

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class Upper(NamedTuple):
    """A directory that one live sandbox writes to: of its `diff` and `work`. The id will be its layer's."""

    id: str
    folder: str

    @property
    def path(self) -> Path:
        """The directory of its `diff` and `work`."""
        return Path(self.folder)

    @property
    def diff(self) -> str:
        """The directory of what the sandbox writes."""
        return f"{self.folder}/diff"

    @property
    def work(self) -> str:
        """The directory that overlayfs needs beside it."""
        return f"{self.folder}/work"


class LayerMeta(NamedTuple):
    """What is known of a layer besides its files: bytes on disk, and the digests by which damage of them is noticed."""

    size_bytes: int
    manifest: Manifest
    links: Links  # Whether some of its paths are hard links to one file.


class Layers:
    """The layers of one data directory. Methods block, for microseconds unless they say otherwise."""

    def __init__(self, data_dir: Path) -> None:
        self.uppers = data_dir / "uppers"
        self.frozen = data_dir / "layers"
        self.intact: set[str] = set()  # The layers that are known to be as they were frozen; see `layer_check`.
        self._known: dict[str, tuple[int, Links]] = {}
        # Texts and not paths for what each call needs: putting a `Path` together takes 5 us, as long as a system call.
        self._layers = f"{self.frozen}/"
        self.tables = LayerTables(self._layers)

    def open(self) -> None:
        """Make the directories; remove uppers of dead sandboxes and half-deleted layers, as far as it can be done."""
        for folder in (self.uppers, self.frozen):
            folder.mkdir(parents=True, exist_ok=True)
        # Each changing call makes ten files below its upper and removes half of them again.
        spread_below(str(self.uppers))
        # The driver's lock is held, so each upper here belongs to a sandbox whose processes are dead.
        left = [*self.uppers.iterdir()]
        left += [layer for layer in self.frozen.iterdir() if not (layer / "meta.json").exists()]
        for folder in left:
            if not remove_tree(folder):
                _log.warning("%s cannot be removed, and is left as it is", folder)

    def allocate(self) -> Upper:
        """Return a fresh, empty upper."""
        upper = Upper(name := os.urandom(8).hex(), f"{self.uppers}/{name}")
        # overlayfs needs `work` on the same file system as the upper (overlayfs.rst).
        for folder in (upper.folder, upper.diff, upper.work):
            os.mkdir(folder)  # noqa: PTH102 - see `_layers`
        # The mode of the upper directory is the mode of the sandbox's root.
        os.chmod(upper.diff, 0o755)  # noqa: PTH101, S103
        return upper

    def freeze(self, upper: Upper, meta: LayerMeta, table: bytes) -> str:
        """Make an upper a layer; return its id. A sandbox may have it mounted, but must not write to it any more."""
        self.place(upper, meta, table)
        self.describe(upper.id, meta, table)
        return upper.id

    def place(self, upper: Upper, meta: LayerMeta, table: bytes, *, apart: bool = False) -> None:
        """Put an upper where its layer will be, so that it can be mounted as such; `describe` completes it."""
        # `apart` moves its files out of the directory that some sandbox has mounted, and so below an overlay with an
        # index; see `syscalls.overlay`.
        if apart:
            _move_apart(upper)
        complete = row_table.RowTable(memoryview(table)).complete
        write_file(f"{upper.folder}/{'table' if complete else 'rows'}", table)
        os.rename(upper.folder, self._layers + upper.id)  # noqa: PTH104
        # A layer never changes, so what is known of it is read from the disk at most once.
        self._known[upper.id] = meta.size_bytes, meta.links

    def describe(self, layer: str, meta: LayerMeta, table: bytes) -> None:
        """Write what is known of a layer that was placed. From then on it exists."""
        stored = {
            "size_bytes": meta.size_bytes, "stats": meta.manifest.stats.hex(), "contents": meta.manifest.contents.hex(),
            "rows": hashlib.sha256(table).hexdigest(), **({"links": meta.links} if meta.links else {}),
        }  # fmt: skip
        write_file(f"{self._layers}{layer}/meta.json", json.dumps(stored, separators=(",", ":")).encode())
        self.intact.add(layer)

    def lowers(self, ids: Sequence[str]) -> list[str]:
        """Return the directories of layers, for a mount."""
        return [f"{self._layers}{layer}/diff" for layer in ids]

    def missing(self, ids: Sequence[str]) -> list[str]:
        """Return the ids that name no layer, or one that was deleted."""
        return [layer for layer in ids if not os.path.exists(f"{self._layers}{layer}/meta.json")]  # noqa: PTH110

    def meta(self, layer: str) -> dict[str, Any]:
        """Return what was stored with a layer; see `freeze`."""
        meta: dict[str, Any] = json.loads((self.frozen / layer / "meta.json").read_bytes())
        return meta

    def size_bytes(self, layer: str) -> int:
        """Return the bytes that a layer occupies; 0 if that cannot be read, so that no state can use it."""
        return (self._known.get(layer) or self._read_facts(layer))[0]

    def links(self, ids: Iterable[str]) -> Links:
        """Return what kind of hard links the layers have; `other` if one of them has such."""
        known = self._known
        kinds = {(known.get(layer) or self._read_facts(layer))[1] for layer in ids}
        return "other" if "other" in kinds else "regular" if "regular" in kinds else ""

    def _read_facts(self, layer: str) -> tuple[int, Links]:
        """Return the size and the kind of hard links of a layer; 0 and none if that cannot be read."""
        try:
            meta = self.meta(layer)
            self._known[layer] = int(meta["size_bytes"]), meta.get("links", "")
        except (OSError, ValueError, KeyError, TypeError):
            return 0, ""
        return self._known[layer]

    def all(self) -> set[str]:
        """Return the ids of all layers."""
        return {path.name for path in self.frozen.iterdir()}

    def disown(self, ids: Iterable[str]) -> None:
        """Make layers that will be deleted missing from now on."""
        for layer in ids:
            with contextlib.suppress(FileNotFoundError):
                (self.frozen / layer / "meta.json").unlink()

    def detach(self, ids: Iterable[str]) -> list[Path]:
        """Make layers missing from now on; return the directories that the caller has to remove."""
        ids = list(ids)
        # meta.json first: after a crash in between, `open` recognizes a layer as half deleted.
        self.disown(ids)
        for layer in ids:
            self._known.pop(layer, None)
            self.intact.discard(layer)
        return [self.frozen / layer for layer in ids]

    def sync(self, ids: Iterable[str]) -> None:
        """Wait until layers are on disk, which takes from 1 ms to minutes, depending on their size."""
        for layer in ids:
            with contextlib.ExitStack() as opened:
                top = os.open(self.frozen / layer / "diff", _FOLDER)
                opened.callback(os.close, top)
                paths = []
                for folder in trees.folders(top):
                    paths.append(folder.path)
                    for entry in folder.entries:
                        if entry.is_file(follow_symlinks=False):
                            sync_path(entry.name, within=folder.fd)
                # Files before their directory: a directory's entries must not point to files that are not on disk yet.
                # fsync of a file does not write its directory's entry (fsync(2)), so directories are synced as well.
                for path in reversed(paths):
                    sync_path(f"./{path}", within=top)
                rows = "../table" if self.tables.is_complete(layer) else "../rows"
                for name in (rows, "../meta.json", ".."):
                    sync_path(name, within=top)

    def merge(self, ids: Sequence[str], upper: Upper) -> str:
        """Merge layers, the topmost first, into one that replaces them all, made of an empty upper; return its id."""
        # Files are copied, not hard-linked: a hard link would change the link counts that `ls -l` shows.
        tables = [row_table.RowTable(memoryview(self.tables.of(layer))) for layer in ids]
        folders = [self.frozen / layer / "diff" for layer in ids]
        topmost: dict[str, int] = {}
        for number, changed in enumerate(tables):
            for place in range(len(changed)):
                topmost.setdefault(os.fsdecode(changed.path(place)), number)

        def is_replaced(number: int, path: str) -> bool:
            # An agent often changes one file again and again. Only its last content is copied.
            above = topmost.get(path, number)
            return above < number and has_entry(folders[above], path)

        # From the lowest to the topmost, so that later layers win as they do in the mount.
        for number in reversed(range(len(folders))):
            lay_over(folders[number], upper.path / "diff", partial(is_replaced, number))
        rows = row_table.in_order(row_table.merged(tables))
        # The topmost layer's sums are those of the state.
        table = row_table.pack(rows, tables[0].content, tables[0].order, complete=False)
        with Opened(os.open(upper.diff, _FOLDER)) as top:
            # Not the sum: what was written again and again is there once.
            size_bytes = delta.size_bytes(top)
        manifest = read_manifest(upper.path, contents=True)
        return self.freeze(upper, LayerMeta(size_bytes, manifest, self.links(ids)), table)


class ReadyUppers:
    """Uppers that are made before they are needed: making one takes half a millisecond, while a call waits."""

    def __init__(self, make: Callable[[], Upper], background: TaskOwner) -> None:
        """Begin with none. `make` is also called in threads."""
        self._make, self._background = make, background
        self._ready: deque[Upper] = deque()
        self._filling: asyncio.Task[None] | None = None
        self._closed = False

    def take(self) -> Upper:
        """Return a fresh upper: one that is ready, or a new one."""
        if len(self._ready) <= _READY_UPPERS // 2 and self._filling is None and not self._closed:
            self._filling = self._background.spawn("make uppers", self._fill())
        return self._ready.popleft() if self._ready else self._make()

    async def _fill(self) -> None:
        await asyncio.sleep(_PAUSE_S)
        # In a thread, because hits wait for the event loop, and making them waits for the disk at times.
        self._ready += await asyncio.to_thread(self._several, _READY_UPPERS - len(self._ready))
        self._filling = None

    def _several(self, count: int) -> list[Upper]:
        made: list[Upper] = []
        # Whoever needs one then meets the failure himself, and reports it.
        with contextlib.suppress(OSError):
            for _ in range(count):
                made.append(self._make())  # noqa: PERF401 - those before a failure are kept
        return made

    async def close(self) -> list[Upper]:
        """Make none ahead from now on; return those that are left, which the caller has to remove."""
        self._closed = True
        if self._filling is not None:
            await asyncio.wait([self._filling])
        left, self._ready = [*self._ready], deque()
        return left


def _move_apart(upper: Upper) -> None:
    """Move an upper's files into a new directory, and remove overlayfs' index of them, which has a name of each."""
    # A sandbox still has the old directory mounted, but runs nothing that could look.
    mounted = f"{upper.folder}/mounted"
    os.rename(upper.diff, mounted)  # noqa: PTH104
    os.mkdir(upper.diff, 0o700)  # noqa: PTH102
    with contextlib.ExitStack() as opened:
        source, target = (os.open(path, _FOLDER) for path in (mounted, upper.diff))
        opened.callback(os.close, source)
        opened.callback(os.close, target)
        status = os.fstat(source)
        for name in os.listdir(source):  # noqa: PTH208
            os.rename(name, name, src_dir_fd=source, dst_dir_fd=target)
        copy_flags(source, target)
        copy_facts(".", status, source, target)
    os.rmdir(mounted)  # noqa: PTH106
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(index := f"{upper.work}/index"):  # noqa: PTH208
            os.unlink(f"{index}/{name}")  # noqa: PTH108


def copy_upper(live: Upper, upper: Upper) -> None:
    """Copy what a live sandbox wrote into another upper; NotFreezableError if it is nested too deeply."""
    try:
        lay_over(live.path / "diff", upper.path / "diff")
    except trees.TreeTooDeepError as error:
        raise NotFreezableError(str(error)) from error


def copied(layers: Layers, layer: str, upper: Upper) -> str:
    """Make a copy of a layer, of an empty upper; return its id."""
    lay_over(layers.frozen / layer / "diff", upper.path / "diff")
    stored = layers.meta(layer)
    # As it was frozen, and not read again: a file that was damaged since then has to be found in the copy too.
    manifest = Manifest(bytes.fromhex(stored["stats"]), bytes.fromhex(stored["contents"]))
    meta = LayerMeta(layers.size_bytes(layer), manifest, layers.links([layer]))
    return layers.freeze(upper, meta, layers.tables.of(layer))


def drop(layers: Layers, ids: Iterable[str]) -> list[Path]:
    """Delete layers; milliseconds for a thousand files. Return the directories of which something is left."""
    return [path for path in layers.detach(ids) if not remove_tree(path)]


def undo(layers: Layers, uppers: Iterable[Upper]) -> None:
    """Delete uppers that were to become layers, whether or not they already have."""
    for upper in uppers:
        remove_tree(upper.path)
        drop(layers, [upper.id])


def mergeable(ids: Sequence[str], sizes: dict[str, int]) -> list[str]:
    """Return the longest run of neighbouring layers whose total size is at most `MERGE_BYTES` (pure)."""
    # A layer without a size is not merged. The run is empty if no two neighbours are small enough.
    best: list[str] = []
    run: list[str] = []
    total = 0
    for layer in ids:
        # An unknown size counts as the maximum, so the layer is not merged with a neighbour that holds anything.
        size = sizes.get(layer, MERGE_BYTES)
        if total + size > MERGE_BYTES:
            run, total = [], 0
        if size <= MERGE_BYTES:
            run.append(layer)
            total += size
        if len(run) > len(best):
            best = list(run)
    return best if len(best) > 1 else []


def read_manifest(layer: Path, *, contents: bool, known: Mapping[str, bytes] = MappingProxyType({})) -> Manifest:
    """Return the manifest of a layer's files; see `manifest.of_tree`."""
    with Opened(os.open(layer / "diff", _FOLDER)) as top:
        return manifest.of_tree(top, contents=contents, known=known)
