"""Record locks that a restore would lose, those of a process on a file that it has mapped: they are set again."""

# Theory of operation. A process loses its POSIX record locks on a file when it closes any descriptor of that file
# (fcntl(2)). CRIU sets the locks of a process first, and then opens the mapped files, and closes them again. So a
# restored process would run without locks on a file that it has mapped, and a second writer got in. Databases do that:
# SQLite locks its index of a write-ahead log, which is mapped, as long as a connection is open.
#
# 1. While CRIU holds the processes, /proc/locks tells which of them hold locks (proc_locks(5)), and nearly always none
#    does. The locks of one that has mapped a locked file are noted, with the descriptor that each was set by.
# 2. At the restore the processes are frozen before CRIU lets go of them. Nothing runs that could take a lock first.
# 3. When CRIU has ended, the operator holds all of them by ptrace, thaws them, has each set its locks again, freezes
#    them, and lets go. So no process has run an instruction of its own when this ends.
#
# A process loses no other lock by that. Setting one that CRIU has set too changes nothing.

import fcntl
import os
import re
import struct
from collections.abc import Collection, Iterable, Iterator, Sequence

from sandboxes.guest.checkpoints.ptrace import Held

_LOCK = re.compile(rb"^\d+: POSIX +\S+ +\S+ +(\d+) ", re.MULTILINE)
REASON = "a process holds a record lock on a file that it has mapped, and a checkpoint does not hold that lock"
_KINDS = {b"READ": fcntl.F_RDLCK, b"WRITE": fcntl.F_WRLCK}
_FLOCK = struct.Struct("<hh4xqqi4x")
"""Kind, what the begin is counted from, begin and length in bytes, and a process (`struct flock`)."""
_FCNTL = 72
"""The number of fcntl(2) on x86-64, the one machine with `ptrace.Held`."""

RecordLock = list[int]
"""A lock as a checkpoint has it: process, descriptor, kind, begin, and length in bytes; without an end, 0."""


def held(pids: Collection[int]) -> list[RecordLock] | None:
    """Return the locks that a restore would lose; None if a process that holds locks does not show its files."""
    with open("/proc/locks", "rb") as file:  # noqa: PTH123
        holders = {int(pid) for pid in _LOCK.findall(file.read())}
    locks: list[RecordLock] = []
    for pid in sorted(holders.intersection(pids)):
        try:
            found = list(_locks(pid))
            locks += found if _maps_one(pid, {lock[1] for lock in found}) else []
        except (FileNotFoundError, ProcessLookupError):
            # It has ended, or has closed the descriptor and with it all its locks.
            continue
        except OSError:
            return None
    return locks


def set_again(pids: Iterable[int], locks: Collection[RecordLock], freezer: int) -> None:
    """Have frozen processes set their locks again; they are frozen again then. `OSError` says that they lack one."""
    # After an error they end with this process.
    processes = Held(pids)
    os.pwrite(freezer, b"0", 0)
    for pid, number, kind, begin, length in locks:
        lock = _FLOCK.pack(kind, os.SEEK_SET, begin, length, 0)
        processes.call(pid, _FCNTL, (number, fcntl.F_SETLK), lock)
    os.pwrite(freezer, b"1", 0)
    # A filter of system calls can tell a program that a call has worked.
    now = [lock for pid in {lock[0] for lock in locks} for lock in _locks(pid)]
    if lacking := [lock for lock in locks if lock not in now]:
        raise OSError(f"process {lacking[0][0]} does not get back its lock on descriptor {lacking[0][1]}")
    processes.release()


def record_locks(number: int, lines: Iterable[bytes]) -> Iterator[Sequence[int]]:
    """Yield descriptor, kind, begin and length of the locks that a descriptor shows (proc_pid_fdinfo(5)). Pure."""
    for line in lines:
        # lock: 1: POSIX  ADVISORY  READ 5 00:2b:123 124 124
        fields = line.split()
        if fields[:1] == [b"lock:"] and fields[2] == b"POSIX":
            begin, end = int(fields[7]), fields[8]
            yield number, _KINDS[fields[4]], begin, 0 if end == b"EOF" else int(end) - begin + 1


def _locks(pid: int) -> Iterator[RecordLock]:
    for name in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208
        with open(f"/proc/{pid}/fdinfo/{name}", "rb") as file:  # noqa: PTH123
            yield from ([pid, *lock] for lock in record_locks(int(name), file))


def _maps_one(pid: int, descriptors: Iterable[int]) -> bool:
    paths = [f"/proc/{pid}/fd/{number}" for number in descriptors]
    files = [(os.stat(path), os.fsencode(os.readlink(path))) for path in paths]  # noqa: PTH115, PTH116
    for name in _mapped(pid) if files else ():
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
    return False


def _mapped(pid: int) -> set[bytes]:
    with open(f"/proc/{pid}/maps", "rb") as file:  # noqa: PTH123
        rows = (line.rstrip(b"\n").split(maxsplit=5) for line in file)
        # Only line breaks are escaped (seq_path in proc_pid_maps(5)).
        return {row[5].replace(rb"\012", b"\n") for row in rows if len(row) == 6 and row[5].startswith(b"/")}
