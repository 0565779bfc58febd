"""The administrator's connection to a PostgreSQL server: creates, clones and drops databases.

Statements of agents never run here. They run in workers, as a role without privileges.
"""

import asyncio
import contextlib
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from sandboxes.errors import SandboxError, SpecError

CONNECT_S = 10
"""Time limit in seconds for connecting to a server."""
_MAX_COPIES = 2
"""Databases that are copied at once. Copies compete for the server's disk."""
_DETERMINISTIC = {"synchronize_seqscans": "off", "max_parallel_workers_per_gather": "0", "jit": "off"}
"""Settings with which a statement without ORDER BY returns its rows in the same order each time."""


@dataclass(frozen=True, slots=True)
class DatabaseSettings:
    """Settings of a source database (`ALTER DATABASE … SET`), which a clone does not inherit.

    Attributes:
        own: Pairs of name and value.
    """

    own: tuple[tuple[str, str], ...]


class PostgresServer:
    """One PostgreSQL server.

    Attributes:
        dsn: Connection string of the administrator.
        prefix: Start of the name of every role and database that this instance creates.
        agent: The role that agents' statements run as.
    """

    def __init__(self, dsn: str, prefix: str, password: str) -> None:
        self.dsn, self.prefix, self._password = dsn, prefix, password
        self.agent = f"{prefix}_agent"
        self._connection: psycopg.AsyncConnection[Any] | None = None
        self._busy = asyncio.Lock()
        self._copying = asyncio.Semaphore(_MAX_COPIES)

    @property
    def where(self) -> str:
        """Host and port of the server, for messages."""
        try:
            parts = conninfo_to_dict(self.dsn)
        except psycopg.Error:
            return "this DSN"
        return f"{parts.get('host', 'the local socket')}:{parts.get('port', 5432)}"

    def agent_dsn(self, database: str) -> str:
        """Return the connection string for the agents' role and a database."""
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
        async with self._busy:
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
        """Open a new connection of the administrator.

        Args:
            database: Name of the database; None for the one that the DSN names.

        Raises:
            SpecError: The server cannot be reached with the DSN.
        """
        try:
            more = {"dbname": database} if database else {}
            dsn = make_conninfo(self.dsn, connect_timeout=CONNECT_S, application_name="forkpoint", **more)
            return await psycopg.AsyncConnection.connect(dsn, autocommit=True, prepare_threshold=None)
        except psycopg.Error as error:
            raise SpecError(
                f"PostgreSQL at {self.where} cannot be reached: {str(error).strip()}. Check host, port, user, "
                "password and pg_hba.conf."
            ) from error

    async def _make_role(self, connection: psycopg.AsyncConnection[Any]) -> None:
        """Create the role that agents' statements run as, or give an existing one this instance's password."""
        role, password = sql.Identifier(self.agent), sql.Literal(self._password)
        rights = sql.SQL("LOGIN NOSUPERUSER NOCREATEDB NOCREATEROLE NOREPLICATION PASSWORD {}").format(password)
        try:
            exists = await (
                await connection.execute("SELECT 1 FROM pg_roles WHERE rolname = %s", (self.agent,))
            ).fetchone()
            verb = sql.SQL("ALTER ROLE {} {}" if exists else "CREATE ROLE {} {}")
            await connection.execute(verb.format(role, rights))
            for setting, value in _DETERMINISTIC.items():
                change = sql.SQL("ALTER ROLE {} SET {} = {}").format(role, sql.Identifier(setting), sql.Literal(value))
                await connection.execute(change)
            superuser = await (
                await connection.execute("SELECT rolsuper FROM pg_roles WHERE rolname = user")
            ).fetchone()
            if not (superuser and superuser[0]):
                await connection.execute(sql.SQL("GRANT {} TO CURRENT_USER").format(role))
        except psycopg.Error as error:
            raise SpecError(
                f"the user of the DSN for {self.where} cannot create the role that agents run as: {error}. Give it "
                "CREATEDB and CREATEROLE, or use a superuser."
            ) from error

    # -- databases ---------------------------------------------------------------------------------------------------

    async def databases(self) -> list[str]:
        """Return the names of the databases that this instance created."""
        rows = await self.rows(
            "SELECT datname FROM pg_database WHERE starts_with(datname, %s) ORDER BY 1", (f"{self.prefix}_",)
        )
        return [str(row[0]) for row in rows]

    async def clone(self, source: str, kind: str, settings: DatabaseSettings) -> str:
        """Clone a database. 0.1 s for 15 MB on two cores with fsync off.

        Args:
            source: Name of the database to clone. It must have no sessions.
            kind: Part of the clone's name: root, state, read, fork or spare.
            settings: Settings to give to the clone.

        Returns:
            The name of the clone.

        Raises:
            SpecError: The source does not exist, or has sessions.
            SandboxError: The server failed, for example because its disk is full.
        """
        name = f"{self.prefix}_{kind}_{secrets.token_hex(6)}"
        command = sql.SQL("CREATE DATABASE {} TEMPLATE {} OWNER {}").format(
            sql.Identifier(name), sql.Identifier(source), sql.Identifier(self.agent)
        )
        async with self._copying:
            await self._copy(command, source)
        for setting, value in settings.own:
            change = sql.SQL("ALTER DATABASE {} SET {} = {}").format(
                sql.Identifier(name), sql.Identifier(setting), sql.Literal(value)
            )
            await self.rows(change)
        return name

    async def _copy(self, command: sql.Composed, source: str) -> None:
        # A connection of its own: copying may take seconds, and the shared one must stay free for short statements.
        connection = await self.connect()
        try:
            await connection.execute(command)
        except psycopg.errors.ObjectInUse as error:
            # The server itself has waited 5 s for the sessions to end.
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

    async def freeze(self, database: str) -> None:
        """Refuse all connections to a database, so that it can be cloned at any time."""
        await self.rows(sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS false").format(sql.Identifier(database)))

    async def drop(self, database: str) -> None:
        """Drop a database that this instance created, even if it has sessions. Idempotent; failures are ignored."""
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
        """Return the size of a database on the server's disk; 0 if it does not exist."""
        rows = await self.rows("SELECT pg_database_size(oid) FROM pg_database WHERE datname = %s", (database,))
        return int(rows[0][0]) if rows else 0

    async def end(self, name: str) -> None:
        """End the sessions of this instance that have an application name or a process id."""
        ours = "starts_with(datname, %s) AND (application_name = %s OR pid::text = %s)"
        with contextlib.suppress(psycopg.Error, SpecError):
            await self.rows(
                f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {ours}", (f"{self.prefix}_", name, name)
            )
