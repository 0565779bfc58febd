"""Whether what a spec names has changed since it was digested, known without looking at it again.

1. A directory is walked once, in a child process (`source_walk`), which also arms an inotify watch on each of its
   directories. As long as the kernel reports nothing, the digest holds, and asking costs two system calls.
2. After an event, the directory is walked again by the next caller who needs its digest.
3. Some changes cause no event: writes through a mapping, or by another machine on a network disk. So a walk counts for
   `_WATCHED_S` at most. Without a watch (the user's inotify limits are used up) it counts for a second, or for ten
   times as long as it took.
"""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sandboxes import IMPORT_ROOT
from sandboxes.linux import syscalls as kernel

_WATCHED_S = 600.0
"""How long a walk of a watched directory counts. A change that inotify does not report is noticed after this time. A
walk of a base of 140,000 files takes a second or two."""
_UNWATCHED_S, _UNWATCHED_TIMES = 1.0, 10.0
"""Without a watch, a walk counts for so many seconds, or so many times its own duration if that is more."""
_MAX_WATCHED = 32
"""Most directories that are watched. The kernel gives each user 128 instances by default, and other programs, also
those in sandboxes, need some. Further directories are walked without a watch."""
_PROGRAM = "import sys; sys.path.insert(0, sys.argv.pop(1)); from sandboxes.host.source_walk import main; main()"


class SourceWatch:
    """An inotify instance that remembers whether anything has happened. Without one, something always may have."""

    # The event loop and threads use it. The lock keeps one of them from closing the descriptor while another reads it,
    # or closes it too: the number may be another file's by then.

    def __init__(self, *, wanted: bool = True) -> None:
        self._lock = threading.Lock()
        try:
            self.fd = kernel.inotify() if wanted else -1
        # The user's limit of instances (128 by default) is used up.
        except OSError:
            self.fd = -1

    def add(self, path: str, events: int) -> None:
        """Watch a directory; without free watches, the whole watch is given up. A directory that is gone is none."""
        try:
            if self.fd >= 0:
                kernel.inotify_add(self.fd, path, events)
        except (FileNotFoundError, PermissionError):
            return
        except OSError:
            self.close()

    @property
    def is_quiet(self) -> bool:
        """Whether nothing has happened since the watch was armed."""
        with self._lock:
            if self.fd < 0:
                return False
            try:
                os.read(self.fd, 1 << 16)
            except BlockingIOError:
                return True
            # Once something has happened, the watch is of no more use; closing it frees the kernel's memory.
            self._close()
            return False

    def close(self) -> None:
        """End the watch. Idempotent."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


@dataclass(slots=True)
class _Walked:
    digest: str
    place: tuple[int, int]  # Device and inode of the directory.
    watch: SourceWatch  # Says whether it has changed.
    is_watched: bool  # Whether the watch was armed completely.
    until: float  # When the walk counts no longer, on the monotonic clock.

    def holds(self, status: os.stat_result) -> bool:
        if (status.st_dev, status.st_ino) != self.place or time.monotonic() > self.until:
            return False
        return not self.is_watched or self.watch.is_quiet


class DirectoryDigests:
    """Digests of directories by their real paths. `of` blocks while a directory is walked: run it in a thread."""

    def __init__(self) -> None:
        self._walked: dict[str, _Walked] = {}
        # Methods run in threads; only one of them walks a directory, and the others wait for it.
        self._locks: dict[str, threading.Lock] = {}

    def known(self, name: str, status: os.stat_result) -> str | None:
        """Return the digest of a directory if it was walked under this real path before and is unchanged; else None."""
        walked = self._walked.get(name)
        return walked.digest if walked is not None and walked.holds(status) else None

    def of(self, folder: Path, name: str) -> str:
        """Return the digest of a directory, by its path below `/proc/self/fd` (see `open_plain`) and its real path."""
        with self._locks.setdefault(name, threading.Lock()):
            walked, status = self._walked.get(name), folder.stat()
            if walked is None or not walked.holds(status):
                if walked is not None:
                    walked.watch.close()
                watched = sum(other.watch.fd >= 0 for other in self._walked.values())
                walked = self._walked[name] = _walk(folder, status, SourceWatch(wanted=watched < _MAX_WATCHED))
            return walked.digest

    def close(self) -> None:
        """End all watches."""
        for walked in self._walked.values():
            walked.watch.close()
        self._walked.clear()


def _walk(folder: Path, status: os.stat_result, watch: SourceWatch) -> _Walked:
    began = time.monotonic()
    fds = (int(folder.name), *((watch.fd,) if watch.fd >= 0 else ()))
    arguments = [sys.executable, "-I", "-S", "-c", _PROGRAM, IMPORT_ROOT, str(folder), str(watch.fd)]
    # A fixed program of ours, which gets numbers only.
    done = subprocess.run(arguments, pass_fds=fds, capture_output=True, check=False)  # noqa: S603
    if done.returncode:
        watch.close()
        reason = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise OSError(0, f"it cannot be walked ({reason})")
    digest, is_watched = done.stdout.split()
    took_s = time.monotonic() - began
    if is_watched != b"1":
        watch.close()
    counts_s = _WATCHED_S if is_watched == b"1" else max(_UNWATCHED_S, _UNWATCHED_TIMES * took_s)
    place = status.st_dev, status.st_ino
    return _Walked(digest.decode(), place, watch, is_watched == b"1", time.monotonic() + counts_s)


class Watched:
    """A value that was computed from directories, and holds until one of them changes."""

    def __init__(self, compute: Callable[[Callable[[str, int], None]], bytes]) -> None:
        """Create it. `compute` is given a function that watches a directory, to be called before it looks there."""
        self._compute = compute
        self._lock = threading.Lock()
        self._watch: SourceWatch | None = None
        self._value = b""

    def known(self) -> bytes | None:
        """Return the value if nothing has changed since it was computed, without blocking."""
        watch = self._watch
        return self._value if watch is not None and watch.is_quiet else None

    def value(self) -> bytes:
        """Return the value as it is now. Blocking, if something has changed."""
        with self._lock:
            if (known := self.known()) is not None:
                return known
            watch = SourceWatch()
            value = self._compute(watch.add)
            self._value, self._watch = value, watch
            return value

    def close(self) -> None:
        """End the watch."""
        if self._watch is not None:
            self._watch.close()
