"""The administrator's connection to a PostgreSQL server: creates, clones and drops databases.

Theory of operation. Statements of agents run in workers, as a role without privileges. Roles belong to the server and
not to a database, so a role that all agents shared would join their sandboxes. So there are two kinds of roles:

1. The *agents' role* owns the objects in all clones, so that their owners have the same name everywhere. Nobody can log
   in as it, so its password and settings mean nothing.
2. Each clone that is connected to has a *login* of the same name, which no other database accepts. Its sessions act as
   the agents' role. It goes when the clone goes.

The administrator owns the databases. Each connection begins with a login as it was made (`admit`).
"""

import asyncio
import contextlib
import secrets
from collections.abc import Mapping, Sequence
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

_ROLE_EXISTS = "SELECT 1 FROM pg_catalog.pg_roles WHERE rolname = %s"
_CREATE_AGENT = sql.SQL("CREATE ROLE {} NOLOGIN NOINHERIT NOSUPERUSER NOCREATEDB NOCREATEROLE NOREPLICATION")
_CREATE_LOGIN = sql.SQL("CREATE ROLE {} LOGIN PASSWORD {} NOINHERIT NOSUPERUSER NOCREATEDB NOCREATEROLE NOREPLICATION")
# Of a role that exists, only a superuser may name the other rights. No agent can give them to itself.
_CHANGE_LOGIN = sql.SQL("ALTER ROLE {} LOGIN PASSWORD {}")


DatabaseSettings = tuple[tuple[str, str], ...]
"""Settings of a source database (`ALTER DATABASE … SET`), as pairs. A clone does not inherit them."""


class PostgresServer:
    """One PostgreSQL server, by the administrator's `dsn`. Names of our roles and databases begin with `prefix`."""

    def __init__(self, dsn: str, prefix: str, password: str) -> None:
        self.dsn, self.prefix, self._password = dsn, prefix, password
        # The role that agents' statements run as, and that owns the objects in all clones.
        self.agent = f"{prefix}_agent"
        self._connection: psycopg.AsyncConnection[Any] | None = None
        self._is_superuser = False
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
        """Return the connection string for a clone and its login."""
        return make_conninfo(
            self.dsn, dbname=database, user=database, password=self._password, connect_timeout=CONNECT_S
        )

    async def aclose(self) -> None:
        """Close the administrator's connection."""
        if self._connection is not None:
            await self._connection.close()
            self._connection = None

    # -- one statement at a time -------------------------------------------------------------------------------------

    async def rows(
        self, query: str | sql.Composed, values: Sequence[Any] | Mapping[str, Any] = ()
    ) -> list[tuple[Any, ...]]:
        """Run one administrator's statement on the server's maintenance database and return its rows."""
        async with self._busy:
            connection = await self._connected()
            try:
                cursor = await connection.execute(query, values or None)
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
        """Open a new connection of the administrator: to a database, else to the one that the DSN names."""
        try:
            more = {"dbname": database} if database else {}
            dsn = make_conninfo(self.dsn, connect_timeout=CONNECT_S, application_name="forkpoint", **more)
            connection = await psycopg.AsyncConnection.connect(dsn, autocommit=True, prepare_threshold=None)
            # Names mean the server's objects, whatever a source defines.
            await connection.execute("SET search_path = pg_catalog, pg_temp")
        except psycopg.Error as error:
            raise SpecError(
                f"PostgreSQL at {self.where} cannot be reached: {str(error).strip()}. Check host, port, user, "
                "password and pg_hba.conf."
            ) from error
        return connection

    async def _make_role(self, connection: psycopg.AsyncConnection[Any]) -> None:
        role = sql.Identifier(self.agent)
        try:
            if not await (await connection.execute(_ROLE_EXISTS, (self.agent,))).fetchone():
                await connection.execute(_CREATE_AGENT.format(role))
            superuser = await (
                await connection.execute("SELECT rolsuper FROM pg_catalog.pg_roles WHERE rolname = user")
            ).fetchone()
            self._is_superuser = bool(superuser and superuser[0])
            if not self._is_superuser:
                await connection.execute(sql.SQL("GRANT {} TO CURRENT_USER").format(role))
        except psycopg.Error as error:
            raise SpecError(
                f"the user of the DSN for {self.where} cannot create the role that agents run as: {error}. Give it "
                "CREATEDB and CREATEROLE, or use a superuser."
            ) from error

    # -- databases ---------------------------------------------------------------------------------------------------

    async def databases(self) -> list[str]:
        """Return the names of the databases that this instance created, and of logins whose databases are gone."""
        rows = await self.rows(
            "SELECT datname FROM pg_catalog.pg_database WHERE starts_with(datname, %(prefix)s) UNION "
            "SELECT rolname FROM pg_catalog.pg_roles "
            "WHERE starts_with(rolname, %(prefix)s) AND rolname <> %(agent)s ORDER BY 1",
            {"prefix": f"{self.prefix}_", "agent": self.agent},
        )
        return [str(row[0]) for row in rows]

    async def clone(self, source: str, kind: str, settings: DatabaseSettings) -> str:
        """Clone a database without sessions and return its name, with `kind`: root, state, read, fork or spare."""
        name = f"{self.prefix}_{kind}_{secrets.token_hex(6)}"
        command = sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(sql.Identifier(name), sql.Identifier(source))
        async with self._copying:
            await self._copy(command, source)
        for setting, value in settings:
            change = sql.SQL("ALTER DATABASE {} SET {} = {}").format(
                sql.Identifier(name), sql.Identifier(setting), sql.Literal(value)
            )
            await self.rows(change)
        return name

    async def admit(self, database: str) -> None:
        """Before a connection, give a clone a login that only it accepts, or make the login as it was."""
        # An agent can change the password and the settings of its own login.
        login, agent = sql.Identifier(database), sql.Identifier(self.agent)
        # Never the agents' role: a transaction of an agent that changes it would hold up everybody.
        statements = [sql.SQL("ALTER ROLE {} RESET ALL").format(login)]
        for setting, value in {"role": self.agent, **_DETERMINISTIC}.items():
            change = sql.SQL("ALTER ROLE {} SET {} = {}").format(login, sql.Identifier(setting), sql.Literal(value))
            statements.append(change)
        # At each connection: `DROP OWNED` in the last session may have taken rights away.
        statements += [
            sql.SQL("GRANT {} TO {}").format(agent, login),
            # By all, because an agent can revoke what its own role was granted, in all clones at once (DROP OWNED).
            sql.SQL("GRANT CREATE ON DATABASE {} TO PUBLIC").format(login),
            sql.SQL("REVOKE CONNECT ON DATABASE {} FROM PUBLIC").format(login),
            sql.SQL("GRANT CONNECT ON DATABASE {} TO {}").format(login, login),
        ]
        if not self._is_superuser:
            # Only a member of a role may end its sessions.
            statements.append(sql.SQL("GRANT {} TO CURRENT_USER").format(login))
        try:
            exists = await self.rows(_ROLE_EXISTS, (database,))
            make = (_CHANGE_LOGIN if exists else _CREATE_LOGIN).format(login, sql.Literal(self._password))
            await self.rows(sql.SQL("; ").join([make, *statements]))
        except psycopg.Error as error:
            raise SandboxError(f"a login for a clone at {self.where} failed: {str(error).strip()}") from error

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
        """Drop a database that this instance created, and its login. Idempotent; sessions end, failures are ignored."""
        assert database.startswith(self.prefix + "_")
        with contextlib.suppress(psycopg.Error, SpecError):
            connection = await self.connect()
            try:
                await connection.execute(
                    sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(database))
                )
                # It fails if templates have objects of the login. The next start tries again.
                await connection.execute(sql.SQL("DROP ROLE IF EXISTS {}").format(sql.Identifier(database)))
            finally:
                await connection.close()

    async def size_bytes(self, database: str) -> int:
        """Return the size of a database on the server's disk; 0 if it does not exist."""
        rows = await self.rows(
            "SELECT pg_database_size(oid) FROM pg_catalog.pg_database WHERE datname = %s", (database,)
        )
        return int(rows[0][0]) if rows else 0

    async def end(self, name: str) -> None:
        """End the sessions of this instance that have an application name or a process id."""
        ours = "starts_with(datname, %s) AND (application_name = %s OR pid::text = %s)"
        with contextlib.suppress(psycopg.Error, SpecError):
            await self.rows(
                f"SELECT pg_terminate_backend(pid) FROM pg_catalog.pg_stat_activity WHERE {ours}",
                (f"{self.prefix}_", name, name),
            )
