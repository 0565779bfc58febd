"""What differs between a sandbox's files and its root state, and the digests that equal differences share.

An entry is a path that differs: `path -> [what it is now, its mtime in ns]`. "What it is" covers type, content, mode,
owner, link target, xattrs and which paths share one inode; `-` is a path that is gone. Directories' own modification
times do not count, nor do access times. A path that is again what it was at the root state has no entry, so histories
that end alike have equal deltas.
"""

import hashlib
import os
import stat
import time
from typing import NamedTuple

DeltaEntry = tuple[str, int]
Delta = dict[str, DeltaEntry]
Signature = tuple[int, ...]

GONE: DeltaEntry = ("-", 0)
MAX_ENTRIES = 5_000
MAX_HASHED_BYTES = 64 << 20
_FINE_TIMES = tuple(int(number) for number in os.uname().release.split("-")[0].split(".")[:2]) >= (6, 13)
# Before Linux 6.13, another change within a tick of the last one may leave no trace in ctime.
_TICK_NS = 0 if _FINE_TIMES else 20_000_000
_OPAQUE = "user.overlay.opaque"
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class DeltaTooLargeError(Exception):
    """More changed than is worth digesting."""


class DeltaRoots(NamedTuple):
    """Directories that an upper layer is compared with: the layers below it, and the root state's."""

    upper: int
    lower: int
    root: int


def signatures(upper: int) -> dict[str, Signature]:
    """Return path -> what stat says of each entry of an upper layer: equal maps, nothing changed. 2 us an entry.

    Where ctime is coarse, entries changed moments ago get a signature that no later one equals.
    """
    found: dict[str, Signature] = {}
    _collect(upper, "", found, time.time_ns() - _TICK_NS)
    return found


def _collect(folder: int, prefix: str, found: dict[str, Signature], recent: int) -> None:
    for entry in _entries(folder):
        try:
            status = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            continue
        path = prefix + entry.name
        if stat.S_ISDIR(status.st_mode):
            # Its times move with its entries', which are looked at themselves; ctime moves with its marks too.
            found[path] = (1, status.st_ino, status.st_mode, status.st_uid, status.st_gid, status.st_ctime_ns)
            inner = _open_directory(entry.name, folder)
            if inner is not None:
                try:
                    _collect(inner, path + "/", found, recent)
                finally:
                    os.close(inner)
            continue
        links = 1 if stat.S_ISCHR(status.st_mode) else status.st_nlink
        found[path] = (links, status.st_ino, status.st_mode, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        if not _FINE_TIMES and status.st_ctime_ns > recent:
            found[path] += (time.monotonic_ns(),)


def linked(signatures: dict[str, Signature]) -> list[str]:
    """Return the paths that share their file with others (whiteouts do too, and do not count) (pure)."""
    return sorted(path for path, signature in signatures.items() if signature[0] > 1)


def size_bytes(upper: int) -> int:
    """Return the bytes on disk of an upper layer."""
    total = 0
    for entry in _entries(upper):
        try:
            status = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            continue
        total += status.st_blocks * 512
        if stat.S_ISDIR(status.st_mode) and (inner := _open_directory(entry.name, upper)) is not None:
            try:
                total += size_bytes(inner)
            finally:
                os.close(inner)
    return total


def _entries(folder: int) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return list(entries)


def _open_directory(name: str, folder: int | None) -> int | None:
    if folder is None:
        return None
    try:
        return os.open(name, _DIRECTORY, dir_fd=folder)
    except OSError:
        return None


def merge(base: Delta, roots: DeltaRoots, opaque: str = _OPAQUE) -> Delta:
    """Return the delta of (layers below, whose delta is base) + upper.

    opaque: the attribute by which the upper's file system marks directories that hide what lies below.

    Raises:
        TooLarge: more than MAX_ENTRIES, or more than MAX_HASHED_BYTES to read.
    """
    walk = _Walk(base, opaque)
    walk.folder("", roots.upper, roots.lower, roots.root, fresh=False)
    return walk.delta


class _Walk:
    def __init__(self, base: Delta, opaque: str) -> None:
        self.delta = dict(base)
        self.opaque, self.marks = opaque, opaque.rpartition(".")[0] + "."
        self.above = {parent for path in base for parent in _parents(path)}
        self.hashed = 0
        self.links: dict[int, str] = {}

    def folder(self, prefix: str, upper: int, lower: int | None, root: int | None, *, fresh: bool) -> None:
        """Take in a directory of the upper layer. fresh: nothing below shows through it."""
        names = set()
        for entry in sorted(_entries(upper), key=lambda entry: entry.name):
            names.add(entry.name)
            try:
                self._entry(prefix + entry.name, entry, upper, lower, root)
            except FileNotFoundError:
                continue
        if fresh and root is not None:
            for name in os.listdir(root):  # noqa: PTH208
                if name not in names:
                    self._set(prefix + name, GONE)

    def _entry(self, path: str, entry: os.DirEntry[str], upper: int, lower: int | None, root: int | None) -> None:
        status = entry.stat(follow_symlinks=False)
        before = _lstat(entry.name, root)
        if stat.S_ISCHR(status.st_mode) and status.st_rdev == 0:
            self._forget_below(path)
            self._set(path, None if before is None else GONE)
        elif stat.S_ISDIR(status.st_mode):
            self._directory(path, entry.name, status, before, (upper, lower, root))
        else:
            self._forget_below(path)
            same = before is not None and self._same(entry.name, status, before, upper, root)
            self._set(path, None if same else (self._what(path, entry.name, status, upper), status.st_mtime_ns))

    def _directory(
        self,
        path: str,
        name: str,
        status: os.stat_result,
        before: os.stat_result | None,
        folders: tuple[int, int | None, int | None],
    ) -> None:
        opened = [_open_directory(name, folder) for folder in folders]
        upper, lower, root = opened
        try:
            if upper is None:
                raise FileNotFoundError(path)
            fresh = lower is None or _xattr(upper, self.opaque) == b"y"
            if fresh:
                self._forget_below(path)
            now = _what_directory(status, upper, self.marks)
            then = _what_directory(before, root, self.marks) if before is not None and root is not None else None
            self._set(path, None if now == then else (now, 0))
            self.folder(path + "/", upper, None if fresh else lower, root, fresh=fresh)
        finally:
            for fd in opened:
                if fd is not None:
                    os.close(fd)

    def _set(self, path: str, entry: DeltaEntry | None) -> None:
        if entry is None:
            self.delta.pop(path, None)
            return
        self.delta[path] = entry
        if len(self.delta) > MAX_ENTRIES:
            raise DeltaTooLargeError

    def _forget_below(self, path: str) -> None:
        if path in self.above:
            for known in [known for known in self.delta if known.startswith(path + "/")]:
                del self.delta[known]

    def _same(self, name: str, now: os.stat_result, before: os.stat_result, upper: int, root: int | None) -> bool:
        facts = ("st_mode", "st_uid", "st_gid", "st_size", "st_mtime_ns")
        if root is None or any(getattr(now, fact) != getattr(before, fact) for fact in facts):
            return False
        if _xattrs(name, upper, self.marks) != _xattrs(name, root, self.marks):
            return False
        return self._content(name, now, upper) == self._content(name, before, root)

    def _what(self, path: str, name: str, status: os.stat_result, folder: int) -> str:
        shared = ""
        if status.st_nlink > 1 and not stat.S_ISDIR(status.st_mode):
            shared = self.links.setdefault(status.st_ino, path)
        facts = (status.st_mode, status.st_uid, status.st_gid, _xattrs(name, folder, self.marks), shared)
        return _hash(repr(facts).encode() + self._content(name, status, folder))

    def _content(self, name: str, status: os.stat_result, folder: int) -> bytes:
        if stat.S_ISLNK(status.st_mode):
            return os.fsencode(os.readlink(name, dir_fd=folder))
        if not stat.S_ISREG(status.st_mode):
            return str(status.st_rdev).encode()
        self.hashed += status.st_size
        if self.hashed > MAX_HASHED_BYTES:
            raise DeltaTooLargeError
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=folder)
        with open(fd, "rb", buffering=0) as file:  # noqa: PTH123
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=20)).digest()


def _parents(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:count]) for count in range(1, len(parts))]


def _lstat(name: str, folder: int | None) -> os.stat_result | None:
    if folder is None:
        return None
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except OSError:
        return None


def _what_directory(status: os.stat_result, folder: int, marks: str) -> str:
    return _hash(repr((status.st_mode, status.st_uid, status.st_gid, _listed_xattrs(folder, marks))).encode())


def _xattr(fd: int, name: str) -> bytes | None:
    try:
        return os.getxattr(fd, name)
    except OSError:
        return None


def _xattrs(name: str, folder: int, marks: str) -> list[tuple[str, bytes]]:
    return _listed_xattrs(f"/proc/self/fd/{folder}/{name}", marks)


def _listed_xattrs(target: int | str, marks: str) -> list[tuple[str, bytes]]:
    follow = isinstance(target, int)
    try:
        names = [name for name in os.listxattr(target, follow_symlinks=follow) if not name.startswith(marks)]
        return [(name, os.getxattr(target, name, follow_symlinks=follow)) for name in sorted(names)]
    except OSError:
        return []


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def digests(delta: Delta, sessions: bytes, *, born_ns: int, now_ns: int) -> tuple[bytes, bytes]:
    """Return a state's exact and content digest (pure).

    Times that somebody set (whole seconds, before the root state was made, in the future) count as they are; others,
    the clock's, count by their order alone, equal ones sharing a rank: two runs of the same calls then meet.
    """
    clocked = sorted({mtime for _, mtime in delta.values() if _clocked(mtime, born_ns, now_ns)})
    rank = {mtime: place for place, mtime in enumerate(clocked)}
    exact, content = hashlib.blake2b(sessions, digest_size=32), hashlib.blake2b(sessions, digest_size=32)
    for path in sorted(delta):
        what, mtime = delta[path]
        fixed = "" if mtime in rank else str(mtime)
        line = f"{path}\0{what}\0{fixed}\0".encode("utf-8", "surrogateescape")
        content.update(line)
        exact.update(line + str(rank.get(mtime, "")).encode() + b"\0")
    return exact.digest(), content.digest()


def _clocked(mtime: int, born_ns: int, now_ns: int) -> bool:
    return mtime % 1_000_000_000 != 0 and born_ns <= mtime <= now_ns
