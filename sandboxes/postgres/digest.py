"""The digest of a PostgreSQL database, kept up as it changes."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from sandboxes.effects import StateDigest
from sandboxes.postgres import catalog
from sandboxes.postgres.catalog import CatalogConnection, RowCounts


@dataclass(frozen=True, slots=True)
class DatabaseDigest:
    """What stands for a database's content.

    tables: of each small table, its digest in physical order and whatever the order. chain: of the larger ones, how
        they began and what each transaction did to them. chained: which those are; one that shrinks stays there.
    """

    schema: str
    sequences: dict[str, str]
    tables: dict[str, list[str]]
    chain: str = ""
    chained: frozenset[str] = field(default_factory=frozenset)

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": self.schema, "sequences": self.sequences, "tables": self.tables, "chain": self.chain,
            "chained": sorted(self.chained),
        }  # fmt: skip

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "DatabaseDigest":
        return cls(value["schema"], value["sequences"], value["tables"], value["chain"], frozenset(value["chained"]))

    def state(self) -> StateDigest:
        """Return the two names of this state."""
        told = self.to_json()
        return StateDigest(_hash(told), _hash(told | {"tables": {name: d[1] for name, d in self.tables.items()}}))

    def folded(self, *what: Any) -> "DatabaseDigest":
        """Return the digest after something happened to the larger tables."""
        return replace(self, chain=_hash([self.chain, *what]).hex())


def whole(connection: CatalogConnection) -> DatabaseDigest:
    """Return the digest of a database that nothing is known of yet. It is read as a whole: 40 ms for each MB."""
    small, large = {}, []
    for table, size in catalog.tables(connection):
        digests = catalog.table_digest(connection, table)
        if size > catalog.SMALL_BYTES:
            large.append([table, *digests])
        else:
            small[table] = digests
    schema, sequences = catalog.schema_digest(connection), catalog.sequences(connection)
    chain = _hash(large).hex() if large else ""
    return DatabaseDigest(schema, sequences, small, chain, frozenset(table for table, *_ in large))


def after_transaction(
    connection: CatalogConnection,
    before: DatabaseDigest,
    changed: RowCounts,
    *,
    transaction: int,
    schema: bool,
    told: str,
) -> DatabaseDigest:
    """Return the digest that a transaction under way leaves, all but done.

    changed: by table, its size and how many rows were inserted, updated and deleted. schema: whether the system's
    tables changed too. told: the statement, by which a change is known that rows do not show.
    """
    if schema:
        return _after_everything(connection, before, told, changed, transaction)
    tables, folds, chained = dict(before.tables), [], set(before.chained)
    for table, (size, *rows) in sorted(changed.items()):
        if table in chained or size > catalog.SMALL_BYTES:
            tables.pop(table, None)
            chained.add(table)
            folds.append([table, rows, _rows(connection, table, size, transaction)])
        else:
            tables[table] = catalog.table_digest(connection, table)
    now = replace(before, tables=tables, chained=frozenset(chained), sequences=catalog.sequences(connection))
    return now.folded(folds) if folds else now


def after_anything(connection: CatalogConnection, before: DatabaseDigest, told: str, *, large: bool) -> DatabaseDigest:
    """Return the digest after transactions that nobody watched; large: whether they may have changed larger tables."""
    return _after_everything(connection, before, told if large else "", {}, None)


def _after_everything(
    connection: CatalogConnection, before: DatabaseDigest, told: str, changed: RowCounts, transaction: int | None
) -> DatabaseDigest:
    """Read the schema and every small table anew; larger ones are known by the statement, and the rows it wrote."""
    tables, chained, folds = {}, set(), []
    for table, size in catalog.tables(connection):
        if table in before.chained or size > catalog.SMALL_BYTES:
            chained.add(table)
            if transaction is not None and table in changed:
                folds.append([table, list(changed[table][1:]), _rows(connection, table, size, transaction)])
        else:
            tables[table] = catalog.table_digest(connection, table)
    schema, sequences = catalog.schema_digest(connection), catalog.sequences(connection)
    now = DatabaseDigest(schema, sequences, tables, before.chain, frozenset(chained | before.chained))
    # Without larger tables all of the state has been read, and the statement that led to it says nothing more.
    return now.folded(told, folds) if told and (chained or before.chained) else now


def _rows(connection: CatalogConnection, table: str, size: int, transaction: int) -> str:
    return "" if size > catalog.MAX_BYTES else catalog.rows_since(connection, table, transaction)


def _hash(value: Any) -> bytes:
    return hashlib.blake2b(orjson.dumps(value, option=orjson.OPT_SORT_KEYS), digest_size=32).digest()


def combined(states: Iterable[tuple[str, StateDigest]]) -> StateDigest:
    """Return the digest of several databases together, by name."""
    exact, content = hashlib.blake2b(digest_size=32), hashlib.blake2b(digest_size=32)
    for name, state in sorted(states, key=lambda pair: pair[0]):
        exact.update(name.encode() + b"\0" + state.exact)
        content.update(name.encode() + b"\0" + state.content)
    return StateDigest(exact.digest(), content.digest())
