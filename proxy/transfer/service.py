"""Export and import of trees as files: what the routes call."""

import asyncio
import secrets
import shutil
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import structlog

from proxy.execution.tasks import Tasks
from proxy.refusals import RefusalError
from proxy.storage.errors import StoreError
from proxy.storage.store import Store
from proxy.transfer.adopt import Adopter, write_draft
from proxy.transfer.backup import check_states
from proxy.transfer.dividing import numbers_of_states
from proxy.transfer.export import estimated_bytes, export
from proxy.transfer.format import BundleError
from proxy.transfer.import_states import unpack_states
from proxy.transfer.schema import BundleManifest, content
from proxy.transfer.state_records import BundleStates, ExportedStates, StateLine
from proxy.transfer.validate import check
from proxy.tree.tree import Node, Tree
from sandboxes.driver import Driver, FrozenState
from sandboxes.errors import ForbiddenSourceError, SpecError
from sandboxes.portability import PortableDriver, RecordingPorter, Unpacking, porter_of, recording_porter_of
from sandboxes.spec import EnvironmentSpec
from sandboxes.task_owner import start
from snapshots.cache import SnapshotCache
from snapshots.capture import Capture
from snapshots.snapshot import Snapshot

log = structlog.get_logger()

_BATCH = 200
"""Blobs and lines written in one transaction, after which calls of rollouts are answered."""


@dataclass(frozen=True, slots=True)
class ImportedTree:
    """The result of an import."""

    manifest: BundleManifest  # What the file states about itself.
    root: Node
    current: bool  # Whether the tree belongs to the task's own environment.
    snapshots: int  # How many of the file's snapshots the proxy now has.

    @property
    def left_out(self) -> int:
        """Number of snapshots that could not travel, or that do not fit here."""
        return self.manifest.snapshots_left_out + self.manifest.snapshots - self.snapshots


class TransferService:
    """Exports trees and imports them. Imports run one at a time, because each takes its share of the disk."""

    def __init__(
        self,
        store: Store,
        tasks: Tasks,
        adopter: Adopter,
        cache: SnapshotCache,
        capture: Capture[Node],
        drivers: Mapping[str, Driver],
        folder: Path,
        *,
        max_bytes: int,
    ) -> None:
        """Create the service. A file of at most `max_bytes` is kept in `folder` while it is checked."""
        self._store, self._tasks, self._adopter, self._drivers = store, tasks, adopter, drivers
        self._cache, self._capture, self._folder, self._max_bytes = cache, capture, folder, max_bytes
        self._importing = asyncio.Lock()

    def open(self) -> None:
        """Remove the files of imports that were killed."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for file in self._folder.iterdir():
            file.unlink()

    def export(
        self,
        task: str,
        tree: Tree,
        states: ExportedStates | None = None,
        *,
        current: bool = True,
        recordings: bool = False,
    ) -> Iterator[bytes]:
        """Yield the bytes of a tree's bundle. `recordings` of hosts, which other tasks may have made, are extra."""
        exported = states or ExportedStates()
        if recordings:
            porter = recording_porter_of(self._drivers.get(tree.spec.driver), tree.spec)
            exported = replace(exported, recordings=porter)
        return export(self._store.database.open_reader(), task, tree, exported, current=current)

    def estimated_bytes(self, tree: Tree, *, snapshots: bool) -> int:
        """Return about how large a tree's bundle will be. Blocking."""
        states = self._cache.added_bytes(tree.id) if snapshots else 0
        return estimated_bytes(self._store.database.open_reader(), tree.id) + states

    @contextmanager
    def lend_states(self, tree: Tree) -> Iterator[ExportedStates]:
        """Yield a tree's snapshots for an export; none of them is evicted inside the block."""
        with self._cache.leased_all(tree.id) as snapshots:
            yield self._exported(tree.spec.driver, snapshots)

    @contextmanager
    def lend_all_states(self) -> Iterator[dict[int, ExportedStates]]:
        """Yield the snapshots of all trees by the tree's number, for a backup; see `lend_states`."""
        trees: dict[int, list[Snapshot]] = {}
        with self._cache.leased_all() as snapshots:
            for snapshot in snapshots:
                trees.setdefault(snapshot.tree, []).append(snapshot)
            # A tree has one driver.
            exported = {tree: self._exported(of_tree[0].driver, of_tree) for tree, of_tree in trees.items()}
            for tree, spec in self._store.trees.specs(trees):
                porter = recording_porter_of(self._drivers.get(spec.driver), spec)
                exported[tree] = replace(exported[tree], recordings=porter)
            yield exported

    def _exported(self, driver: str, snapshots: Sequence[Snapshot]) -> ExportedStates:
        return ExportedStates(snapshots, porter_of(self._drivers.get(driver)), self._cache.load)

    async def adopt_restored(self, folder: Path) -> None:
        """Adopt the states that a restored backup has left in a folder, as far as possible, and remove their files."""
        files, adopted = await asyncio.to_thread(lambda: sorted(folder.glob("*.tar"))), 0
        for file in files:
            try:
                adopted += await self._adopt_file(file)
            except (BundleError, SpecError, StoreError, OSError) as error:
                log.warning("states of a backup were left out", tree=file.stem, error=str(error))
            await asyncio.to_thread(file.unlink)
        if files:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
            log.info("the states of a backup were adopted", trees=len(files), snapshots=adopted)

    async def _adopt_file(self, file: Path) -> int:
        number, distance = numbers_of_states(file)
        async with self._adopter.restored(number) as tree:
            driver = self._drivers[tree.spec.driver]
            if not isinstance(driver, PortableDriver):
                return 0
            states = check_states(file, self._store.database)
            with driver.porter.unpacking() as unpacking:
                unpacked = await self._unpack(file, states, unpacking, driver, recording_porter_of(driver, tree.spec))
                return await self._adopt(unpacked, tree, lambda node: tree.nodes.get(node + distance))

    async def _adopt(
        self, unpacked: list[tuple[StateLine, FrozenState]], tree: Tree, find: Callable[[int], Node | None]
    ) -> int:
        """Make unpacked states snapshots of the nodes that `find` returns for their numbers; return how many are."""
        snapshots = 0
        for line, frozen in unpacked:
            if (node := find(line.node)) is not None:
                snapshots += self._capture.adopt(frozen, tree, node, cost_s=line.cost_s)
            # Each takes some hundred microseconds of disk; calls of rollouts are answered in between.
            await asyncio.sleep(0)
        return snapshots

    async def take(
        self,
        task: str,
        body: AsyncIterator[bytes],
        confine: Callable[[EnvironmentSpec], EnvironmentSpec] = lambda spec: spec,
    ) -> ImportedTree:
        """Import a bundle as a tree of a task, which is created if it does not exist. All of it is imported, or none.

        The tree of another environment than the task's leaves it unchanged, and serves rollouts that ask for the other
        one. `confine` returns the environment as its importer may have it. Raises RefusalError: 409 if the task has
        calls, or the root state differs; 413 if the file is too large; 422 if it is damaged.
        """
        async with self._importing:
            name = secrets.token_hex(8)
            file = self._folder / f"{name}.tar"
            try:
                await self._receive(file, body)
                try:
                    manifest, states = await asyncio.to_thread(_checked, file, self._folder / f"{name}.sqlite")
                    manifest = manifest.model_copy(update={"spec": confine(manifest.spec)})
                    spec, current = await self._environment(task, manifest)
                    tree, snapshots = await self._import(task, manifest, spec, file, states)
                except BundleError as error:
                    raise RefusalError(422, "bundle", f"the file cannot be imported: {error}") from error
            finally:
                file.unlink(missing_ok=True)
        return ImportedTree(manifest, tree.root, current, snapshots)

    async def _receive(self, file: Path, body: AsyncIterator[bytes]) -> None:
        size = 0
        with file.open("xb") as writing:
            async for chunk in body:
                size += len(chunk)
                if size > self._max_bytes:
                    raise RefusalError(
                        413, "import", f"the file is larger than import_bytes, {self._max_bytes}. Raise this setting."
                    )
                await asyncio.to_thread(writing.write, chunk)

    async def _environment(self, task: str, manifest: BundleManifest) -> tuple[EnvironmentSpec, bool]:
        """Return the imported tree's environment here, and whether it is the task's. Raises RefusalError (409)."""
        # The task's own spec comes first: it may name the same databases at another address.
        is_known = self._store.tasks.get(task) is not None
        spec = self._tasks.spec(task) if is_known or not manifest.current else manifest.spec
        key = await self._key(spec)
        current = manifest.current or key == manifest.root_key
        if not current:
            spec, key = manifest.spec, await self._key(manifest.spec)
        if key != manifest.root_key:
            raise RefusalError(
                409, "root-key",
                f"the file's root state is {manifest.root_key}, and here it is {key}: the spec, the base, an archive, "
                "a database or the driver differs, so recorded answers may be wrong here.",
            )  # fmt: skip
        await self._adopter.require_room(task, spec, key, beside=not manifest.current)
        return spec, current

    async def _key(self, spec: EnvironmentSpec) -> str:
        try:
            return await self._tasks.key(spec)
        except ForbiddenSourceError:
            raise
        except SpecError as error:
            raise RefusalError(
                409, "spec", f"the file's environment cannot be used here: {error} PUT the task with a spec that can."
            ) from error

    async def _import(
        self, task: str, manifest: BundleManifest, spec: EnvironmentSpec, file: Path, states: BundleStates
    ) -> tuple[Tree, int]:
        """Unpack the snapshots, then write the tree; return it, and the number of its snapshots."""
        driver = self._drivers[spec.driver]
        # All tasks of an equal environment have the same recordings, so a token for some of them brings none.
        recordings = None if manifest.spec.confined else recording_porter_of(driver, spec)
        if not states.units or not isinstance(driver, PortableDriver):
            return await self._write(task, manifest, spec, file), 0
        with driver.porter.unpacking() as unpacking:
            unpacked = await self._unpack(file, states, unpacking, driver, recordings)
            tree = await self._write(task, manifest, spec, file)
            nodes = dict(tree.nodes)
            return tree, await self._adopt(unpacked, tree, lambda number: nodes[tree.root.id + number])

    async def _unpack(
        self, file: Path, states: BundleStates, unpacking: Unpacking, driver: Driver, recordings: RecordingPorter | None
    ) -> list[tuple[StateLine, FrozenState]]:
        room_bytes = self._cache.free_bytes

        def unpack() -> list[tuple[StateLine, FrozenState]]:
            with file.open("rb") as reading:
                scratch = file.with_suffix(".unit")
                return unpack_states(
                    reading, states, unpacking, scratch, driver=driver.name, room_bytes=room_bytes,
                    recordings=recordings,
                )  # fmt: skip

        running = start(asyncio.to_thread(unpack))
        try:
            unpacked = await asyncio.shield(running)
        except asyncio.CancelledError:
            # A thread cannot be cancelled, and it writes to files that the caller removes next.
            await asyncio.wait([running])
            raise
        if recordings is not None:
            await recordings.settle()
        return unpacked

    async def _write(self, task: str, manifest: BundleManifest, spec: EnvironmentSpec, file: Path) -> Tree:
        draft = self._store.drafts.begin(manifest.nodes, manifest.records)
        try:
            with file.open("rb") as reading:
                items = content(reading)
                while batch := await asyncio.to_thread(lambda: list(islice(items, _BATCH))):
                    write_draft(self._store, draft, batch)
            return await self._adopter.adopt(task, spec, manifest.root_key, draft, beside=not manifest.current)
        except BaseException:
            self._store.drafts.drop(draft.tree)
            raise


def _checked(file: Path, scratch: Path) -> tuple[BundleManifest, BundleStates]:
    with file.open("rb") as reading:
        return check(reading, scratch)
