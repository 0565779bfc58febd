"""What an upper directory changes: its rows, kept up to date at the cost of what changed since the last look."""

# Theory of operation.
#
# Three directories are compared, by descriptor, because the paths are under the agent's control:
#   upper  what the sandbox has written since its last layer;
#   lower  what lies below it, which upper hides entry by entry;
#   root   the root state.
# overlayfs marks two special cases in upper: a character device 0/0 is a *whiteout* (the path is gone), and the opaque
# attribute on a directory hides everything below it.
#
# `update` takes the signature (`stat`) of each entry in upper. Only entries with another signature than at the last
# look are read. Each gets a row that says in what it differs from the root state. Some paths get a row without an entry
# of their own in upper (*implied* rows): what a whiteout or a new directory hides of the layers below.
#
# All operations tolerate entries that vanish in between: running processes go on writing.

import contextlib
import os
import stat
import struct
import time
from typing import NamedTuple

from sandboxes.guest.files import facts, link_groups
from sandboxes.guest.files.delta import DeltaRoots, bytes_on_disk
from sandboxes.guest.files.manifest import OPAQUE, Item, Manifest, of_items
from sandboxes.guest.files.row_table import CLOCKED, FIXED, GONE, Row
from sandboxes.guest.files.state_rows import StateRows
from sandboxes.linux import trees
from sandboxes.linux.descriptors import Opened
from sandboxes.linux.file_copy import MARKS, is_opaque, is_whiteout

_FINE_TIMES = tuple(int(number) for number in os.uname().release.split("-")[0].split(".")[:2]) >= (6, 13)
# Before Linux 6.13, a change within the same tick of the clock as the last one may leave no trace in ctime.
_TICK_NS = 0 if _FINE_TIMES else 20_000_000

_SIGNATURE = struct.Struct("<QIIIIqqqq")
_LINKS = struct.Struct("<QI")
# Packed, because an upper directory may have a million entries: 80 bytes each instead of 300.


class _Entry(NamedTuple):
    row: Row | None
    content: bytes


class UpperScan:
    """The rows of one upper directory."""

    def __init__(self, born_ns: int) -> None:
        """Start with an empty upper directory. Times before the root state was made are not those of calls."""
        # The `stat` of each entry, by path; the empty path is the directory itself.
        self.signatures: dict[str, bytes] = {}
        self.touched: set[str] = set()  # The paths whose rows the last update may have changed.
        # The bytes on disk of the entries, each counted with `ENTRY_BYTES` at least, at the last update.
        self.size_bytes = 0
        self._born_ns = born_ns
        self._entries: dict[str, _Entry] = {}
        self._implied: dict[str, dict[str, Row | None]] = {}
        self._shared: dict[str, str] = {}

    @property
    def rows(self) -> dict[str, Row | None]:
        """The rows of the upper directory, implied ones included."""
        rows: dict[str, Row | None] = {}
        # What a deeper directory implies is closer to the truth than what one above it does.
        for above in sorted(self._implied):
            rows |= self._implied[above]
        rows |= {path: entry.row for path, entry in self._entries.items()}
        return rows

    def row(self, path: str, base: StateRows) -> Row | None:
        """Return the row of a path in the state of the upper directory over a base."""
        entry = self._entries.get(path)
        if entry is not None:
            return entry.row
        above = path
        while self._implied and above:
            above = above.rpartition("/")[0]
            if path in (implied := self._implied.get(above, {})):
                return implied[path]
        return base.get(path)

    @property
    def linked(self) -> list[str]:
        """The paths that are hard links to one file with others."""
        return sorted(self._shared)

    @property
    def links_regular(self) -> bool:
        """Whether these are regular files."""
        return all(stat.S_ISREG(_facts(self.signatures[path])[0]) for path in self._shared)

    # -- looking -----------------------------------------------------------------------------------------------------

    def update(self, roots: DeltaRoots, base: StateRows, top: int | None = None) -> bool:
        """Read what changed since the last look; return whether anything did."""
        # With the root directory of the sandbox as `top`, all names of a hard link are copied up once one was.
        before, self.touched = self.signatures, set()
        # Most calls write nothing. This takes a third of a walk.
        if len(before) == 1 and before.get("") == _signature(os.fstat(roots.upper), 0) and not os.listdir(roots.upper):  # noqa: PTH208
            return False
        now, self.size_bytes = _signatures(roots.upper)
        if now == before:
            return False
        changed = _changed(now, before)
        if top is not None and link_groups.copy_up_names(roots, top, changed, now):
            now, self.size_bytes = _signatures(roots.upper)
            changed = _changed(now, before)
        shared = _shared(now)
        # The path that stands for an inode may change without a change of the inode's other paths.
        changed |= {path for path in shared.keys() | self._shared.keys() if shared.get(path) != self._shared.get(path)}
        removed = before.keys() - now.keys()
        self.signatures, self._shared = now, shared
        for path in removed:
            self._entries.pop(path, None)
            self._forget_implied(path)
            self.touched.add(path)
        folders: dict[str, set[str]] = {}
        for path in changed & now.keys():
            if path:
                folders.setdefault(path.rpartition("/")[0], set()).add(path)
            if stat.S_ISDIR(_facts(now[path])[0]):
                folders.setdefault(path, set())
        fresh: dict[str, bool] = {"": False}
        # Directories before what is in them: what a directory hides is known before its entries are compared.
        for folder in sorted(folders):
            self._folder(folder, folders[folder], roots, base, fresh)
        return True

    def _folder(self, path: str, changed: set[str], roots: DeltaRoots, base: StateRows, fresh: dict[str, bool]) -> None:
        prefix = f"{path}/" if path else ""
        # Directories are named with a slash at the end below.
        opened = [trees.open_below(top, prefix) for top in roots]
        upper, lower, root = opened
        try:
            # A running process may have removed the directory since it was listed.
            if upper is None:
                return
            hidden = OPAQUE if path and is_opaque(upper) else b""
            if path not in fresh:
                # Without a directory below, everything in it is new.
                alone = lower is None or bool(hidden)
                fresh[path] = alone or self._is_fresh(path.rpartition("/")[0], roots, fresh)
            hides = fresh[path]
            self._entries[path] = _Entry(self._folder_row(path, upper, root), hidden)
            self.touched.add(path)
            if hides:
                self._hide(path, base)
                for name in [] if root is None else os.listdir(root):  # noqa: PTH208
                    if prefix + name not in self.signatures:
                        self._imply(path, prefix + name, Row(GONE))
            for entry in sorted(changed):
                # A running process may remove the entry between the listing and this line.
                with contextlib.suppress(FileNotFoundError):
                    self._entry(entry, upper, root, base)
        finally:
            for fd in opened:
                if fd is not None:
                    os.close(fd)

    def _is_fresh(self, path: str, roots: DeltaRoots, fresh: dict[str, bool]) -> bool:
        """Return whether nothing that lies below shows through a directory of the upper layer."""
        if path not in fresh:
            parent = path.rpartition("/")[0]
            fresh[path] = self._is_fresh(parent, roots, fresh) or self._hides_lower(path, roots)
        return fresh[path]

    def _hides_lower(self, path: str, roots: DeltaRoots) -> bool:
        lower = trees.open_below(roots.lower, path + "/")
        if lower is None:
            # Without a directory below, everything in it is new.
            return True
        os.close(lower)
        upper = trees.open_below(roots.upper, path + "/")
        if upper is None:
            return False
        with Opened(upper):
            return is_opaque(upper)

    def _folder_row(self, path: str, upper: int, root: int | None) -> Row | None:
        status, before = os.fstat(upper), None if root is None else os.fstat(root)
        # An ordinary user's sandbox cannot give its top directory the owner that the base's has.
        owned = bool(path) or before is None or before.st_uid == 0
        now = facts.of_folder(status, upper, MARKS, owned=owned)
        timeless = _is_timeless(status)
        if root is not None and before is not None and now == facts.of_folder(before, root, "", owned=owned):
            if timeless or status.st_mtime_ns == before.st_mtime_ns:
                return None
            now = b""
        return Row(FIXED, now) if timeless else self._dated(now, status)

    def _entry(self, path: str, upper: int, root: int | None, base: StateRows) -> None:
        name = path.rpartition("/")[2]
        status = os.stat(name, dir_fd=upper, follow_symlinks=False)
        if stat.S_ISDIR(status.st_mode):
            return
        self.touched.add(path)
        before = _lstat(name, root)
        # Whatever was at this path before, a directory with its contents included, is hidden now.
        self._hide(path, base)
        if is_whiteout(status):
            self._entries[path] = _Entry(None if before is None else Row(GONE), b"")
            return
        now = facts.of_entry(name, status, upper, MARKS, self._shared.get(path, ""))
        row: Row | None = self._dated(now.what, status)
        # Size and time first: content of the root state is read only for files that could be equal.
        if (
            before is not None
            and root is not None
            and _could_be_equal(status, before)
            and facts.of_entry(name, before, root, "").what == now.what
        ):
            row = None
        self._entries[path] = _Entry(row, now.content)

    def _dated(self, what: bytes, status: os.stat_result) -> Row:
        # Tools such as tar set whole seconds; a clock hits one by chance once in 10**9 times. Times that a program has
        # set (whole seconds, before the root state, in the future) count as they are. The others differ between runs.
        time_ns = status.st_mtime_ns
        clocked = time_ns % 1_000_000_000 != 0 and self._born_ns <= time_ns <= time.time_ns()
        return Row(CLOCKED if clocked else FIXED, what, facts.modified_ns(status))

    # -- implied rows ------------------------------------------------------------------------------------------------

    def _hide(self, path: str, base: StateRows) -> None:
        self._forget_implied(path)
        for below in base.below(path):
            self._imply(path, below, None)

    def _imply(self, above: str, path: str, row: Row | None) -> None:
        self._implied.setdefault(above, {})[path] = row
        self.touched.add(path)

    def _forget_implied(self, above: str) -> None:
        self.touched.update(self._implied.pop(above, ()))

    # -- manifests ---------------------------------------------------------------------------------------------------

    def manifest(self) -> Manifest:
        """Return the manifest of a layer with these entries."""
        items = []
        for path, signature in self.signatures.items():
            if path:
                mode, size, mtime_ns = _facts(signature)
                inside = self._entries[path].content if path in self._entries else b""
                if stat.S_ISDIR(mode) and inside:
                    items.append(Item(path, 0, 0, 0, inside))
                    inside = b""
                items.append(Item(path, mode, size, mtime_ns, inside))
        return of_items(items)


def _signatures(upper: int) -> tuple[dict[str, bytes], int]:
    signatures, size_bytes = {"": _signature(os.fstat(upper), 0)}, 0
    recent = time.time_ns() - _TICK_NS
    for folder in trees.folders(upper):
        for entry in folder.entries:
            with contextlib.suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                signatures[folder.path + entry.name] = _signature(status, recent)
                size_bytes += bytes_on_disk(status)
    return signatures, size_bytes


def _changed(now: dict[str, bytes], before: dict[str, bytes]) -> set[str]:
    return {path for path, signature in now.items() if before.get(path) != signature}


def _signature(status: os.stat_result, recent: int) -> bytes:
    # If the kernel's ctime is coarse, an entry that was changed moments ago gets a signature that no later one equals.
    unique = time.monotonic_ns() if not _FINE_TIMES and status.st_ctime_ns > recent else 0
    # overlayfs makes whiteouts as hard links of one device; they are not the agent's links.
    links = 1 if is_whiteout(status) or stat.S_ISDIR(status.st_mode) else status.st_nlink
    return _SIGNATURE.pack(
        status.st_ino, links, status.st_mode, status.st_uid, status.st_gid, status.st_size,
        facts.modified_ns(status), status.st_ctime_ns, unique,
    )  # fmt: skip


def _facts(signature: bytes) -> tuple[int, int, int]:
    fields = _SIGNATURE.unpack(signature)
    return fields[2], fields[5], fields[6]


def _shared(signatures: dict[str, bytes]) -> dict[str, str]:
    """Return the paths whose inode has several, each with the first path of its inode."""
    names: dict[int, list[str]] = {}
    for path in sorted(path for path, signature in signatures.items() if _LINKS.unpack_from(signature)[1] > 1):
        names.setdefault(_LINKS.unpack_from(signatures[path])[0], []).append(path)
    # The index of overlayfs has a name of each file too, so the kernel's count may be one more.
    return {path: paths[0] for paths in names.values() if len(paths) > 1 for path in paths}


def _is_timeless(status: os.stat_result) -> bool:
    """Return whether a directory is one for everybody's temporary files, such as /tmp, by its sticky bit."""
    # Programs make and remove files there all the time, shells with every longer here-document. Its own time does not
    # count.
    return bool(status.st_mode & stat.S_ISVTX)


def _lstat(name: str, folder: int | None) -> os.stat_result | None:
    if folder is None:
        return None
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except OSError:
        return None


def _could_be_equal(now: os.stat_result, before: os.stat_result) -> bool:
    facts_compared = ("st_mode", "st_uid", "st_gid", "st_size", "st_mtime_ns")
    return all(getattr(now, fact) == getattr(before, fact) for fact in facts_compared)
