"""The tools `tables`, `schema` and `compare`, which run statements of their own."""

from collections.abc import Callable, Hashable
from decimal import Decimal

from sandboxes.postgres.catalog import EQUALS, CatalogConnection
from sandboxes.postgres.statement import PostgresOutcome
from sandboxes.sql.results import Failure, RowCollector, comparison, failure, other, success
from sandboxes.sql.values import Value

EXPLAIN = "EXPLAIN "
"""Prefix that turns a statement into its plan."""
MAX_COMPARED = 100_000
"""Limit of rows that `compare` reads of each query, and `explain` of a plan."""

_OF_USERS = f"""NOT (n.nspname {EQUALS} 'pg_catalog' OR n.nspname {EQUALS} 'information_schema'
        OR pg_catalog.starts_with(n.nspname::pg_catalog.text, 'pg_toast'))
      AND c.relkind {EQUALS} ANY ('{{r,p,v,m,f}}'::pg_catalog."char"[])"""

_TABLES = f"""SELECT n.nspname, c.relname, CASE WHEN c.relkind {EQUALS} 'r' THEN 'table'
        WHEN c.relkind {EQUALS} 'p' THEN 'partitioned table' WHEN c.relkind {EQUALS} 'v' THEN 'view'
        WHEN c.relkind {EQUALS} 'm' THEN 'materialized view' ELSE 'foreign table' END
    FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid {EQUALS} c.relnamespace
    WHERE {_OF_USERS} ORDER BY 1, 2"""

_SCHEMA = f"""SELECT n.nspname, c.relname, a.attname, pg_catalog.format_type(a.atttypid, a.atttypmod),
        NOT a.attnotnull, pg_catalog.pg_get_expr(d.adbin, d.adrelid),
        (SELECT pg_catalog.string_agg(pg_catalog.pg_get_constraintdef(k.oid), '; ' ORDER BY k.conname)
         FROM pg_catalog.pg_constraint k WHERE k.conrelid {EQUALS} c.oid AND a.attnum {EQUALS} ANY (k.conkey))
    FROM pg_catalog.pg_attribute a JOIN pg_catalog.pg_class c ON c.oid {EQUALS} a.attrelid
    JOIN pg_catalog.pg_namespace n ON n.oid {EQUALS} c.relnamespace
    LEFT JOIN pg_catalog.pg_attrdef d ON d.adrelid {EQUALS} a.attrelid AND d.adnum {EQUALS} a.attnum
    WHERE {_OF_USERS} AND a.attnum OPERATOR(pg_catalog.>) 0 AND NOT a.attisdropped
      AND (%s::pg_catalog.text IS NULL OR c.relname {EQUALS} %s
        OR pg_catalog.concat(n.nspname, '.', c.relname) {EQUALS} %s) ORDER BY 1, 2, a.attnum"""

COLUMNS = {
    "tables": ["schema", "name", "kind"],
    "schema": ["schema", "table", "column", "type", "nullable", "default", "constraints"],
}
"""Column names of the results."""


def listing(connection: CatalogConnection, tool: str, table: str | None, output_bytes: int) -> bytes:
    """Return the result of `tables`, or of `schema` for one table or (None) for all."""
    query, values = (_TABLES, None) if tool == "tables" else (_SCHEMA, (table, table, table))
    catalog_rows = connection.execute(query, values)
    rows = RowCollector(MAX_COMPARED, output_bytes).add_all([list(row) for row in catalog_rows])
    if table is not None and not rows.rows:
        return failure(Failure(f"there is no table {table!r}; `tables` lists what there is"))
    return success(COLUMNS[tool], rows)


def compare(read: Callable[[str], PostgresOutcome], sql: str, gold: str, *, ordered: bool) -> bytes:
    """Return the result of `compare`: whether the queries `sql` and `gold` return the same rows in this state."""
    outcomes = {"sql": read(sql), "gold": read(gold)}
    for name, outcome in outcomes.items():
        if outcome.failure is not None:
            break
        if outcome.rows.truncated:
            limit = Failure(f"{name} has more rows than compare looks at", "limit")
            return other({"match": None, "why": "too many rows", "error": limit.to_json() | {"of": name}})
    # So that equal numbers are equal in every notation, as for the server: 1, 1.0 and 1.00.
    rows = {name: [tuple(map(_number, row)) for row in outcome.rows.rows] for name, outcome in outcomes.items()}
    errors = {name: outcome.failure for name, outcome in outcomes.items()}
    return comparison(rows, errors, ordered=ordered)


def _number(value: Value) -> Hashable:
    match value:
        case {"decimal": text}:
            return Decimal(text)
        case float():
            # Compare the shortest decimal: the float 0.1 equals the decimal 0.10.
            return Decimal(repr(value))
        case dict():
            return tuple(value.items())
    return value
