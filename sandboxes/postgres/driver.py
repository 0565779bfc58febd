"""The `postgres` driver: a sandbox is a database on a server of the user's, cloned when somebody first writes."""

import asyncio
import contextlib
import hashlib
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import orjson
import structlog

from sandboxes.driver import FrozenState
from sandboxes.errors import SpecError, StateGoneError
from sandboxes.linux.dir_lock import Ownership
from sandboxes.postgres.clones import Clones, Template
from sandboxes.postgres.digest import DatabaseDigest
from sandboxes.postgres.sandbox import DatabasePosition, PostgresSandbox
from sandboxes.postgres.server import DatabaseSettings, PostgresServer
from sandboxes.spec import Database, EnvironmentSpec
from sandboxes.workers.pool import WorkerPool

log = structlog.get_logger()

VERSION = 1
"""Part of every identity: raise it when equal calls would give other answers or other digests than before."""
SPARES = 2


class PostgresDriver:
    """See `sandboxes.driver.Driver`. Every role and database that it makes on a server begins with its own prefix."""

    name = "postgres"

    def __init__(self, data_dir: Path, *, spares: int = SPARES) -> None:
        self.data_dir = data_dir.resolve()
        self.worker_pool = WorkerPool("postgres", self.data_dir, network=True)
        self.clones = Clones(self.worker_pool, spares)
        self.live: set[PostgresSandbox] = set()
        self._notes = self.data_dir / "instance.json"
        self._note: dict[str, Any] = {}
        self._servers: dict[str, PostgresServer] = {}
        self._templates: dict[str, Template] = {}
        self._sources: dict[tuple[str, str], tuple[str, Template, str]] = {}
        self._rooting = asyncio.Lock()
        self._ownership = Ownership(self.data_dir)

    # -- life --------------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """See `Driver.open`. What was left on a server that cannot be reached now stays until the next start.

        Raises:
            SandboxError: another process uses this data directory, or no worker can be started.
        """
        self.data_dir.mkdir(parents=True, exist_ok=True)
        self.data_dir.chmod(0o700)
        self._ownership.acquire()
        try:
            self._note = self._read_note()
            await self.worker_pool.open()
            for dsn in self._note["servers"]:
                with contextlib.suppress(SpecError):
                    await self._sweep(self._server(dsn))
        except BaseException:
            await self.aclose()
            raise

    def _read_note(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError):
            note: dict[str, Any] = orjson.loads(self._notes.read_bytes())
            return note
        return {"prefix": f"forkpoint_{secrets.token_hex(5)}", "password": secrets.token_urlsafe(24), "servers": {}}

    def _write_note(self) -> None:
        part = self._notes.with_suffix(".part")
        part.touch(mode=0o600)
        part.write_bytes(orjson.dumps(self._note))
        part.replace(self._notes)

    async def _sweep(self, server: PostgresServer) -> None:
        """Drop what a killed instance left on a server, and take up the templates that it had finished."""
        known: dict[str, Any] = self._note["servers"][server.dsn]["templates"]
        for name in await server.databases():
            if name not in known:
                await server.drop(name)
            elif name not in self._templates:
                self._take_up(server, name, known[name])
        for name in [name for name in known if name not in self._templates]:
            del known[name]

    def _take_up(self, server: PostgresServer, name: str, told: dict[str, Any]) -> None:
        template = Template(
            server,
            name,
            DatabaseDigest.from_json(told["digest"]),
            DatabaseSettings(tuple(map(tuple, told["settings"]))),
            tuple(told["touched"]),
            told["size_bytes"],
        )
        self._templates[name] = template
        if told["source"]:
            source, fingerprint, ways = told["source"]
            self._sources[server.dsn, source] = (fingerprint, template, ways)

    async def aclose(self) -> None:
        """See `Driver.aclose`. Idempotent."""
        await asyncio.gather(*(sandbox.close() for sandbox in list(self.live)))
        await self.clones.aclose(list(self._templates.values()))
        await self.worker_pool.aclose()
        for server in self._servers.values():
            await server.aclose()
        self._servers.clear()
        self._ownership.release()

    def _server(self, dsn: str) -> PostgresServer:
        server = self._servers.get(dsn)
        if server is None:
            server = self._servers[dsn] = PostgresServer(dsn, self._note["prefix"], self._note["password"])
            if dsn not in self._note["servers"]:
                self._note["servers"][dsn] = {"templates": {}}
                self._write_note()
        return server

    # -- root states -------------------------------------------------------------------------------------------------

    async def identity(self, spec: EnvironmentSpec) -> str:
        """See `Driver.identity`. A millisecond for a source that did not change; else it is cloned and read once."""
        digest = hashlib.blake2b(f"postgres\0{VERSION}".encode(), digest_size=32)
        for name, database in sorted(spec.databases.items()):
            template, ways = await self._root(database)
            digest.update(f"\0{name}\0{ways}\0".encode() + template.digest.state().exact)
        return digest.hexdigest()

    async def _root(self, database: Database) -> tuple[Template, str]:
        """Return the template of a source database as it is now, and the digest of how its server answers."""
        assert database.dsn is not None
        assert isinstance(database.source, str)
        server, source = self._server(database.dsn), database.source
        async with self._rooting:
            fingerprint = await server.fingerprint(source)
            known = self._sources.get((server.dsn, source))
            if known is not None and known[0] == fingerprint:
                return known[1], known[2]
            template, ways = await self._make_root(server, source), await server.ways(source)
            self._sources[server.dsn, source] = (fingerprint, template, ways)
            self._keep_note(template, [source, fingerprint, ways])
            return template, ways

    async def _make_root(self, server: PostgresServer, source: str) -> Template:
        settings = await server.settings_of(source)
        name = await server.clone(source, "root", settings)
        try:
            await server.take_over(name)
            digest = await server.digest(name)
            same = next((t for t in self._templates.values() if _same(t, server, digest, settings)), None)
            if same is not None:
                await server.drop(name)
                return same
            await server.freeze(name)
            template = Template(server, name, digest, settings, (), await server.size_bytes(name))
        except BaseException:
            await server.drop(name)
            raise
        self._templates[name] = template
        # The first who reads here should not wait for it.
        self.clones.later(self.clones.prepare(template))
        return template

    def _keep_note(self, template: Template, source: list[str] | None) -> None:
        told = {
            "digest": template.digest.to_json(), "settings": [list(pair) for pair in template.settings.own],
            "touched": list(template.touched), "size_bytes": template.size_bytes, "source": source,
        }  # fmt: skip
        self._note["servers"][template.server.dsn]["templates"][template.name] = told
        self._write_note()

    # -- sandboxes ---------------------------------------------------------------------------------------------------

    async def start(self, spec: EnvironmentSpec) -> PostgresSandbox:
        """See `Driver.start`. Nothing is cloned before somebody writes."""
        places = {}
        for name, database in spec.databases.items():
            template, _ = await self._root(database)
            self.clones.restock(template)
            places[name] = DatabasePosition(template)
        return self._enter(spec, places)

    async def restore(self, spec: EnvironmentSpec, frozen: FrozenState) -> PostgresSandbox:
        """See `Driver.restore`. Nothing is cloned before somebody reads or writes."""
        places = {}
        for name, part in frozen.payload["places"].items():
            template = self._templates.get(part)
            if template is None:
                raise StateGoneError(f"the database {part} of this state is gone; replay its path instead")
            places[name] = DatabasePosition(template)
        return self._enter(spec, places)

    def _enter(self, spec: EnvironmentSpec, places: dict[str, DatabasePosition]) -> PostgresSandbox:
        sandbox = PostgresSandbox(
            f"postgres-{secrets.token_hex(6)}", spec, places,
            clones=self.clones, worker_pool=self.worker_pool, keep=self._keep, closed=self.live.discard,
        )  # fmt: skip
        self.live.add(sandbox)
        return sandbox

    async def _keep(self, place: DatabasePosition) -> Template:
        """Freeze a copy of a sandbox's own database as a template, and say where it is."""
        origin, own = place.template, place.own
        assert own is not None
        name = await origin.server.clone(own.database, "state", origin.settings)
        try:
            await origin.server.freeze(name)
            size = await origin.server.size_bytes(name)
        except BaseException:
            await origin.server.drop(name)
            raise
        template = Template(origin.server, name, place.digest, origin.settings, place.touched, size)
        self._templates[name] = template
        self._keep_note(template, None)
        return template

    async def collect(self, keep: Iterable[str]) -> int:
        """See `Driver.collect`. Parts are frozen databases; those of sources stay while the source is the same."""
        kept = set(keep)
        used = {place.template.name for sandbox in self.live for place in sandbox.places.values()}
        used |= {template.name for _, template, _ in self._sources.values()}
        for name in [name for name in self._templates if name not in kept | used]:
            template = self._templates.pop(name)
            self._note["servers"][template.server.dsn]["templates"].pop(name, None)
            self._write_note()
            self.clones.retire(template)
        return sum(self._templates[name].size_bytes for name in kept if name in self._templates)


def _same(template: Template, server: PostgresServer, digest: DatabaseDigest, settings: DatabaseSettings) -> bool:
    return template.server is server and template.digest == digest and template.settings == settings
