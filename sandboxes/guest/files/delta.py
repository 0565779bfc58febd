"""What differs between a sandbox's files and its root state, and the digests that equal differences share."""

# Theory of operation.
#
# An entry is a path that differs: `path -> (what it is now, its mtime in ns)`. "What it is" covers type, content, mode,
# owner, link target, extended attributes, and which paths share one inode. `-` is a path that is gone. Directories'
# modification times and all access times do not count. A path that is again what it was in the root state has no
# entry, so histories that end alike have equal deltas.
#
# Three directories are compared, by descriptor, because the paths are under the agent's control:
#   upper  what the sandbox has written since its last layer;
#   lower  what lies below it, which upper hides entry by entry;
#   root   the root state.
# The delta of lower is known. Only the entries of upper are walked, so the cost follows what was written, not the size
# of the file system. overlayfs marks two special cases in upper: a character device 0/0 is a *whiteout* (the path is
# gone), and the opaque attribute on a directory hides everything below it.
#
# All operations tolerate entries that vanish in between: running processes go on writing.

import hashlib
import os
import stat
import time
from typing import NamedTuple

DeltaEntry = tuple[str, int]
Delta = dict[str, DeltaEntry]
Signature = tuple[int, ...]

GONE: DeltaEntry = ("-", 0)
"""The entry of a path that exists in the root state only."""
MAX_ENTRIES = 5_000
"""The most entries of a delta. Each call hashes all of them; a build with more changes gets no digest."""
MAX_HASHED_BYTES = 64 << 20
"""The most file content that one comparison reads: some 0.1 s of hashing."""
_FINE_TIMES = tuple(int(number) for number in os.uname().release.split("-")[0].split(".")[:2]) >= (6, 13)
# Before Linux 6.13, a change within the same tick of the clock as the last one may leave no trace in ctime.
_TICK_NS = 0 if _FINE_TIMES else 20_000_000
_OPAQUE = "user.overlay.opaque"
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class DeltaTooLargeError(Exception):
    """More changed than is worth hashing."""


class DeltaRoots(NamedTuple):
    """Descriptors of the directories that are compared.

    Attributes:
        upper: What the sandbox has written since its last layer.
        lower: What lies below it.
        root: The root state.
    """

    upper: int
    lower: int
    root: int


def signatures(upper: int) -> dict[str, Signature]:
    """Return the `stat` of each entry of an upper layer, by path. If two are equal, nothing changed. 2 us an entry.

    If the kernel's ctime is coarse, an entry that was changed moments ago gets a signature that no later one equals.
    """
    entries: dict[str, Signature] = {}
    _collect(upper, "", entries, time.time_ns() - _TICK_NS)
    return entries


def _collect(folder: int, prefix: str, signatures: dict[str, Signature], recent: int) -> None:
    for entry in _entries(folder):
        try:
            status = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            continue
        path = prefix + entry.name
        if stat.S_ISDIR(status.st_mode):
            # Not mtime: it moves with the entries, which have signatures of their own. ctime moves with attributes too.
            signatures[path] = (1, status.st_ino, status.st_mode, status.st_uid, status.st_gid, status.st_ctime_ns)
            inner = _open_directory(entry.name, folder)
            if inner is not None:
                try:
                    _collect(inner, path + "/", signatures, recent)
                finally:
                    os.close(inner)
            continue
        # overlayfs makes whiteouts as hard links of one device; they are not the agent's links.
        links = 1 if stat.S_ISCHR(status.st_mode) else status.st_nlink
        signatures[path] = (
            links,
            status.st_ino,
            status.st_mode,
            status.st_size,
            status.st_mtime_ns,
            status.st_ctime_ns,
        )
        if not _FINE_TIMES and status.st_ctime_ns > recent:
            signatures[path] += (time.monotonic_ns(),)


def linked(signatures: dict[str, Signature]) -> list[str]:
    """Return the paths that are hard links to one file with others; whiteouts do not count (pure)."""
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
        # O_NOFOLLOW and dir_fd together: a directory that the agent replaces by a link at this moment is not followed.
        return os.open(name, _DIRECTORY, dir_fd=folder)
    except OSError:
        return None


def merge(base: Delta, roots: DeltaRoots, opaque: str = _OPAQUE) -> Delta:
    """Return the delta of an upper layer over layers whose delta is known.

    Args:
        base: The delta of the layers below.
        roots: The directories.
        opaque: The attribute by which overlayfs marks a directory that hides what lies below.

    Raises:
        DeltaTooLargeError: The delta has more than `MAX_ENTRIES`, or more than `MAX_HASHED_BYTES` must be read.
    """
    walk = _Walk(base, opaque)
    walk.folder("", roots.upper, roots.lower, roots.root, fresh=False)
    return walk.delta


class _Walk:
    """One comparison.

    Attributes:
        delta: The delta so far; it begins with the delta of the layers below.
        above: The directories that contain entries of that delta.
        hashed: How much content was read.
        links: The first path of each inode with several.
    """

    def __init__(self, base: Delta, opaque: str) -> None:
        self.delta = dict(base)
        self.opaque, self.marks = opaque, opaque.rpartition(".")[0] + "."
        self.above = {parent for path in base for parent in _parents(path)}
        self.hashed = 0
        self.links: dict[int, str] = {}

    def folder(self, prefix: str, upper: int, lower: int | None, root: int | None, *, fresh: bool) -> None:
        """Compare the entries of a directory of the upper layer; fresh: nothing that lies below shows through it."""
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
        # A running process may remove the entry between the listing and this line; the caller skips it then.
        status = entry.stat(follow_symlinks=False)
        before = _lstat(entry.name, root)
        # Case 1: a whiteout. The path is gone, which is a difference only if the root state has it.
        if stat.S_ISCHR(status.st_mode) and status.st_rdev == 0:
            self._forget_below(path)
            self._set(path, None if before is None else GONE)
        # Case 2: a directory. Its entries are compared one by one.
        elif stat.S_ISDIR(status.st_mode):
            self._directory(path, entry.name, status, before, (upper, lower, root))
        # Case 3: anything else replaces whatever was there, a directory with its contents included.
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
            # Without a directory below, everything in it is new. An opaque one hides what is below, with the same
            # result.
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
        # Checked first, because scanning all entries for each path would be quadratic.
        if path in self.above:
            for known in [known for known in self.delta if known.startswith(path + "/")]:
                del self.delta[known]

    def _same(self, name: str, now: os.stat_result, before: os.stat_result, upper: int, root: int | None) -> bool:
        # Size and time first: content is read only for files that could be equal.
        facts = ("st_mode", "st_uid", "st_gid", "st_size", "st_mtime_ns")
        if root is None or any(getattr(now, fact) != getattr(before, fact) for fact in facts):
            return False
        if _xattrs(name, upper, self.marks) != _xattrs(name, root, self.marks):
            return False
        return self._content(name, now, upper) == self._content(name, before, root)

    def _what(self, path: str, name: str, status: os.stat_result, folder: int) -> str:
        # Which paths share an inode is part of the state: writing to one of them changes the others.
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
        # Counted before reading, so that one huge file does not block the call.
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
    # Without times: a directory's time moves with its entries, which are in the delta themselves.
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

    Modification times that a program has set count as they are: whole seconds, before the root state, or in the future.
    The others come from the clock and differ between runs, so only their order counts; equal times share a rank. Two
    runs of the same calls then have equal digests.

    Args:
        delta: The delta to the root state.
        sessions: The digest of the shell sessions.
        born_ns: When the root state was made.
        now_ns: The time of the comparison.
    """
    clocked = sorted({mtime for _, mtime in delta.values() if _clocked(mtime, born_ns, now_ns)})
    rank = {mtime: position for position, mtime in enumerate(clocked)}
    exact, content = hashlib.blake2b(sessions, digest_size=32), hashlib.blake2b(sessions, digest_size=32)
    for path in sorted(delta):
        what, mtime = delta[path]
        # NUL separates the parts, because no path contains it.
        fixed = "" if mtime in rank else str(mtime)
        line = f"{path}\0{what}\0{fixed}\0".encode("utf-8", "surrogateescape")
        content.update(line)
        exact.update(line + str(rank.get(mtime, "")).encode() + b"\0")
    return exact.digest(), content.digest()


def _clocked(mtime: int, born_ns: int, now_ns: int) -> bool:
    # Tools such as tar set whole seconds; a clock hits one by chance once in 10**9 times.
    return mtime % 1_000_000_000 != 0 and born_ns <= mtime <= now_ns
