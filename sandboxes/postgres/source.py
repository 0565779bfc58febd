"""A source database and its clone: what changes with a source, and how its clone becomes a root state."""

import asyncio
import hashlib
import secrets

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo

from sandboxes.errors import SpecError
from sandboxes.postgres.catalog import PLAIN
from sandboxes.postgres.digest import DatabaseDigest, whole
from sandboxes.postgres.server import DatabaseSettings, PostgresServer

_SETTINGS = [
    "server_version", "TimeZone", "DateStyle", "IntervalStyle", "lc_messages", "lc_monetary", "lc_numeric", "lc_time",
    "default_text_search_config", "bytea_output", "extra_float_digits", "standard_conforming_strings",
]  # fmt: skip
"""Settings that decide how the server answers, besides the content of the database."""

_TAKE_OVER = """
DO $body$
DECLARE
    owner text := {owner};
    o record;
BEGIN
    FOR o IN
        SELECT format('ALTER SCHEMA %I OWNER TO %I', nspname, owner) AS command FROM pg_catalog.pg_namespace n
        WHERE nspname !~ '^pg_' AND nspname <> 'information_schema'
          AND (nspname <> 'public' OR pg_has_role(nspowner, 'MEMBER'))
          AND NOT EXISTS (SELECT 1 FROM pg_catalog.pg_depend d WHERE d.objid = n.oid AND d.deptype = 'e')
        UNION ALL
        SELECT format('ALTER %s %I.%I OWNER TO %I', CASE relkind WHEN 'v' THEN 'VIEW' WHEN 'm' THEN
            'MATERIALIZED VIEW' WHEN 'S' THEN 'SEQUENCE' ELSE 'TABLE' END, nspname, relname, owner)
        FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
        WHERE nspname !~ '^pg_' AND nspname <> 'information_schema' AND relkind IN ('r', 'p', 'v', 'm', 'S')
          AND NOT EXISTS (SELECT 1 FROM pg_catalog.pg_depend d WHERE d.objid = c.oid AND d.deptype IN ('e', 'a', 'i')
                          AND (d.deptype = 'e' OR relkind = 'S') AND d.classid = 'pg_class'::regclass)
        UNION ALL
        SELECT format('ALTER ROUTINE %s OWNER TO %I', p.oid::regprocedure, owner)
        FROM pg_catalog.pg_proc p JOIN pg_catalog.pg_namespace n ON n.oid = p.pronamespace
        WHERE nspname !~ '^pg_' AND nspname <> 'information_schema'
          AND NOT EXISTS (SELECT 1 FROM pg_catalog.pg_depend d WHERE d.objid = p.oid AND d.deptype = 'e')
        UNION ALL
        SELECT format('ALTER TYPE %s OWNER TO %I', t.oid::regtype, owner)
        FROM pg_catalog.pg_type t JOIN pg_catalog.pg_namespace n ON n.oid = t.typnamespace
        LEFT JOIN pg_catalog.pg_class c ON c.oid = t.typrelid
        WHERE nspname !~ '^pg_' AND nspname <> 'information_schema' AND typelem = 0
          AND typtype IN ('b', 'd', 'e', 'r', 'c') AND (t.typrelid = 0 OR c.relkind = 'c')
          AND NOT EXISTS (SELECT 1 FROM pg_catalog.pg_depend d WHERE d.objid = t.oid AND d.deptype IN ('e', 'i'))
        UNION ALL
        SELECT format('ALTER LARGE OBJECT %s OWNER TO %I', oid, owner) FROM pg_catalog.pg_largeobject_metadata
        UNION ALL
        SELECT format('DROP USER MAPPING FOR %I SERVER %I', usename, srvname) FROM pg_catalog.pg_user_mappings
        UNION ALL
        SELECT format('REVOKE ALL ON %I.%I FROM PUBLIC', nspname, relname)
        FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace WHERE relkind = 'f'
    LOOP
        EXECUTE o.command;
    END LOOP;
END
$body$
"""
"""Gives all objects that users created to the agents' role. Foreign tables lead outside the server and are closed. The
schema `public` belongs to the owner of the database since PostgreSQL 15. Before that everybody could create in it."""


async def settings_of(server: PostgresServer, source: str) -> DatabaseSettings:
    """Return the settings of a database."""
    rows = await server.rows(
        "SELECT unnest(setconfig) FROM pg_catalog.pg_db_role_setting s "
        "JOIN pg_catalog.pg_database d ON d.oid = s.setdatabase WHERE d.datname = %s AND s.setrole = 0",
        (source,),
    )
    pairs = (str(row[0]).partition("=") for row in rows)
    return tuple((name, value) for name, _, value in pairs)


async def fingerprint_of(server: PostgresServer, source: str) -> str:
    """Return a value that changes whenever the content of a database does, and sometimes otherwise."""
    # A session reports its changes late, but before it leaves `pg_stat_activity` (half a second after, before
    # PostgreSQL 15). So the sessions, and what they did last, are part of the value, and they are read before the
    # counters of changed rows.
    sessions = await server.rows(
        "SELECT pid, backend_start, state_change, query_start FROM pg_catalog.pg_stat_activity "
        "WHERE datname = %s AND pid <> pg_backend_pid() ORDER BY pid",
        (source,),
    )
    # A user without pg_read_all_stats sees that other sessions exist, but not what they do: assume a change.
    unsure = secrets.token_hex(8) if any(session[1] is None for session in sessions) else ""
    counters = await server.rows(
        "SELECT d.oid, s.tup_inserted, s.tup_updated, s.tup_deleted, pg_database_size(d.oid) "
        "FROM pg_catalog.pg_database d JOIN pg_catalog.pg_stat_database s ON s.datid = d.oid WHERE d.datname = %s",
        (source,),
    )
    if not counters:
        raise SpecError(f"there is no database {source!r} at {server.where}. `psql -l` lists what there is.")
    parts = (counters, sessions, unsure, await behaviour_of(server, source))
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


async def behaviour_of(server: PostgresServer, source: str) -> str:
    """Return a digest of the settings that decide how the server answers."""
    settings = await server.rows(
        "SELECT name, setting FROM pg_catalog.pg_settings WHERE name = ANY(%s) ORDER BY 1", (_SETTINGS,)
    )
    return hashlib.blake2b(repr((settings, await settings_of(server, source))).encode(), digest_size=16).hexdigest()


async def read_digest(server: PostgresServer, database: str) -> DatabaseDigest:
    """Read a whole database in a thread, and return its digest. Raises SpecError if a policy hides rows."""
    try:
        return await asyncio.to_thread(_digest, make_conninfo(server.dsn, dbname=database))
    except psycopg.errors.InsufficientPrivilege as error:
        raise SpecError(
            f"the database cannot be read as a whole: {str(error).strip()}. Use a superuser's DSN."
        ) from error


async def take_over(server: PostgresServer, database: str) -> None:
    """Give all objects of a database to the agents' role, and close foreign tables and servers."""
    connection = await server.connect(database)
    try:
        await connection.execute(sql.SQL(_TAKE_OVER).format(owner=sql.Literal(server.agent)))
    except psycopg.Error as error:
        raise SpecError(
            f"the objects of the database cannot be given to the agents' role: {str(error).strip()}. Use a "
            "superuser's DSN, or one that owns them all."
        ) from error
    finally:
        await connection.close()


def _digest(dsn: str) -> DatabaseDigest:
    with psycopg.connect(dsn, autocommit=True) as connection, connection.transaction():
        connection.execute(PLAIN)
        return whole(connection)
