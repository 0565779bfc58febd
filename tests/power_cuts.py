"""Cuts of power at every write: what a program wrote is recorded, and each disk that a cut may leave is built.

strace records every write, truncation, rename, unlink and sync of a scenario below one directory, in order. The journal
writes through a mapping, which no system call shows, so its mapping reports each store as a write to `/dev/null`.

A cut comes after any of these operations. What the disk holds then follows POSIX. A write is certain once its file was
synced afterwards, and a name once its directory was. Names change in order up to some point, as on journalling file
systems. Data that was not synced may be there or not, sector by sector; a sector is written at one moment, so it shows
the writes to it up to some point.
"""

import mmap
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

VARIANTS = ("kept", "dropped", "some")
"""Disks of one cut: with all that was written, with only what is certain, and with a random part of the rest."""
_SECTOR_BYTES = 512
_TRACED = (
    "openat,open,creat,write,pwrite64,ftruncate,fallocate,rename,renameat,renameat2,unlink,unlinkat,mkdir,mkdirat,"
    "rmdir,fsync,fdatasync"
)
_LINE = re.compile(r"^\d+ +(\w+)\((.*)\) += (-?\d+)")
_BYTES = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')
_FD = re.compile(r"^(\d+|AT_FDCWD)<((?:\\x[0-9a-f]{2})*)")


@dataclass(frozen=True, slots=True)
class Operation:
    """One recorded operation.

    Attributes:
        kind: What it does; `answered` marks that a rollout received an answer.
        path: The path below the directory, empty for the directory itself; for `answered` the rollout.
        start: Offset of a write, new size of a truncation, or number of answers.
        data: What is written.
        to: New path of a rename.
    """

    kind: Literal["create", "write", "truncate", "rename", "unlink", "mkdir", "sync", "answered"]
    path: str
    start: int = 0
    data: bytes = b""
    to: str = ""


class ReportingMap(mmap.mmap):
    """A mapping that reports its stores, so that strace sees them. `path` is the file's when it was mapped."""

    path = ""
    null = -1

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        os.write(self.null, b"MAP %b %d " % (self.path.encode(), key.start) + value)

    def flush(self, *_: Any) -> None:
        os.write(self.null, b"SYNC %b" % self.path.encode())


def report_mappings(module: Any) -> None:
    """Have the mappings that a module makes report their stores."""
    null = os.open(os.devnull, os.O_WRONLY)

    def mapped(descriptor: int, size: int) -> ReportingMap:
        made = ReportingMap(descriptor, size)
        made.path, made.null = str(Path(f"/proc/self/fd/{descriptor}").readlink()), null
        return made

    module.mmap = type("mmap", (), {"mmap": staticmethod(mapped)})


def tell(rollout: str, answers: int) -> None:
    """Mark that a rollout has received so many answers."""
    descriptor = os.open(os.devnull, os.O_WRONLY)
    os.write(descriptor, f"ANSWERED {rollout} {answers}".encode())
    os.close(descriptor)


def record(arguments: Sequence[str], directory: Path, log: Path) -> list[Operation]:
    """Run a Python program under strace; return what it did below a directory."""
    command = ["strace", "-f", "-y", "-xx", "-s", "30000000", "-o", str(log), "-e", f"trace={_TRACED}"]
    subprocess.run([*command, sys.executable, *arguments], check=True, timeout=120, capture_output=True)
    trace = _Trace(f"{directory}/")
    lines = (_LINE.match(line) for line in log.read_text().splitlines())
    return [
        operation
        for match in lines
        if match is not None and int(match[3]) >= 0
        for operation in trace.operations(match[1], match[2], int(match[3]))
    ]


def _text(escaped: str) -> bytes:
    return bytes.fromhex(escaped.replace("\\x", ""))


@dataclass
class _Trace:
    """Turns lines of strace into operations below a directory, whose path ends with a slash."""

    top: str
    offsets: dict[tuple[str, str], int] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)

    def operations(self, call: str, arguments: str, result: int) -> Iterator[Operation]:
        strings = [_text(match) for match in _BYTES.findall(arguments)]
        owner = _FD.match(arguments)
        held = _text(owner[2]).decode() if owner else ""
        if call == "write" and held == os.devnull:
            yield from self._reported(strings[0])
        elif call in ("write", "pwrite64", "ftruncate", "fallocate", "fsync", "fdatasync"):
            if f"{held}/".startswith(self.top) and owner is not None:
                yield self._on_file(call, arguments, strings, (owner[1], held[len(self.top) :]), result)
        elif strings:
            name = strings[0].decode()
            path = name if name.startswith("/") else f"{held}/{name}"
            if path.startswith(self.top):
                yield from self._on_name(call, arguments, path[len(self.top) :], strings, result)

    def _on_file(
        self, call: str, arguments: str, strings: list[bytes], owner: tuple[str, str], result: int
    ) -> Operation:
        last = arguments.rsplit(",", 1)[-1]
        if call in ("fsync", "fdatasync"):
            return Operation("sync", owner[1])
        if call in ("ftruncate", "fallocate"):
            return Operation("truncate", owner[1], int(last))
        start = int(last) if call == "pwrite64" else self.offsets.get(owner, 0)
        if call == "write":
            self.offsets[owner] = start + result
        return Operation("write", owner[1], start, strings[0])

    def _on_name(self, call: str, arguments: str, path: str, strings: list[bytes], result: int) -> Iterator[Operation]:
        if call in ("openat", "open", "creat"):
            if "O_CREAT" in arguments:
                yield Operation("create", path)
            if "O_TRUNC" in arguments:
                yield Operation("truncate", path, 0)
            self.offsets[str(result), path] = 0
        elif call.startswith("rename"):
            to = strings[1].decode().removeprefix(self.top)
            self.renamed[path] = to
            yield Operation("rename", path, to=to)
        elif call.startswith("mkdir"):
            yield Operation("mkdir", path)
        else:
            yield Operation("unlink", path)

    def _reported(self, text: bytes) -> Iterator[Operation]:
        """Return the operation that the scenario reported itself."""
        word, _, rest = text.partition(b" ")
        if word == b"ANSWERED":
            rollout, _, answers = rest.decode().partition(" ")
            yield Operation("answered", rollout, int(answers))
            return
        name, _, store = rest.partition(b" ")
        path = name.decode().removeprefix(self.top)
        # A mapped file may have been renamed since.
        path = self.renamed.get(path, path)
        if word == b"SYNC":
            yield Operation("sync", path)
            return
        start, _, data = store.partition(b" ")
        yield Operation("write", path, int(start), data)


@dataclass
class _File:
    """Writes and truncations of one file, in order; the first `certain` of them were synced."""

    operations: list[Operation] = field(default_factory=list)
    certain: int = 0

    def content(self, variant: str, dice: random.Random) -> bytes:
        """Return what the disk may hold."""
        count = len(self.operations)

        def reach() -> int:
            return {"kept": count, "dropped": self.certain}.get(variant, dice.randint(self.certain, count))

        size, size_reach = 0, reach()
        reaches: dict[int, int] = {}
        content = bytearray()
        for index, operation in enumerate(self.operations):
            end = operation.start + len(operation.data)
            if operation.kind == "truncate":
                if index < size_reach:
                    size = operation.start
                    content[size:] = bytes(len(content[size:]))
                continue
            size = max(size, end) if index < size_reach else size
            content.extend(bytes(max(0, end - len(content))))
            for sector in range(operation.start // _SECTOR_BYTES, (end - 1) // _SECTOR_BYTES + 1):
                if index < reaches.setdefault(sector, reach()):
                    begin = max(operation.start, sector * _SECTOR_BYTES)
                    stop = min(end, (sector + 1) * _SECTOR_BYTES)
                    content[begin:stop] = operation.data[begin - operation.start : stop - operation.start]
        return bytes(content[:size]).ljust(size, b"\0")


class Disk:
    """What a prefix of the operations may have left on a disk.

    Attributes:
        answered: Number of answers that each rollout had received.
    """

    def __init__(self, operations: Sequence[Operation]) -> None:
        self._names: list[tuple[Operation, _File | None]] = []
        self._certain_names = 0
        self.answered: dict[str, int] = {}
        # The files and directories (None) of this moment, by path.
        now: dict[str, _File | None] = {}
        for operation in operations:
            if operation.kind == "answered":
                self.answered[operation.path] = operation.start
            else:
                self._apply(operation, now)

    def _apply(self, operation: Operation, now: dict[str, _File | None]) -> None:
        file = now.get(operation.path)
        if operation.kind in ("write", "truncate"):
            # A file that was removed while it was open needs no content.
            if file is not None:
                file.operations.append(operation)
        elif operation.kind == "sync":
            if file is not None:
                file.certain = len(file.operations)
            else:
                # Names are ordered, so those of other directories before this moment are certain as well.
                self._certain_names = len(self._names)
        elif operation.kind != "create" or operation.path not in now:
            entry = _File() if operation.kind == "create" else file
            self._names.append((operation, entry))
            _rename(operation, entry, now)

    def build(self, target: Path, variant: str, dice: random.Random) -> None:
        """Write one of the `VARIANTS` of the disk; dice draws the random ones."""
        certain, count = self._certain_names, len(self._names)
        reach = {"kept": count, "dropped": certain}.get(variant, dice.randint(certain, count))
        files: dict[str, _File | None] = {}
        for operation, entry in self._names[:reach]:
            _rename(operation, entry, files)
        target.mkdir(parents=True)
        for path, file in sorted(files.items()):
            place = target / path
            if file is None:
                place.mkdir(parents=True, exist_ok=True)
            # SQLite makes this file again after every crash.
            elif not path.endswith("-shm"):
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(file.content(variant, dice))


def _rename(operation: Operation, entry: _File | None, files: dict[str, _File | None]) -> None:
    """Apply an operation on a name."""
    path = operation.path
    if operation.kind in ("create", "mkdir"):
        files[path] = entry
    elif operation.kind == "unlink":
        files.pop(path, None)
    else:
        for old in [name for name in files if name == path or name.startswith(f"{path}/")]:
            files[operation.to + old[len(path) :]] = files.pop(old)
