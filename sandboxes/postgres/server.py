"""The administrator's side of one PostgreSQL server: databases are cloned, dropped and looked after here, and nothing
of an agent's runs here. With `postgres_engine`, the one door to psycopg.
"""

import asyncio
import contextlib
import hashlib
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from sandboxes.errors import SandboxError, SpecError
from sandboxes.postgres.catalog import PLAIN
from sandboxes.postgres.digest import DatabaseDigest, whole

CONNECT_S = 10
_MAKING_AT_ONCE = 2
_STEADY = {"synchronize_seqscans": "off", "max_parallel_workers_per_gather": "0", "jit": "off"}
"""With these, a statement without ORDER BY gives its rows in the same order each time."""
_SETTINGS = [
    "server_version", "TimeZone", "DateStyle", "IntervalStyle", "lc_messages", "lc_monetary", "lc_numeric", "lc_time",
    "default_text_search_config", "bytea_output", "extra_float_digits", "standard_conforming_strings",
]  # fmt: skip
"""What, beside the database, decides how the server answers."""

_TAKE_OVER = """
DO $body$
DECLARE
    owner text := {owner};
    o record;
BEGIN
    FOR o IN
        SELECT format('ALTER SCHEMA %I OWNER TO %I', nspname, owner) AS command FROM pg_namespace n
        WHERE nspname !~ '^pg_' AND nspname NOT IN ('information_schema', 'public')
          AND NOT EXISTS (SELECT 1 FROM pg_depend d WHERE d.objid = n.oid AND d.deptype = 'e')
        UNION ALL
        SELECT format('ALTER %s %I.%I OWNER TO %I', CASE relkind WHEN 'v' THEN 'VIEW' WHEN 'm' THEN
            'MATERIALIZED VIEW' WHEN 'S' THEN 'SEQUENCE' ELSE 'TABLE' END, nspname, relname, owner)
        FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
        WHERE nspname !~ '^pg_' AND nspname <> 'information_schema' AND relkind IN ('r', 'p', 'v', 'm', 'S')
          AND NOT EXISTS (SELECT 1 FROM pg_depend d WHERE d.objid = c.oid AND d.deptype IN ('e', 'a', 'i')
                          AND (d.deptype = 'e' OR relkind = 'S') AND d.classid = 'pg_class'::regclass)
        UNION ALL
        SELECT format('ALTER ROUTINE %s OWNER TO %I', p.oid::regprocedure, owner)
        FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
        WHERE nspname !~ '^pg_' AND nspname <> 'information_schema'
          AND NOT EXISTS (SELECT 1 FROM pg_depend d WHERE d.objid = p.oid AND d.deptype = 'e')
        UNION ALL
        SELECT format('ALTER TYPE %s OWNER TO %I', t.oid::regtype, owner)
        FROM pg_type t JOIN pg_namespace n ON n.oid = t.typnamespace LEFT JOIN pg_class c ON c.oid = t.typrelid
        WHERE nspname !~ '^pg_' AND nspname <> 'information_schema' AND typelem = 0
          AND typtype IN ('b', 'd', 'e', 'r', 'c') AND (t.typrelid = 0 OR c.relkind = 'c')
          AND NOT EXISTS (SELECT 1 FROM pg_depend d WHERE d.objid = t.oid AND d.deptype IN ('e', 'i'))
        UNION ALL
        SELECT format('ALTER LARGE OBJECT %s OWNER TO %I', oid, owner) FROM pg_largeobject_metadata
        UNION ALL
        SELECT format('DROP USER MAPPING FOR %I SERVER %I', usename, srvname) FROM pg_user_mappings
        UNION ALL
        SELECT format('REVOKE ALL ON %I.%I FROM PUBLIC', nspname, relname)
        FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE relkind = 'f'
    LOOP
        EXECUTE o.command;
    END LOOP;
END
$body$
"""
"""Gives all that users made to the agents' role. What lies behind foreign servers is outside, and is closed."""


@dataclass(frozen=True, slots=True)
class DatabaseSettings:
    """What a source database has beside its content: settings of its own, which a clone does not inherit."""

    own: tuple[tuple[str, str], ...]


class PostgresServer:
    """One server, as a DSN names it. prefix: begins the name of every role and database that this instance makes."""

    def __init__(self, dsn: str, prefix: str, password: str) -> None:
        self.dsn, self.prefix, self._password = dsn, prefix, password
        self.agent = f"{prefix}_agent"
        self._ready = asyncio.Lock()
        self._connection: psycopg.AsyncConnection[Any] | None = None
        self._using = asyncio.Lock()
        self._making = asyncio.Semaphore(_MAKING_AT_ONCE)

    @property
    def where(self) -> str:
        """The server without its password, for messages."""
        try:
            given = conninfo_to_dict(self.dsn)
        except psycopg.Error:
            return "this DSN"
        return f"{given.get('host', 'the local socket')}:{given.get('port', 5432)}"

    def agent_dsn(self, database: str) -> str:
        """Return what an agent's connection to a database is made with."""
        return make_conninfo(
            self.dsn, dbname=database, user=self.agent, password=self._password, connect_timeout=CONNECT_S
        )

    async def aclose(self) -> None:
        """Close the administrator's connection."""
        if self._connection is not None:
            await self._connection.close()
            self._connection = None

    # -- one statement at a time -------------------------------------------------------------------------------------

    async def rows(self, query: str | sql.Composed, values: Iterable[Any] = ()) -> list[tuple[Any, ...]]:
        """Run one administrator's statement on the server's maintenance database and return its rows."""
        async with self._using:
            connection = await self._connected()
            try:
                cursor = await connection.execute(query, tuple(values) or None)
                return await cursor.fetchall() if cursor.description else []
            except psycopg.OperationalError:
                if connection.closed or connection.broken:
                    self._connection = None
                raise

    async def _connected(self) -> psycopg.AsyncConnection[Any]:
        if self._connection is None or self._connection.closed:
            self._connection = await self.connect()
            await self._make_role(self._connection)
        return self._connection

    async def connect(self, database: str | None = None) -> psycopg.AsyncConnection[Any]:
        """Return an administrator's connection of its own.

        Raises:
            SpecError: the DSN cannot be used.
        """
        try:
            named = {"dbname": database} if database else {}
            dsn = make_conninfo(self.dsn, connect_timeout=CONNECT_S, application_name="forkpoint", **named)
            return await psycopg.AsyncConnection.connect(dsn, autocommit=True, prepare_threshold=None)
        except psycopg.Error as error:
            raise SpecError(
                f"PostgreSQL at {self.where} cannot be reached: {str(error).strip()}. Look at host, port, user, "
                "password and pg_hba.conf."
            ) from error

    async def _make_role(self, connection: psycopg.AsyncConnection[Any]) -> None:
        """Make the role that agents' statements run under, or give the one there is the password of this instance."""
        role, password = sql.Identifier(self.agent), sql.Literal(self._password)
        rights = sql.SQL("LOGIN NOSUPERUSER NOCREATEDB NOCREATEROLE NOREPLICATION PASSWORD {}").format(password)
        try:
            there = await (
                await connection.execute("SELECT 1 FROM pg_roles WHERE rolname = %s", (self.agent,))
            ).fetchone()
            verb = sql.SQL("ALTER ROLE {} {}" if there else "CREATE ROLE {} {}")
            await connection.execute(verb.format(role, rights))
            for setting, value in _STEADY.items():
                change = sql.SQL("ALTER ROLE {} SET {} = {}").format(role, sql.Identifier(setting), sql.Literal(value))
                await connection.execute(change)
            superuser = await (
                await connection.execute("SELECT rolsuper FROM pg_roles WHERE rolname = user")
            ).fetchone()
            if not (superuser and superuser[0]):
                await connection.execute(sql.SQL("GRANT {} TO CURRENT_USER").format(role))
        except psycopg.Error as error:
            raise SpecError(
                f"the user of the DSN for {self.where} cannot make the role that agents run under: {error}. Give it "
                "CREATEDB and CREATEROLE, or use a superuser."
            ) from error

    # -- databases ---------------------------------------------------------------------------------------------------

    async def databases(self) -> list[str]:
        """Return the databases that this instance made."""
        found = await self.rows(
            "SELECT datname FROM pg_database WHERE starts_with(datname, %s) ORDER BY 1", (f"{self.prefix}_",)
        )
        return [str(row[0]) for row in found]

    async def clone(self, source: str, kind: str, settings: DatabaseSettings) -> str:
        """Clone a database and return the clone's name. 0.1 s for 15 MB on two cores with fsync off.

        Raises:
            SpecError: source is not there, or is in use by others.
            SandboxError: the server failed: its disk is full, say.
        """
        name = f"{self.prefix}_{kind}_{secrets.token_hex(6)}"
        command = sql.SQL("CREATE DATABASE {} TEMPLATE {} OWNER {}").format(
            sql.Identifier(name), sql.Identifier(source), sql.Identifier(self.agent)
        )
        async with self._making:
            await self._copy(command, source)
        for setting, value in settings.own:
            change = sql.SQL("ALTER DATABASE {} SET {} = {}").format(
                sql.Identifier(name), sql.Identifier(setting), sql.Literal(value)
            )
            await self.rows(change)
        return name

    async def _copy(self, command: sql.Composed, source: str) -> None:
        # On a connection of its own: it takes as long as the copying takes, and nobody else should wait for that.
        connection = await self.connect()
        try:
            await connection.execute(command)
        except psycopg.errors.ObjectInUse as error:
            # The server has waited for 5 s.
            raise SpecError(
                f"database {source!r} at {self.where} has other sessions, so PostgreSQL cannot clone it now. Close "
                "them, or name a copy (createdb --template) as source."
            ) from error
        except psycopg.errors.InvalidCatalogName as error:
            raise SpecError(
                f"there is no database {source!r} at {self.where}. `psql -l` lists what there is."
            ) from error
        except psycopg.errors.InsufficientPrivilege as error:
            raise SpecError(f"database {source!r} at {self.where} may not be cloned by this user: {error}") from error
        except psycopg.Error as error:
            raise SandboxError(f"a clone of {source!r} at {self.where} failed: {str(error).strip()}") from error
        finally:
            await connection.close()

    async def take_over(self, database: str) -> None:
        """Give all that users made in a database to the agents' role, and close its ways out of the server."""
        connection = await self.connect(database)
        try:
            await connection.execute(sql.SQL(_TAKE_OVER).format(owner=sql.Literal(self.agent)))
        except psycopg.Error as error:
            raise SpecError(
                f"the objects of the database cannot be given to the agents' role: {str(error).strip()}. Use a "
                "superuser's DSN, or one that owns them all."
            ) from error
        finally:
            await connection.close()

    async def freeze(self, database: str) -> None:
        """Let nobody connect to a database any more, so that it can be cloned at any moment."""
        await self.rows(sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS false").format(sql.Identifier(database)))

    async def drop(self, database: str) -> None:
        """Drop a database that this instance made, whoever is connected; one that is gone already is none."""
        assert database.startswith(self.prefix + "_")
        with contextlib.suppress(psycopg.Error, SpecError):
            connection = await self.connect()
            try:
                await connection.execute(
                    sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(database))
                )
            finally:
                await connection.close()

    async def size_bytes(self, database: str) -> int:
        """Return what a database holds on the server's disk; 0 where it is gone."""
        found = await self.rows("SELECT pg_database_size(oid) FROM pg_database WHERE datname = %s", (database,))
        return int(found[0][0]) if found else 0

    async def end(self, name: str) -> None:
        """End the connections that have this application name, or this process id."""
        ours = "starts_with(datname, %s) AND (application_name = %s OR pid::text = %s)"
        with contextlib.suppress(psycopg.Error, SpecError):
            await self.rows(
                f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {ours}", (f"{self.prefix}_", name, name)
            )

    async def settings_of(self, source: str) -> DatabaseSettings:
        """Return the settings that a database has of its own."""
        found = await self.rows(
            "SELECT unnest(setconfig) FROM pg_db_role_setting s JOIN pg_database d ON d.oid = s.setdatabase "
            "WHERE d.datname = %s AND s.setrole = 0",
            (source,),
        )
        pairs = (str(row[0]).partition("=") for row in found)
        return DatabaseSettings(tuple((name, value) for name, _, value in pairs))

    async def fingerprint(self, source: str) -> str:
        """Return what changes whenever the content of a database does (and sometimes else). 1 ms.

        A session counts its changes late, but before it leaves `pg_stat_activity` (since PostgreSQL 15; earlier ones
        half a second after): who is still there, and what it did last, is part of it, and is asked first.

        Raises:
            SpecError: there is no such database, or no server.
        """
        sessions = await self.rows(
            "SELECT pid, backend_start, state_change, query_start FROM pg_stat_activity "
            "WHERE datname = %s AND pid <> pg_backend_pid() ORDER BY pid",
            (source,),
        )
        # A user without pg_read_all_stats sees that others are there, not what they do.
        unsure = secrets.token_hex(8) if any(session[1] is None for session in sessions) else ""
        found = await self.rows(
            "SELECT d.oid, s.tup_inserted, s.tup_updated, s.tup_deleted, pg_database_size(d.oid) FROM pg_database d "
            "JOIN pg_stat_database s ON s.datid = d.oid WHERE d.datname = %s",
            (source,),
        )
        if not found:
            raise SpecError(f"there is no database {source!r} at {self.where}. `psql -l` lists what there is.")
        told = (found, sessions, unsure, await self.ways(source))
        return hashlib.blake2b(repr(told).encode(), digest_size=16).hexdigest()

    async def ways(self, source: str) -> str:
        """Return the digest of what decides how the server answers, beside the content of the database."""
        told = await self.rows("SELECT name, setting FROM pg_settings WHERE name = ANY(%s) ORDER BY 1", (_SETTINGS,))
        own = (await self.settings_of(source)).own
        return hashlib.blake2b(repr((told, own)).encode(), digest_size=16).hexdigest()

    async def digest(self, database: str) -> DatabaseDigest:
        """Return the digest of a whole database, read in a thread."""
        return await asyncio.to_thread(_digest, make_conninfo(self.dsn, dbname=database))


def _digest(dsn: str) -> DatabaseDigest:
    with psycopg.connect(dsn, autocommit=True) as connection, connection.transaction():
        connection.execute(PLAIN)
        return whole(connection)
