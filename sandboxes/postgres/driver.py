"""The `postgres` driver: a sandbox is a database on the user's server, cloned when a rollout first writes."""

import asyncio
import contextlib
import hashlib
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import structlog

from sandboxes.driver import FrozenState
from sandboxes.errors import SpecError, StateGoneError
from sandboxes.linux.dir_lock import DirLock
from sandboxes.linux.files import write_whole
from sandboxes.postgres.clones import Clones, Template
from sandboxes.postgres.digest import DatabaseDigest
from sandboxes.postgres.sandbox import DatabasePosition, PostgresSandbox
from sandboxes.postgres.sequence_use import SequenceUse
from sandboxes.postgres.server import PostgresServer
from sandboxes.postgres.source import behaviour_of, fingerprint_of, read_digest, settings_of, take_over
from sandboxes.spec import Database, EnvironmentSpec
from sandboxes.workers.pool import WorkerPool

log = structlog.get_logger()

VERSION = 6
"""Part of every identity. Raise it when a change of the driver gives equal calls other results or other digests."""
SPARES = 2
"""Clones that wait for each template in use. Rollouts that first write at the same time take one each."""


class RootDatabase(NamedTuple):
    """The last known state of a source database."""

    fingerprint: str  # Changes whenever the source does (`source.fingerprint_of`).
    template: Template
    behaviour: str  # Digest of the server's settings (`source.behaviour_of`).


class PostgresDriver:
    """The driver for PostgreSQL databases.

    The names of all roles and databases that an instance creates on a server begin with the instance's own prefix.
    `instance.json` keeps that prefix, the logins' password and the templates, so that a restarted instance finds its
    states and drops the rest.
    """

    name = "postgres"
    state_version = str(VERSION)

    def __init__(self, data_dir: Path, *, spares: int = SPARES) -> None:
        self.data_dir = data_dir.resolve()
        self.worker_pool = WorkerPool("postgres", self.data_dir, network=True)
        self.clones = Clones(self.worker_pool, spares)
        self.sandboxes: set[PostgresSandbox] = set()
        self._instance_file = self.data_dir / "instance.json"
        self._instance: dict[str, Any] = {}
        self._servers: dict[str, PostgresServer] = {}
        self._templates: dict[str, Template] = {}
        self._roots: dict[tuple[str, str], RootDatabase] = {}
        self._rooting = asyncio.Lock()
        self._ownership = DirLock(self.data_dir)

    # -- lifetime ----------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Take the data directory, start the workers, and clean up after a killed instance on servers within reach."""
        self._ownership.acquire()
        try:
            self._instance = self._load_instance()
            await self.worker_pool.open()
            for dsn in self._instance["servers"]:
                with contextlib.suppress(SpecError):
                    await self._sweep(self._server(dsn))
        except BaseException:
            await self.aclose()
            raise

    async def trial(self) -> None:
        """Start a worker and end it, see `sandboxes.driver.TriedDriver`."""
        await self.worker_pool.trial()

    async def aclose(self) -> None:
        """Close all sandboxes, drop their clones and end all workers. Templates stay. Idempotent."""
        await asyncio.gather(*(sandbox.close() for sandbox in list(self.sandboxes)))
        await self.clones.aclose(list(self._templates.values()))
        await self.worker_pool.aclose()
        for server in self._servers.values():
            await server.aclose()
        self._servers.clear()
        self._ownership.release()

    async def _sweep(self, server: PostgresServer) -> None:
        """Drop what a killed instance left on a server, and register the templates that it had finished."""
        recorded: dict[str, Any] = self._instance["servers"][server.dsn]["templates"]
        for name in await server.databases():
            # Templates of earlier versions give the agents' role other rights.
            if name not in recorded or recorded[name].get("version") != VERSION:
                await server.drop(name)
            elif name not in self._templates:
                self._register(server, name, recorded[name])
        for name in [name for name in recorded if name not in self._templates]:
            del recorded[name]

    def _server(self, dsn: str) -> PostgresServer:
        server = self._servers.get(dsn)
        if server is None:
            server = self._servers[dsn] = PostgresServer(dsn, self._instance["prefix"], self._instance["password"])
            if dsn not in self._instance["servers"]:
                # Recorded before anything is created there, so that the next start knows where to clean up.
                self._instance["servers"][dsn] = {"templates": {}}
                self._save_instance()
        return server

    # -- instance.json -----------------------------------------------------------------------------------------------

    def _load_instance(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError):
            instance: dict[str, Any] = orjson.loads(self._instance_file.read_bytes())
            return instance
        return {"prefix": f"forkpoint_{secrets.token_hex(5)}", "password": secrets.token_urlsafe(24), "servers": {}}

    def _save_instance(self) -> None:
        write_whole(self._instance_file, orjson.dumps(self._instance))

    def _record(self, template: Template, source: list[str] | None) -> None:
        """Record a template. `source` is a root's source, fingerprint and behaviour; None for other states."""
        self._instance["servers"][template.server.dsn]["templates"][template.name] = {
            "digest": template.digest, "settings": template.settings, "sequence_use": template.sequence_use,
            "size_bytes": template.size_bytes, "root_bytes": template.root_bytes, "source": source, "version": VERSION,
        }  # fmt: skip
        self._save_instance()

    def _register(self, server: PostgresServer, name: str, record: dict[str, Any]) -> None:
        template = Template(
            server, name, DatabaseDigest(**record["digest"]), tuple(map(tuple, record["settings"])),
            SequenceUse(**record["sequence_use"]), record["size_bytes"], record["root_bytes"],
        )  # fmt: skip
        self._templates[name] = template
        if record["source"]:
            source, fingerprint, behaviour = record["source"]
            self._roots[server.dsn, source] = RootDatabase(fingerprint, template, behaviour)

    # -- root states -------------------------------------------------------------------------------------------------

    async def identity(self, spec: EnvironmentSpec) -> str:
        """Return the identity of a spec: quickly if its sources are unchanged; else each is cloned and read once."""
        digest = hashlib.blake2b(f"postgres\0{VERSION}".encode(), digest_size=32)
        for name, database in sorted(spec.databases.items()):
            root = await self._root(database)
            digest.update(f"\0{name}\0{root.behaviour}\0".encode() + root.template.digest.state().exact)
        return digest.hexdigest()

    async def _root(self, database: Database) -> RootDatabase:
        assert database.dsn is not None
        assert isinstance(database.source, str)
        server, source = self._server(database.dsn), database.source
        async with self._rooting:
            fingerprint = await fingerprint_of(server, source)
            root = self._roots.get((server.dsn, source))
            if root is None or root.fingerprint != fingerprint:
                template, behaviour = await self._make_root(server, source), await behaviour_of(server, source)
                root = self._roots[server.dsn, source] = RootDatabase(fingerprint, template, behaviour)
                self._record(template, [source, fingerprint, behaviour])
            return root

    async def _make_root(self, server: PostgresServer, source: str) -> Template:
        """Clone a source into a template, or return an equal template that exists."""
        settings = await settings_of(server, source)
        name = await server.clone(source, "root", settings)
        try:
            await take_over(server, name)
            digest = await read_digest(server, name)
            for template in self._templates.values():
                if template.server is server and template.digest == digest and template.settings == settings:
                    await server.drop(name)
                    return template
            await server.freeze(name)
            size_bytes = await server.size_bytes(name)
            template = Template(server, name, digest, settings, size_bytes=size_bytes, root_bytes=size_bytes)
        except BaseException:
            await server.drop(name)
            raise
        self._templates[name] = template
        # Every rollout starts here, so create the reader before the first of them needs it.
        self.clones.prepare(template)
        return template

    # -- sandboxes ---------------------------------------------------------------------------------------------------

    async def start(self, spec: EnvironmentSpec) -> PostgresSandbox:
        """Start a sandbox at the root state. Its first write creates a clone."""
        positions = {}
        for name, database in spec.databases.items():
            template = (await self._root(database)).template
            self.clones.restock(template)
            positions[name] = DatabasePosition(template)
        return self._adopt(spec, positions)

    async def restore(self, spec: EnvironmentSpec, frozen: FrozenState) -> PostgresSandbox:
        """Start a sandbox at a frozen state; its first read or write creates a clone."""
        positions = {}
        for name, part in frozen.payload["places"].items():
            template = self._templates.get(part)
            if template is None:
                raise StateGoneError(f"the database {part} of this state is gone; replay its path instead")
            positions[name] = DatabasePosition(template)
        return self._adopt(spec, positions)

    def _adopt(self, spec: EnvironmentSpec, positions: dict[str, DatabasePosition]) -> PostgresSandbox:
        sandbox = PostgresSandbox(
            f"postgres-{secrets.token_hex(6)}", spec, positions,
            clones=self.clones, worker_pool=self.worker_pool, save=self._save, on_close=self.sandboxes.discard,
        )  # fmt: skip
        self.sandboxes.add(sandbox)
        return sandbox

    async def _save(self, position: DatabasePosition) -> Template:
        origin, clone = position.template, position.clone
        assert clone is not None
        name = await origin.server.clone(clone.database, "state", origin.settings)
        try:
            await origin.server.freeze(name)
            size_bytes = await origin.server.size_bytes(name)
        except BaseException:
            await origin.server.drop(name)
            raise
        template = Template(
            origin.server, name, position.digest, origin.settings, position.sequence_use, size_bytes, origin.root_bytes
        )
        self._templates[name] = template
        self._record(template, None)
        return template

    async def collect(self, keep: Iterable[str]) -> int:
        """Drop the templates that neither `keep` names nor a sandbox or a source needs; return the bytes of `keep`."""
        kept = set(keep)
        used = {position.template.name for sandbox in self.sandboxes for position in sandbox.positions.values()}
        used |= {root.template.name for root in self._roots.values()}
        for name in [name for name in self._templates if name not in kept | used]:
            template = self._templates.pop(name)
            self._instance["servers"][template.server.dsn]["templates"].pop(name, None)
            self._save_instance()
            self.clones.retire(template)
        return sum(self._templates[name].size_bytes for name in kept if name in self._templates)
