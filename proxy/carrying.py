"""Trees from one instance to another: files out, files in."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator, Mapping
from itertools import islice
from pathlib import Path

from proxy.attach import tree_key
from proxy.bundle import BundleError, Part
from proxy.bundle_check import check
from proxy.bundle_lines import Line, Manifest, content
from proxy.errors import Refused
from proxy.exporting import export
from proxy.journal import Journal
from proxy.store import Store
from proxy.tasks import Tasks
from proxy.tree import Tree
from sandboxes.driver import Driver, SpecError
from sandboxes.spec import EnvironmentSpec

_SLICE = 200
"""Blobs and lines written in one transaction, between which calls are answered: 5 ms."""


class Carrying:
    """Exports and imports. folder: where files lie while they are looked at; most_bytes: of one."""

    def __init__(
        self,
        store: Store,
        journal: Journal,
        tasks: Tasks,
        drivers: Mapping[str, Driver],
        folder: Path,
        *,
        most_bytes: int,
    ) -> None:
        self._store, self._journal, self._tasks, self._drivers = store, journal, tasks, drivers
        self._folder, self._most_bytes = folder, most_bytes
        self._one = asyncio.Lock()

    def open(self) -> None:
        """Remove what a killed process left."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for left in self._folder.iterdir():
            left.unlink()

    def export(self, task: str, tree: Tree) -> Iterator[bytes]:
        """Yield the bytes of a tree's bundle; to be iterated in threads.

        Raises:
            StoreError: the store cannot be read.
        """
        return export(self._store.open_apart(), task, tree)

    async def take(self, task: str, body: AsyncIterator[bytes]) -> Manifest:
        """Import a bundle as the tree of task, which is made if there is none. All of it, or nothing.

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
                    manifest = await asyncio.to_thread(_checked, file, self._folder / f"{name}.sqlite")
                except BundleError as error:
                    raise Refused(422, "bundle", f"this file is not imported: {error}") from error
                spec = await self._fitting(task, manifest)
                await self._write(task, manifest, spec, file)
            finally:
                file.unlink(missing_ok=True)
        return manifest

    async def _receive(self, file: Path, body: AsyncIterator[bytes]) -> None:
        size = 0
        with file.open("xb") as writing:
            async for chunk in body:
                size += len(chunk)
                if size > self._most_bytes:
                    raise Refused(413, "import", f"the file is larger than import_bytes, {self._most_bytes}. Raise it.")
                await asyncio.to_thread(writing.write, chunk)

    async def _fitting(self, task: str, manifest: Manifest) -> EnvironmentSpec:
        """Return the spec that task has here, its own if it was PUT; the root state must be that of the file.

        Raises:
            Refused: 409, it is not, or there is no room for its tree.
        """
        # Its own may name the same databases at another place.
        spec = (await self._tasks.open(task)).spec if self._store.tasks(task) else manifest.spec
        try:
            key = await tree_key(self._drivers, spec)
        except SpecError as error:
            raise Refused(
                409, "spec", f"what its spec names cannot be used here: {error} PUT the task with a spec that can."
            ) from error
        if key != manifest.root_key:
            raise Refused(
                409, "root-key",
                f"its root state is {manifest.root_key}, and here it is {key}: the spec, the base, an archive, a "
                "database or the driver is another one, so its answers may be wrong here.",
            )  # fmt: skip
        await self._tasks.require_room(task, spec, key)
        return spec

    async def _write(self, task: str, manifest: Manifest, spec: EnvironmentSpec, file: Path) -> None:
        draft = self._store.draft(manifest.nodes, manifest.records)
        try:
            with file.open("rb") as reading:
                items = content(reading)
                while part := await asyncio.to_thread(_some, items):
                    self._store.write_draft(draft, part)
            await self._tasks.adopt(task, spec, manifest.root_key, draft)
        except BaseException:
            self._store.drop_draft(draft.tree)
            raise


def _checked(file: Path, scratch: Path) -> Manifest:
    with file.open("rb") as reading:
        return check(reading, scratch)


def _some(items: Iterator[Part | Line]) -> list[Part | Line]:
    return list(islice(items, _SLICE))
