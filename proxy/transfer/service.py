"""Trees from one instance to another: files out, files in."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TypeVar

from proxy.execution.root_state import tree_key
from proxy.execution.tasks import Tasks
from proxy.refusals import RefusalError
from proxy.storage.journal import Journal
from proxy.storage.store import Store
from proxy.transfer.adopt import write_draft
from proxy.transfer.export import export
from proxy.transfer.format import BundleError, Part
from proxy.transfer.import_states import bring
from proxy.transfer.schema import BundleLine, Manifest, content
from proxy.transfer.state_records import Outgoing, Seen, StateLine
from proxy.transfer.validate import check
from proxy.tree.tree import Node, Tree
from sandboxes.driver import Driver, FrozenState
from sandboxes.errors import SpecError
from sandboxes.portability import PortableDriver, Unpacking
from sandboxes.spec import EnvironmentSpec
from snapshots.cache import SnapshotCache
from snapshots.capture import Capture

_Made = TypeVar("_Made")
_SLICE = 200
"""Blobs and lines written in one transaction, between which calls are answered: 5 ms."""


@dataclass(frozen=True, slots=True)
class Taken:
    """What came in. root: of the tree. current: whether it is the tree of the task's own spec.

    snapshots: kept states that are here now, of those that the file says there were.
    """

    manifest: Manifest
    root: Node
    current: bool
    snapshots: int

    @property
    def left_out(self) -> int:
        """Kept states that are not here: they could not travel, or do not fit."""
        return self.manifest.snapshots_left_out + self.manifest.snapshots - self.snapshots


class Carrying:
    """Exports and imports. folder: where files lie while they are looked at; max_bytes: of one."""

    def __init__(
        self,
        store: Store,
        journal: Journal,
        tasks: Tasks,
        cache: SnapshotCache,
        capture: Capture[Node],
        drivers: Mapping[str, Driver],
        folder: Path,
        *,
        max_bytes: int,
    ) -> None:
        self._store, self._journal, self._tasks, self._drivers = store, journal, tasks, drivers
        self._cache, self._capture, self._folder, self._max_bytes = cache, capture, folder, max_bytes
        self._one = asyncio.Lock()

    def open(self) -> None:
        """Remove what a killed process left."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for left in self._folder.iterdir():
            left.unlink()

    def export(self, task: str, tree: Tree, states: Outgoing | None = None, *, current: bool = True) -> Iterator[bytes]:
        """Yield the bytes of a tree's bundle, with these kept states; to be iterated in threads.

        current: whether it is the tree of task's own spec.

        Raises:
            StoreError: the store cannot be read.
        """
        return export(self._store.database.open_reader(), task, tree, states or Outgoing(), current=current)

    @contextmanager
    def kept(self, tree: Tree) -> Iterator[Outgoing]:
        """Return a tree's kept states, which stay meanwhile."""
        driver = self._drivers.get(tree.spec.driver)
        with self._cache.leased_all(tree.id) as snapshots:
            yield Outgoing(snapshots, driver.porter if isinstance(driver, PortableDriver) else None, self._cache.load)

    async def take(self, task: str, body: AsyncIterator[bytes]) -> Taken:
        """Import a bundle as a tree of task, which is made if there is none. All of it, or nothing.

        What was the tree of its task's spec becomes that again. What was the tree of another environment leaves the
        task's spec as it is: it is the tree of the rollouts that ask for that environment.

        Raises:
            Refused: 409, task has calls, or the root state is another one here; 413, too large; 422, the file is
                damaged or something else.
        """
        # One at a time: each takes its share of the disk.
        async with self._one:
            name = secrets.token_hex(8)
            file = self._folder / f"{name}.tar"
            try:
                await self._receive(file, body)
                try:
                    manifest, seen = await asyncio.to_thread(_checked, file, self._folder / f"{name}.sqlite")
                    spec, current = await self._fitting(task, manifest)
                    tree, taken = await self._bring_in(task, manifest, spec, file, seen)
                except BundleError as error:
                    raise RefusalError(422, "bundle", f"this file is not imported: {error}") from error
            finally:
                file.unlink(missing_ok=True)
        return Taken(manifest, tree.root, current, taken)

    async def _bring_in(
        self, task: str, manifest: Manifest, spec: EnvironmentSpec, file: Path, seen: Seen
    ) -> tuple[Tree, int]:
        """Write the tree and its kept states, these first; return it, and how many of them there are."""
        driver = self._drivers[spec.driver]
        if not seen.states or not isinstance(driver, PortableDriver):
            return await self._write(task, manifest, spec, file), 0
        with driver.porter.unpacking() as unpacking:
            states = await _to_its_end(partial(self._bring, file, seen, unpacking, driver.name))
            tree = await self._write(task, manifest, spec, file)
            nodes, taken = dict(tree.nodes), 0
            for line, frozen in states:
                taken += self._capture.adopt(frozen, tree, nodes[tree.root.id + line.node], cost_s=line.cost_s)
                # Some hundred microseconds of disk each: hits come between.
                await asyncio.sleep(0)
            return tree, taken

    def _bring(self, file: Path, seen: Seen, unpacking: Unpacking, driver: str) -> list[tuple[StateLine, FrozenState]]:
        with file.open("rb") as reading:
            scratch, room_bytes = file.with_suffix(".unit"), self._cache.free_bytes
            return bring(reading, seen, unpacking, scratch, driver=driver, room_bytes=room_bytes)

    async def _receive(self, file: Path, body: AsyncIterator[bytes]) -> None:
        size = 0
        with file.open("xb") as writing:
            async for chunk in body:
                size += len(chunk)
                if size > self._max_bytes:
                    raise RefusalError(
                        413, "import", f"the file is larger than import_bytes, {self._max_bytes}. Raise it."
                    )
                await asyncio.to_thread(writing.write, chunk)

    async def _fitting(self, task: str, manifest: Manifest) -> tuple[EnvironmentSpec, bool]:
        """Return the spec of the tree here, and whether it is the task's own; the root state must be that of the file.

        Raises:
            Refused: 409, it is not, or there is no room for its tree.
        """
        # Its own may name the same databases at another place.
        spec = self._tasks.spec(task) if self._store.tasks.get(task) or not manifest.current else manifest.spec
        key = await self._key(spec)
        current = manifest.current or key == manifest.root_key
        if not current:
            spec, key = manifest.spec, await self._key(manifest.spec)
        if key != manifest.root_key:
            raise RefusalError(
                409, "root-key",
                f"its root state is {manifest.root_key}, and here it is {key}: the spec, the base, an archive, a "
                "database or the driver is another one, so its answers may be wrong here.",
            )  # fmt: skip
        await self._tasks.require_room(task, spec, key, beside=not manifest.current)
        return spec, current

    async def _key(self, spec: EnvironmentSpec) -> str:
        try:
            return await tree_key(self._drivers, spec)
        except SpecError as error:
            raise RefusalError(
                409, "spec", f"what its spec names cannot be used here: {error} PUT the task with a spec that can."
            ) from error

    async def _write(self, task: str, manifest: Manifest, spec: EnvironmentSpec, file: Path) -> Tree:
        draft = self._store.drafts.begin(manifest.nodes, manifest.records)
        try:
            with file.open("rb") as reading:
                items = content(reading)
                while part := await asyncio.to_thread(_some, items):
                    write_draft(self._store, draft, part)
            beside = not manifest.current
            return await self._tasks.adopt(task, spec, manifest.root_key, draft, beside=beside)
        except BaseException:
            self._store.drafts.drop(draft.tree)
            raise


async def _to_its_end(work: Callable[[], _Made]) -> _Made:
    """Run work in a thread, and wait for it also when cancelled: what it writes to must not be let go of before."""
    running = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise


def _checked(file: Path, scratch: Path) -> tuple[Manifest, Seen]:
    with file.open("rb") as reading:
        return check(reading, scratch)


def _some(items: Iterator[Part | BundleLine]) -> list[Part | BundleLine]:
    return list(islice(items, _SLICE))
