"""Record locks that a restore would lose: those of a process on a file that it has mapped."""

# Theory of operation. A process loses its POSIX record locks on a file when it closes any descriptor of that file
# (fcntl(2)). CRIU sets the locks of a process first, and then opens the mapped files, and closes them again. So a
# restored process runs without locks on a file that it has mapped, and a second writer gets in. Databases do that:
# SQLite locks its index of a write-ahead log, which is mapped.
#
# /proc/locks tells which processes hold such locks (proc_locks(5)); nearly always there is none.

import os
import re
from collections.abc import Collection, Iterator

_LOCK = re.compile(rb"^\d+: POSIX +\S+ +\S+ +(\d+) ", re.MULTILINE)
REASON = "a process holds a record lock on a file that it has mapped, and a checkpoint does not hold that lock"


def are_held(pids: Collection[int]) -> bool:
    """Return whether one of these processes holds such a lock. 0.02 ms without record locks."""
    with open("/proc/locks", "rb") as file:  # noqa: PTH123
        holders = {int(pid) for pid in _LOCK.findall(file.read())}
    return any(_holds(pid) for pid in holders.intersection(pids))


def _holds(pid: int) -> bool:
    """Return whether a process holds one; True if it does not show what it has open and mapped."""
    try:
        locked = [f"/proc/{pid}/fd/{name}" for name in _locked(pid)]
        files = [(os.stat(path), os.fsencode(os.readlink(path))) for path in locked]  # noqa: PTH115, PTH116
        for name in _mapped(pid):
            if any(name == path for _, path in files):
                return True
            try:
                status = os.stat(name)  # noqa: PTH116
            except OSError:
                # It is deleted: then the names are equal.
                continue
            # A file can have another name where it is mapped.
            if any(os.path.samestat(status, other) for other, _ in files):
                return True
    except (FileNotFoundError, ProcessLookupError):
        # It has ended, or has closed the descriptor and with it all its locks.
        return False
    except OSError:
        return True
    return False


def _locked(pid: int) -> Iterator[str]:
    for name in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208
        with open(f"/proc/{pid}/fdinfo/{name}", "rb") as file:  # noqa: PTH123
            # The locks of the process on the file of this descriptor (proc_pid_fdinfo(5)).
            if any(line.startswith(b"lock:") and b" POSIX " in line for line in file):
                yield name


def _mapped(pid: int) -> set[bytes]:
    """Return the names of the files that a process has mapped."""
    with open(f"/proc/{pid}/maps", "rb") as file:  # noqa: PTH123
        rows = (line.rstrip(b"\n").split(maxsplit=5) for line in file)
        # Only line breaks are escaped (seq_path in proc_pid_maps(5)).
        return {row[5].replace(rb"\012", b"\n") for row in rows if len(row) == 6 and row[5].startswith(b"/")}
