"""Backups with snapshots: written while a proxy runs, and restored into an empty data directory.

A backup without snapshots is the store's file, see `proxy.storage.backup`. One with snapshots is a bundle:

    manifest          `backup` is true, and the versions
    part, chunk …     the unit `store`: the store's file
    part, chunk …     a unit `tree-N` for each tree with snapshots: a bundle of its states, whose nodes have the store's
                      numbers
    seal

A backup of several workers is one too: its manifest has `workers`, and a unit `worker-N` is the backup of each.

A restore checks every digest, and that each state is that of its node. The next start of a proxy gives the bundles of
states to their drivers (`TransferService.adopt_restored`), because only that proxy knows its drivers.
"""

import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import astuple
from importlib.metadata import version
from pathlib import Path
from typing import BinaryIO

import orjson

from proxy.storage import backup as store_backup
from proxy.storage.backup import DRAFTS, RestoredBackup
from proxy.storage.database import StoreDatabase
from proxy.storage.errors import StoreError
from proxy.transfer.dividing import numbers_of_states, place, unpacked_workers, workers_in
from proxy.transfer.format import CHUNK_BYTES, FORMAT, BundleError, Part, Writer, read
from proxy.transfer.state_records import BundleStates, ExportedStates, unit_of

_STORE = "store"


def pieces(store: BinaryIO, states: Mapping[int, ExportedStates], nodes: frozenset[int]) -> Iterator[bytes]:
    """Yield the bytes of a backup with the snapshots of nodes in the store's copy, which is closed. Blocking."""
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


def restore(
    file: Path, data: Path, advance: Callable[[int], None] = lambda _: None, *, workers: int | None = None
) -> RestoredBackup:
    """Make a data directory, which must be empty, of a backup that is checked first. Blocking.

    `advance` is called with the bytes read since the last call. `workers` divide the directory; None for as many as the
    backup's. Raises StoreError if the directory or the file is not fit for it, and OSError if the file cannot be read.
    """
    with file.open("rb") as reading:
        is_bundle = reading.peek(8).startswith(b"manifest")
        made_by = workers_in(reading) if is_bundle else 1
    try:
        if made_by > 1 or (workers or 1) > 1:
            return _restore_workers(file, data, advance, made_by, workers or made_by)
        if is_bundle:
            return store_backup.restore(file, data, _Unpacker(file, advance))
    except BundleError as error:
        raise StoreError(f"{file} is damaged: {error}") from error
    restored = store_backup.restore(file, data)
    advance(file.stat().st_size)
    return restored


def _restore_workers(
    file: Path, data: Path, advance: Callable[[int], None], made_by: int, workers: int
) -> RestoredBackup:
    """Restore the backup of each worker, and divide what they have anew if their number changes."""
    with store_backup.owning_empty(data):
        drafts = data / DRAFTS
        drafts.mkdir()
        try:
            parts = unpacked_workers(file, drafts, advance) if made_by > 1 else iter([file])
            restored = [restore(part, drafts / f"restored-{number}") for number, part in enumerate(parts)]
            place([drafts / f"restored-{number}" for number in range(made_by)], data, workers)
        except OSError as error:
            raise StoreError(f"{file} could not be restored: {error}. Free disk space, or check the file.") from error
    if made_by == 1:
        advance(file.stat().st_size)
    tasks, calls, lost, snapshots = (sum(counts) for counts in zip(*map(astuple, restored), strict=True))
    return RestoredBackup(tasks, calls, lost, snapshots)


class _Unpacker:
    def __init__(self, file: Path, advance: Callable[[int], None]) -> None:
        self._file, self._advance = file, advance

    def unpack(self, store: Path, states: Path) -> None:
        """Write the store to a file, and the states of each tree to one of their own. Raises BundleError or OSError."""
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
    """Check every digest of a bundle of states against the store. Blocking. Raises BundleError or OSError."""
    tree, distance = numbers_of_states(file)

    def content_of(node: int) -> str | None:
        row = database.row("SELECT content FROM nodes WHERE id = ? AND tree = ?", (node + distance, tree))
        if row is None:
            raise BundleError(f"there is a snapshot of node {node + distance}, and no such node in tree {tree}.")
        return None if row[0] is None else bytes(row[0]).hex()

    states = BundleStates()
    with file.open("rb") as reading:
        for part in read(reading):
            if part.kind in ("part", "chunk", "snapshot"):
                states.add(part, content_of)
    states.finish()
    return states
