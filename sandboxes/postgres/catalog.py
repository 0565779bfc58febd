"""Queries of the system catalogs: digests of the schema, the sequences and the tables' rows, and counts of changes.

An agent can make objects with any name, and decides by `search_path` which one a name means. So all queries here run
under `plain`; the driver's other queries name everything with its schema.
"""

import contextlib
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import psycopg
from psycopg import pq

CatalogConnection = psycopg.Connection[Any]

SMALL_BYTES = 256 << 10
"""Tables up to this size are read whole after each change."""
MAX_BYTES = 64 << 20
"""Of larger tables, only the numbers of changed rows are used: finding the rows takes a second for each GB."""

EQUALS = "OPERATOR(pg_catalog.=)"
"""Equality whatever operators the agent has made. `IN`, `<>` and `CASE x WHEN` have no such form."""

PLAIN = """SET LOCAL search_path = pg_catalog, pg_temp; SET LOCAL role TO DEFAULT; SET LOCAL row_security = off;
SET LOCAL statement_timeout = 0; SET LOCAL lock_timeout = 0; SET LOCAL idle_in_transaction_session_timeout = 0;
SET LOCAL client_encoding TO DEFAULT; SET LOCAL standard_conforming_strings = on;
SET LOCAL quote_all_identifiers = off; SET LOCAL transform_null_equals = off;
SET LOCAL DateStyle = 'ISO, MDY'; SET LOCAL TimeZone = 'UTC'; SET LOCAL IntervalStyle = 'postgres';
SET LOCAL bytea_output = 'hex'; SET LOCAL extra_float_digits = 1; SET LOCAL lc_monetary = 'C';
SET LOCAL enable_seqscan = on; SET LOCAL enable_indexscan = off; SET LOCAL enable_indexonlyscan = off;
SET LOCAL enable_bitmapscan = off; SET LOCAL enable_tidscan = off; SET LOCAL synchronize_seqscans = off;
SET LOCAL max_parallel_workers_per_gather = 0"""
"""Settings under which the driver reads, whatever the agent has set. They end with the transaction. They decide which
objects a name means (temporary ones come last), which rows are shown and in which order, and how values are written."""


@contextlib.contextmanager
def plain(connection: CatalogConnection) -> Iterator[None]:
    """Apply `PLAIN` to queries of the driver, and restore the agent's settings. A transaction must not have failed."""
    idle = connection.info.transaction_status == pq.TransactionStatus.IDLE
    connection.execute("BEGIN ISOLATION LEVEL READ COMMITTED READ ONLY" if idle else "SAVEPOINT forkpoint")
    try:
        # A message of its own: the server reads the text of a message under the settings before it.
        connection.execute(PLAIN)
        yield
    finally:
        if idle:
            connection.execute("ROLLBACK")
        else:
            connection.execute("ROLLBACK TO SAVEPOINT forkpoint; RELEASE SAVEPOINT forkpoint")


_USER_SCHEMAS = "n.nspname NOT IN ('pg_catalog', 'information_schema') AND n.nspname !~ '^pg_(toast|temp)'"

_ACL = "coalesce(regexp_replace({}::text, 'forkpoint_[0-9a-f]+_agent', 'agent', 'g'), '')"
"""Access rights without the instance's prefix, so that equal states of two instances have equal digests."""

_SCHEMA = (
    f"""SELECT 'relation', n.nspname, c.relname, c.relkind::text, c.relpersistence::text,
        coalesce(c.reloptions::text, ''), {_ACL.format('c.relacl')},
        concat_ws(' ', c.relrowsecurity, c.relforcerowsecurity, c.relreplident, c.reloftype::regtype, c.relispopulated),
        coalesce(pg_get_partkeydef(c.oid), ''), coalesce(pg_get_expr(c.relpartbound, c.oid), '')
    FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
    WHERE {_USER_SCHEMAS} AND c.relkind <> 'i'""",
    f"""SELECT 'column', n.nspname, c.relname, a.attnum::text, a.attname, format_type(a.atttypid, a.atttypmod),
        concat_ws(' ', a.attnotnull, a.attidentity, a.attgenerated, a.attstorage, a.attcompression, a.attislocal,
            a.attinhcount, a.attcollation::regcollation),
        concat_ws(' ', a.attstattarget, a.attoptions, a.attfdwoptions),
        coalesce(pg_get_expr(d.adbin, d.adrelid), ''), {_ACL.format('a.attacl')}
    FROM pg_catalog.pg_attribute a JOIN pg_catalog.pg_class c ON c.oid = a.attrelid
    JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
    LEFT JOIN pg_catalog.pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
    WHERE {_USER_SCHEMAS} AND a.attnum > 0""",
    f"""SELECT 'constraint', n.nspname, c.conname, c.conrelid::regclass::text, pg_get_constraintdef(c.oid),
        c.convalidated::text, c.contypid::regtype::text, '', '', ''
    FROM pg_catalog.pg_constraint c JOIN pg_catalog.pg_namespace n ON n.oid = c.connamespace WHERE {_USER_SCHEMAS}""",
    f"""SELECT 'index', n.nspname, c.relname, pg_get_indexdef(c.oid), i.indisclustered::text, i.indisreplident::text,
        i.indisvalid::text, '', '', '' FROM pg_catalog.pg_index i JOIN pg_catalog.pg_class c ON c.oid = i.indexrelid
    JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace WHERE {_USER_SCHEMAS}""",
    f"""SELECT 'view', n.nspname, c.relname, pg_get_viewdef(c.oid), '', '', '', '', '', ''
    FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
    WHERE {_USER_SCHEMAS} AND c.relkind IN ('v', 'm')""",
    f"""SELECT 'function', n.nspname, p.proname, pg_get_function_identity_arguments(p.oid),
        coalesce(pg_get_function_result(p.oid), ''), p.prosrc, {_ACL.format('p.proacl')},
        CASE WHEN p.prokind IN ('f', 'p') THEN pg_get_functiondef(p.oid) ELSE p.provolatile::text END, '', ''
    FROM pg_catalog.pg_proc p JOIN pg_catalog.pg_namespace n ON n.oid = p.pronamespace WHERE {_USER_SCHEMAS}""",
    """SELECT 'trigger', tgrelid::regclass::text, tgname, pg_get_triggerdef(oid), tgenabled::text, '', '', '', '', ''
    FROM pg_catalog.pg_trigger WHERE NOT tgisinternal""",
    f"""SELECT 'type', n.nspname, t.typname, t.typtype::text, format_type(t.typbasetype, t.typtypmod),
        coalesce((SELECT string_agg(quote_literal(e.enumlabel), ',' ORDER BY e.enumsortorder)
            FROM pg_catalog.pg_enum e WHERE e.enumtypid = t.oid), ''), coalesce(t.typdefault, ''),
        concat_ws(' ', t.typnotnull, t.typcollation::regcollation), {_ACL.format('t.typacl')}, ''
    FROM pg_catalog.pg_type t JOIN pg_catalog.pg_namespace n ON n.oid = t.typnamespace
    WHERE {_USER_SCHEMAS} AND t.typtype <> 'c'""",
    f"""SELECT 'schema', n.nspname, {_ACL.format('n.nspacl')}, '', '', '', '', '', '', ''
    FROM pg_catalog.pg_namespace n WHERE {_USER_SCHEMAS}""",
    "SELECT 'extension', extname, extversion, '', '', '', '', '', '', '' FROM pg_catalog.pg_extension",
    """SELECT 'rule or policy', schemaname, tablename, rulename, definition, '', '', '', '', '' FROM pg_catalog.pg_rules
    WHERE schemaname NOT IN ('pg_catalog', 'information_schema')""",
    """SELECT 'disabled rule', ev_class::regclass::text, rulename, ev_enabled::text, '', '', '', '', '', ''
    FROM pg_catalog.pg_rewrite WHERE ev_enabled <> 'O'""",
    """SELECT 'rule or policy', schemaname, tablename, policyname, coalesce(qual, ''), coalesce(with_check, ''), cmd,
        roles::text, permissive, '' FROM pg_catalog.pg_policies""",
    f"""SELECT 'large object', oid::text, md5(lo_get(oid)), {_ACL.format('lomacl')}, '', '', '', '', '', ''
    FROM pg_catalog.pg_largeobject_metadata""",
    """SELECT 'comment', t.type, t.identity, d.description, '', '', '', '', '', ''
    FROM pg_catalog.pg_description d, pg_catalog.pg_identify_object(d.classoid, d.objoid, d.objsubid) t
    WHERE d.objoid >= 16384 AND d.classoid <> 'pg_extension'::regclass""",
)  # fmt: skip

_SEQUENCES = """SELECT format('%I.%I', schemaname, sequencename), schemaname || '.' || sequencename,
    data_type::text, start_value, min_value, max_value, increment_by, cycle, cache_size, last_value
    FROM pg_catalog.pg_sequences WHERE schemaname !~ '^pg_temp' ORDER BY 2"""

_SIZE = """CASE WHEN has_table_privilege(c.oid, 'SELECT') AND NOT row_security_active(c.oid)
        THEN pg_relation_size(c.oid) ELSE 9223372036854775807 END"""
"""The size of a table in bytes. One whose rows are kept from its owner counts as too large to read."""

_TABLES = f"""SELECT format('%I.%I', n.nspname, c.relname), {_SIZE}
    FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
    WHERE {_USER_SCHEMAS} AND c.relkind IN ('r', 'm') AND c.relispopulated AND c.relpersistence <> 't' ORDER BY 1"""

_COUNTS = f"""SELECT format('%I.%I', n.nspname, c.relname), {_SIZE},
        s.n_tup_ins, s.n_tup_upd, s.n_tup_del
    FROM pg_catalog.pg_stat_xact_user_tables s JOIN pg_catalog.pg_class c ON c.oid = s.relid
    JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
    WHERE s.n_tup_ins + s.n_tup_upd + s.n_tup_del > 0 AND {_USER_SCHEMAS} AND c.relpersistence <> 't'"""

_SYSTEM_COUNTS = """SELECT relname, n_tup_ins + n_tup_upd + n_tup_del FROM pg_catalog.pg_stat_xact_sys_tables
    WHERE schemaname = 'pg_catalog' AND n_tup_ins + n_tup_upd + n_tup_del > 0"""
STATISTICS = {"pg_statistic", "pg_statistic_ext_data"}
"""The system tables that ANALYZE writes."""
DESCRIBED = {
    "pg_class", "pg_attribute", "pg_attrdef", "pg_constraint", "pg_index", "pg_rewrite", "pg_proc", "pg_trigger",
    "pg_type", "pg_enum", "pg_namespace", "pg_extension", "pg_policy", "pg_largeobject", "pg_largeobject_metadata",
    "pg_description", "pg_sequence", "pg_partitioned_table", "pg_depend", "pg_shdepend",
}  # fmt: skip
"""The system tables whose rows `_SCHEMA` and `sequences` describe, and those that only say what depends on what."""


def digest_of(rows: Iterable[Any]) -> str:
    """Return the digest of rows of text, regardless of their order."""
    digest = hashlib.blake2b(digest_size=32)
    # Sorted, because the catalogs' physical order depends on history.
    for row in sorted("\0".join(map(str, row)) for row in rows):
        digest.update(row.encode() + b"\1")
    return digest.hexdigest()


def schema_digest(connection: CatalogConnection) -> str:
    """Return the digest of the schema as users see it, without object ids."""
    return digest_of(row for query in _SCHEMA for row in connection.execute(query))


def sequences(connection: CatalogConnection) -> dict[str, str]:
    """Return all that decides each sequence's next value, by name."""
    rows = connection.execute(_SEQUENCES).fetchall()
    facts = {row[1]: list(row[2:]) for row in rows}
    # Before its first use a sequence has no last value in `pg_sequences`, but its next value may have been set by
    # `setval(…, false)` or `RESTART WITH`. Only the sequence itself shows it.
    unused = [(quoted, name) for quoted, name, *_, last in rows if last is None]
    if unused:
        values = connection.execute(" UNION ALL ".join(f"SELECT last_value FROM {quoted}" for quoted, _ in unused))
        for (_, name), (value,) in zip(unused, values, strict=True):
            if value != facts[name][1]:
                facts[name][-1] = f"next {value}"
    return {name: "|".join(map(str, members)) for name, members in facts.items()}


def tables(connection: CatalogConnection) -> list[tuple[str, int]]:
    """Return the tables and materialized views: their quoted names with schema, and their sizes in bytes."""
    return [(str(name), int(size)) for name, size in connection.execute(_TABLES)]


RowCounts = dict[str, tuple[int, ...]]
"""Size in bytes and numbers of inserted, updated and deleted rows, by table."""


def counts(connection: CatalogConnection) -> RowCounts:
    """Return how many rows the session changed in user tables, in this transaction and perhaps in earlier ones."""
    # The server accumulates counts over transactions until it reports them. Only the difference of two readings within
    # one transaction is meaningful.
    return {str(row[0]): tuple(row[1:]) for row in connection.execute(_COUNTS)}


def system_counts(connection: CatalogConnection) -> dict[str, int]:
    """Return how many rows of each system table the session changed. Only differences are meaningful."""
    # A change of these tables is one of the schema, unless they are all `STATISTICS`.
    return {str(name): int(count) for name, count in connection.execute(_SYSTEM_COUNTS)}


def moved(before: Mapping[str, int], now: Mapping[str, int]) -> set[str]:
    """Return the system tables whose counts differ between two readings."""
    return {name for name in now if now[name] != before.get(name, 0)}


def table_digest(connection: CatalogConnection, table: str) -> list[str]:
    """Return two digests of a table's rows: in physical order, and in any order."""
    ordered = hashlib.blake2b(digest_size=32)
    rows = []
    with connection.cursor() as cursor, cursor.copy(f"COPY (SELECT * FROM ONLY {table}) TO STDOUT") as copy:
        for row in copy:
            data = bytes(row)
            ordered.update(data)
            rows.append(hashlib.blake2b(data, digest_size=16).digest())
    return [ordered.hexdigest(), hashlib.blake2b(b"".join(sorted(rows)), digest_size=32).hexdigest()]


def rows_since(connection: CatalogConnection, table: str, transaction: int) -> str:
    """Return the digest of the rows that a transaction or a later one wrote."""
    digest = hashlib.blake2b(digest_size=32)
    # Transaction ids wrap around, so compare ages (PostgreSQL's manual, 25.1.5).
    since = f"pg_catalog.age(t.xmin) <= pg_catalog.age('{transaction % (1 << 32)}'::pg_catalog.xid)"
    with (
        connection.cursor() as cursor,
        cursor.copy(f"COPY (SELECT * FROM ONLY {table} t WHERE {since}) TO STDOUT") as copy,
    ):
        for row in copy:
            digest.update(bytes(row))
    return digest.hexdigest()


_NAMED = f"({_USER_SCHEMAS} OR n.oid = pg_catalog.pg_my_temp_schema())"
"""Schemas whose objects a statement may use: the users', and the session's own temporary ones."""
_READ_OBJECTS = (
    # Some bodies are in no `prosrc`, and a parameter's default is in none.
    f"""SELECT p.proname, CASE WHEN a.aggfnoid IS NULL
        THEN concat_ws(E'\\nset ', p.prosrc, CASE WHEN p.prokind <> 'w' THEN pg_get_functiondef(p.oid) END,
            array_to_string(p.proconfig, E'\\nset '))
        ELSE concat_ws(' ', aggtransfn, aggfinalfn, aggcombinefn, aggmtransfn, aggminvtransfn, aggmfinalfn) END
    FROM pg_catalog.pg_proc p JOIN pg_catalog.pg_namespace n ON n.oid = p.pronamespace
    LEFT JOIN pg_catalog.pg_aggregate a ON a.aggfnoid = p.oid
    LEFT JOIN pg_catalog.pg_depend d ON d.objid = p.oid AND d.deptype = 'e' WHERE {_NAMED} AND d.objid IS NULL""",
    # Of an extension's functions in C nothing is known but that they may return something else each time.
    """SELECT p.proname, 'gen_random_uuid()' FROM pg_catalog.pg_proc p JOIN pg_catalog.pg_depend d ON d.objid = p.oid
    JOIN pg_catalog.pg_language l ON l.oid = p.prolang
    WHERE d.deptype = 'e' AND d.classid = 'pg_proc'::regclass AND p.provolatile = 'v' AND l.lanname = 'c'""",
    """SELECT t.typname, c.castfunc::regproc FROM pg_catalog.pg_cast c
    JOIN pg_catalog.pg_type t ON t.oid IN (c.castsource, c.casttarget) WHERE c.oid >= 16384""",
    f"""SELECT c.relname, pg_get_viewdef(c.oid) FROM pg_catalog.pg_class c
    JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
    WHERE {_NAMED} AND c.relkind IN ('v', 'm')""",
    f"""SELECT o.oprname, o.oprcode::text FROM pg_catalog.pg_operator o
    JOIN pg_catalog.pg_namespace n ON n.oid = o.oprnamespace WHERE {_NAMED}""",
    "SELECT tablename, concat_ws(' ', qual, with_check) FROM pg_catalog.pg_policies",
)
_WRITE_OBJECTS = (
    f"""SELECT c.relname, pg_get_expr(d.adbin, d.adrelid) FROM pg_catalog.pg_attrdef d
    JOIN pg_catalog.pg_class c ON c.oid = d.adrelid
    JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace WHERE {_NAMED}""",
    """SELECT c.relname, pg_get_expr(t.typdefaultbin, 0) FROM pg_catalog.pg_attribute a
    JOIN pg_catalog.pg_class c ON c.oid = a.attrelid
    JOIN pg_catalog.pg_type t ON t.oid = a.atttypid WHERE t.typdefaultbin IS NOT NULL""",
    """SELECT c.relname, pg_get_triggerdef(t.oid) FROM pg_catalog.pg_trigger t
    JOIN pg_catalog.pg_class c ON c.oid = t.tgrelid
    WHERE NOT t.tgisinternal""",
    # A table's rows are those of its partitions, and some foreign keys change the rows that refer to it.
    """SELECT p.relname, c.relname FROM pg_catalog.pg_inherits i
    JOIN pg_catalog.pg_class p ON p.oid = i.inhparent JOIN pg_catalog.pg_class c ON c.oid = i.inhrelid""",
    """SELECT c.relname, pg_get_triggerdef(t.oid) FROM pg_catalog.pg_constraint k
    JOIN pg_catalog.pg_class c ON c.oid = k.confrelid
    JOIN pg_catalog.pg_trigger t ON t.tgrelid = k.conrelid AND NOT t.tgisinternal
    WHERE concat(k.confdeltype, k.confupdtype) ~ '[cnd]'""",
    """SELECT tablename, definition FROM pg_catalog.pg_rules
    WHERE schemaname NOT IN ('pg_catalog', 'information_schema')""",
)
"""Names, as they are, with what a statement that has them may run."""


def definitions(connection: CatalogConnection, *, writing: bool) -> dict[str, str]:
    """Return the definitions of user objects that a statement may use without naming what they contain."""
    # `writing` includes what runs when a table is written to: defaults, triggers and rules.
    texts: dict[str, str] = {}
    for query in _READ_OBJECTS + _WRITE_OBJECTS if writing else _READ_OBJECTS:
        for name, text in connection.execute(query):
            texts[name.lower()] = f"{texts.get(name.lower(), '')}\n{text}"
    return texts
