"""Backups with snapshots: written while a proxy runs, and restored into an empty data directory.

A backup without snapshots is the store's file, see `proxy.storage.backup`. One with snapshots is a bundle:

    manifest          `backup` is true, and the versions
    part, chunk …     the unit `store`: the store's file
    part, chunk …     a unit `tree-N` for each tree with snapshots: a bundle of its states, whose nodes have the store's
                      numbers
    seal

A restore checks every digest, and that each state is that of its node. It leaves the bundles of states in the data
directory. The next start of a proxy gives them to their drivers (`TransferService.adopt_restored`), because only that
proxy knows its drivers and their settings.
"""

import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import BinaryIO

import orjson

from proxy.storage import backup as store_backup
from proxy.storage.backup import RestoredBackup
from proxy.storage.database import StoreDatabase
from proxy.storage.errors import StoreError
from proxy.transfer.format import CHUNK_BYTES, FORMAT, BundleError, Part, Writer, read
from proxy.transfer.state_records import BundleStates, ExportedStates, unit_of

_STORE = "store"
_SQLITE = b"SQLite format 3\0"
"""How every SQLite file begins (https://sqlite.org/fileformat.html)."""


def pieces(store: BinaryIO, states: Mapping[int, ExportedStates], nodes: frozenset[int]) -> Iterator[bytes]:
    """Yield the bytes of a backup with snapshots. Blocking.

    Args:
        store: A copy of the store's file, at its beginning; it is closed at the end.
        states: The snapshots by the number of their tree; they stay while this runs.
        nodes: The nodes of the copy. States of other nodes are left out.
    """
    with store:
        writer = Writer()
        yield writer.json("manifest", {"backup": True, "forkpoint": version("forkpoint"), "format": FORMAT})
        yield from _unit(writer, _STORE, iter(lambda: store.read(CHUNK_BYTES), b""))
        for tree, exported in states.items():
            yield from _unit(writer, f"tree-{tree}", _states(tree, exported, nodes))
        yield writer.seal()


def _unit(writer: Writer, name: str, data: Iterable[bytes]) -> Iterator[bytes]:
    yield writer.json("part", {"name": name})
    for piece in data:
        yield writer.part("chunk", piece)


def _states(tree: int, states: ExportedStates, nodes: frozenset[int]) -> Iterator[bytes]:
    writer = Writer()
    yield writer.json("manifest", {"tree": tree, "format": FORMAT})
    yield from states.parts(writer, lambda node: node if node in nodes else None)
    yield writer.seal()


def restore(file: Path, data: Path, advance: Callable[[int], None] = lambda _: None) -> RestoredBackup:
    """Make a data directory of a backup, with or without snapshots. Everything is checked first. Blocking.

    Args:
        file: A backup, of this or of an older version.
        data: The directory, which is created; it must be empty.
        advance: Called with the number of bytes of the file that were read since the last call.

    Raises:
        StoreError: The directory is in use or not empty, or the file is no backup, damaged, or of a newer version.
        OSError: The file cannot be read.
    """
    with file.open("rb") as reading:
        if reading.peek(len(_SQLITE))[: len(_SQLITE)] == _SQLITE or not reading.peek(8).startswith(b"manifest"):
            restored = store_backup.restore(file, data)
            advance(file.stat().st_size)
            return restored
    try:
        return store_backup.restore(file, data, _Unpacker(file, advance))
    except BundleError as error:
        raise StoreError(f"{file} is damaged: {error}") from error


class _Unpacker:
    """Unpacks the units of a backup, and checks the states against the restored store."""

    def __init__(self, file: Path, advance: Callable[[int], None]) -> None:
        self._file, self._advance = file, advance

    def unpack(self, store: Path, states: Path) -> None:
        """Write the store to a file, and the states of each tree to a file of their own.

        Raises:
            BundleError: The file is damaged or no backup.
            OSError: The file cannot be read, or the disk is full.
        """
        states.mkdir()
        with self._file.open("rb") as reading, ExitStack() as stack:
            output: BinaryIO = io.BytesIO()
            for part in read(reading):
                self._advance(len(part.stored))
                if part.kind == "manifest" and not orjson.loads(part.data).get("backup"):
                    raise BundleError("it is an export of one tree. Use `forkpoint import`.")
                if part.kind == "part":
                    stack.close()
                    output = stack.enter_context(_target(part, store, states).open("xb"))
                elif part.kind == "chunk":
                    output.write(part.data)

    def check(self, database: StoreDatabase, states: Path) -> int:
        """Return the number of states; see `check_states`."""
        return sum(len(check_states(file, database).units_of_state) for file in states.iterdir())


def _target(part: Part, store: Path, states: Path) -> Path:
    name = unit_of(part)
    if name == _STORE:
        return store
    tree = name.removeprefix("tree-")
    if not tree.isdecimal():
        raise BundleError(f"{part.name}: a backup has no unit {name!r}.")
    return states / f"{int(tree)}.tar"


def check_states(file: Path, database: StoreDatabase) -> BundleStates:
    """Check a bundle of states against the store: every digest, and that each state is that of its node. Blocking.

    Args:
        file: The bundle; its name is the tree's number.
        database: The store.

    Raises:
        BundleError: The bundle is damaged, or has a state of another node.
        OSError: It cannot be read.
    """

    def content_of(node: int) -> str | None:
        row = database.row("SELECT content FROM nodes WHERE id = ? AND tree = ?", (node, int(file.stem)))
        if row is None:
            raise BundleError(f"there is a snapshot of node {node}, and no such node in tree {file.stem}.")
        return None if row[0] is None else bytes(row[0]).hex()

    states = BundleStates()
    with file.open("rb") as reading:
        for part in read(reading):
            if part.kind in ("part", "chunk", "snapshot"):
                states.add(part, content_of)
    states.finish()
    return states
