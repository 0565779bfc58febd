"""The digest of a PostgreSQL database, updated as the database changes.

Theory of operation. Two states with equal digests share recorded results, so unequal content must give unequal digests.
Reading everything after each statement would be too slow, so tables are treated by size:

1. *Small tables* (`catalog.SMALL_BYTES`) are read whole after each change. The digest depends on the content only.
2. *Large tables* share one `chain`: a hash of their initial content, extended by what each transaction did: the rows
   that it wrote, and the statement if rows are gone. It depends on history: an undone change costs a hit.
3. A table that was once large stays in the chain. Moving it back would make its history disappear.
4. The schema and the sequences are read from the catalogs.

Each small table has two digests, the two parts of a `StateDigest`: in physical order, which statements without ORDER BY
can see (exact), and in any order (content).
"""

import hashlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import orjson

from sandboxes.effects import StateDigest
from sandboxes.postgres import catalog
from sandboxes.postgres.catalog import CatalogConnection, RowCounts


@dataclass(frozen=True, slots=True)
class DatabaseDigest:
    """The digest of a database's content."""

    schema: str
    sequences: dict[str, str]  # All that decides each sequence's next value, by name.
    tables: dict[str, list[str]]  # Two digests of each small table: in physical order, and in any order.
    chain: str = ""  # Digest of the large tables and of their changes, in hexadecimal; empty if there are none.
    # Names of the tables in the chain, sorted. A table that shrinks stays there.
    chained: list[str] = field(default_factory=list)

    def state(self) -> StateDigest:
        """Return the digest of the state: exact, and regardless of the physical order of rows."""
        members = asdict(self)
        return StateDigest(_hash(members), _hash(members | {"tables": {name: d[1] for name, d in self.tables.items()}}))

    def extended(self, *changes: Any) -> "DatabaseDigest":
        """Return the digest after changes to large tables."""
        return replace(self, chain=_hash([self.chain, *changes]).hex())


def whole(connection: CatalogConnection) -> DatabaseDigest:
    """Read a whole database and return its digest."""
    small, large = {}, []
    for table, size in catalog.tables(connection):
        digests = catalog.table_digest(connection, table)
        if size > catalog.SMALL_BYTES:
            large.append([table, *digests])
        else:
            small[table] = digests
    schema, sequences = catalog.schema_digest(connection), catalog.sequences(connection)
    chain = _hash(large).hex() if large else ""
    return DatabaseDigest(schema, sequences, small, chain, sorted(table for table, *_ in large))


def after_transaction(
    connection: CatalogConnection,
    before: DatabaseDigest,
    changed: RowCounts,
    *,
    transaction: int,
    schema: bool,
    statement: str,
) -> DatabaseDigest:
    """Return the digest that a complete, still open transaction will leave when it commits.

    `changed` has the size and the numbers of inserted, updated and deleted rows of each table. `statement` names the
    call with its parameters, and stands for changes of large tables that their rows do not show.
    """
    if schema:
        return _read_again(connection, before, statement, changed, transaction)
    tables, folds, chained = dict(before.tables), [], set(before.chained)
    for table, (size, *_) in sorted(changed.items()):
        if table in chained or size > catalog.SMALL_BYTES:
            folds.append(_fold(connection, before, statement, table, changed[table], transaction))
            tables.pop(table, None)
            chained.add(table)
        else:
            tables[table] = catalog.table_digest(connection, table)
    now = replace(before, tables=tables, chained=sorted(chained), sequences=catalog.sequences(connection))
    return now.extended(folds) if folds else now


def after_unobserved(
    connection: CatalogConnection, before: DatabaseDigest, statement: str, *, large: bool
) -> DatabaseDigest:
    """Return the digest after unobserved transactions; the statement's text stands for changes of `large` tables."""
    return _read_again(connection, before, statement if large else "", {}, None)


def _read_again(
    connection: CatalogConnection, before: DatabaseDigest, statement: str, changed: RowCounts, transaction: int | None
) -> DatabaseDigest:
    """Read the schema and every small table again. Extend the chain by the statement and the rows that it wrote."""
    tables, chained, folds = {}, set(), []
    for table, size in catalog.tables(connection):
        if table in before.chained or size > catalog.SMALL_BYTES:
            chained.add(table)
            if table in before.tables or (transaction is not None and table in changed):
                counts = changed.get(table, (size, 0, 0, 0))
                folds.append(_fold(connection, before, statement, table, counts, transaction))
        else:
            tables[table] = catalog.table_digest(connection, table)
    schema, sequences = catalog.schema_digest(connection), catalog.sequences(connection)
    now = DatabaseDigest(schema, sequences, tables, before.chain, sorted(chained.union(before.chained)))
    # Without large tables the whole state has been read, and the statement adds nothing.
    return now.extended(statement, folds) if folds or (statement and (chained or before.chained)) else now


def _fold(
    connection: CatalogConnection, before: DatabaseDigest, statement: str, table: str, counts: tuple[int, ...],
    transaction: int | None,
) -> list[Any]:  # fmt: skip
    size, inserted, *replaced = counts
    read = transaction is not None and size <= catalog.MAX_BYTES
    rows = catalog.rows_since(connection, table, transaction) if read and transaction is not None else ""
    # The inserted rows say all that an INSERT did. Which rows are gone is known by the statement alone.
    named = "" if read and not any(replaced) else statement
    return [table, inserted, replaced, rows, named, before.tables.get(table, [])]


def _hash(value: Any) -> bytes:
    return hashlib.blake2b(orjson.dumps(value, option=orjson.OPT_SORT_KEYS), digest_size=32).digest()


def combined(states: Iterable[tuple[str, StateDigest]]) -> StateDigest:
    """Combine the digests of several databases, given by name."""
    exact, content = hashlib.blake2b(digest_size=32), hashlib.blake2b(digest_size=32)
    for name, state in sorted(states, key=lambda pair: pair[0]):
        exact.update(name.encode() + b"\0" + state.exact)
        content.update(name.encode() + b"\0" + state.content)
    return StateDigest(exact.digest(), content.digest())
