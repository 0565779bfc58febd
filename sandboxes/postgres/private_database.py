"""A sandbox's own database: what a call changed in it, in its session, and what the database is then."""

import contextlib
import hashlib
from typing import Any

import psycopg
from psycopg import pq

from sandboxes.postgres import catalog
from sandboxes.postgres import digest as digests
from sandboxes.postgres.connection import (
    READS,
    Link,
    PostgresCall,
    WriteAttemptError,
    answer_of,
    answer_reading,
    only,
    parameters_of,
    refused,
    timed_out,
)
from sandboxes.postgres.digest import DatabaseDigest
from sandboxes.postgres.statement import NOT_AS_ALONE, PostgresOutcome
from sandboxes.postgres.volatile import CURSOR, VOLATILE
from sandboxes.sql.results import Failure
from sandboxes.workers.engine import Fields

_OTHERWISE_ALONE = {"SET", "SAVEPOINT", "RELEASE", "LOCK", "DECLARE", "CLOSE", "FETCH", "MOVE"}
"""First words of the tags of statements that do not act in a transaction of ours as they do in none."""
_ENDS = {"COMMIT", "ROLLBACK"}
_ROWLESS = _ENDS | {
    "SET", "RESET", "SHOW", "LISTEN", "UNLISTEN", "NOTIFY", "PREPARE", "DEALLOCATE", "DISCARD", "LOCK", "DECLARE",
    "CLOSE", "FETCH", "MOVE", "SAVEPOINT", "RELEASE", "VACUUM", "ANALYZE", "CHECKPOINT",
}  # fmt: skip
"""First words of the tags of statements that leave all rows as they are."""
_USE_AGAIN = """SELECT pg_catalog.setval(%s, old) FROM (SELECT last_value AS old, pg_catalog.nextval(%s)
    FROM pg_catalog.pg_sequences WHERE schemaname || '.' || sequencename = %s AND last_value IS NOT NULL OFFSET 0) s"""
"""Leaves a sequence as it was, and used by this session."""
_CURSORS = "SELECT EXISTS (SELECT 1 FROM pg_catalog.pg_cursors WHERE name <> '')"


class PrivateDatabase:
    """A sandbox's own database: what it holds, what its session holds, and the calls that change them."""

    def __init__(self, link: Link, digest: DatabaseDigest) -> None:
        self.link, self.digest = link, digest
        self._session = ""
        self._touched: list[str] = []
        self._in_transaction: list[str] = []
        self._moved: list[str] = []
        self._began: tuple[catalog.RowCounts, int] = ({}, 0)

    def prime(self, sequences: list[str]) -> None:
        """Let `currval` and `lastval` know what they knew in the connection before."""
        for name in sequences:
            # `setval` alone is no use for `lastval`. One that has come to its end stays unknown.
            with contextlib.suppress(psycopg.Error):
                self.link.connection.execute(_USE_AGAIN, (name, name, name))
        self._touched = list(sequences)

    def look_around(self) -> None:
        """Ask what a first write asks: the server reads its catalogs for it, which is better done ahead."""
        connection = self.link.connection
        connection.execute("BEGIN READ ONLY")
        try:
            connection.execute(catalog.PLAIN)
            for look in (catalog.counts, catalog.system_count, catalog.sequences):
                look(connection)
            for table in list(self.digest.tables)[:1]:
                catalog.table_digest(connection, table)
            for writing in (False, True):
                self.link.meaning("", writing=writing)
        finally:
            connection.execute("ROLLBACK")
        self.link.session()

    def run(self, call: PostgresCall) -> tuple[Fields, bytes]:
        """Run a call; return its effect and what the database and the session are now."""
        before, session = self.digest, self._session
        if self.link.status == pq.TransactionStatus.IDLE:
            told, answer = self._outside(call)
        else:
            told, answer = self._inside(call)
        self._session = self.link.session()
        told["database"] = self.digest != before
        told["session"] = self._session != session or bool(told.pop("uncommitted", False))
        told["holds"] = bool(self._session)
        if told["database"]:
            self._note_sequences(before)
        if not self._session:
            self._moved.clear()
        unseen = repr((self._session, self._in_transaction, self._moved)).encode()
        told["witness"] = hashlib.blake2b(self.digest.state().exact + unseen, digest_size=32).hexdigest()
        return told | {"digest": self.digest.to_json(), "touched": self._touched}, answer

    def _note_sequences(self, before: DatabaseDigest) -> None:
        """Remember the order in which sequences were last used, for a connection that shall go on from here."""
        for name, value in self.digest.sequences.items():
            if value != before.sequences.get(name):
                self._touched = [*(other for other in self._touched if other != name), name]

    # -- outside a transaction of the agent's ------------------------------------------------------------------------

    def _outside(self, call: PostgresCall) -> tuple[Fields, bytes]:
        moves = call.tool == "query" and self._session and CURSOR.search(call.text) and self.link.ask(_CURSORS)[0]
        try:
            if not moves:
                return answer_reading(self.link, call)
        except WriteAttemptError:
            pass
        if call.tool in ("compare", "explain"):
            return {}, refused(call, f"{call.tool} takes statements that only read")
        try:
            parameters = parameters_of(call)
        except ValueError as error:
            return {}, refused(call, str(error))
        told: Fields = {"volatile": VOLATILE.search(self.link.meaning(call.text, writing=True)) is not None}
        outcome = self._bare(call, parameters) if moves else self._write(call, parameters)
        if moves and outcome.failure is None:
            self._moved.append(call.text)
            told["uncommitted"] = True
        return told | timed_out(outcome), answer_of(self.link, outcome, call)

    def _write(self, call: PostgresCall, parameters: Any) -> PostgresOutcome:
        """Run a text as one transaction: all of it or nothing."""
        connection = self.link.connection
        connection.execute("BEGIN")
        counts, system = catalog.counts(connection), catalog.system_count(connection)
        outcome = self.link.send(call.text, call, parameters=parameters)
        if self.link.status == pq.TransactionStatus.IDLE:
            # It ended our transaction itself; others may have followed.
            self._reassess(call.text, large=not only(outcome.tags, _ENDS))
        elif outcome.failure is not None:
            connection.execute("ROLLBACK")
            if outcome.failure.code in NOT_AS_ALONE:
                return self._bare(call, parameters)
            self._look_at_sequences()
        elif _begins(outcome.tags):
            self._in_transaction, self._began = [call.text], (counts, system)
        elif len(outcome.tags) == 1 and only(outcome.tags, _OTHERWISE_ALONE | _ENDS):
            connection.execute("ROLLBACK")
            return self._bare(call, parameters)
        elif self.link.ask("SELECT pg_catalog.pg_current_xact_id_if_assigned()")[0] is None:
            connection.execute("COMMIT")
            self._look_at_sequences()
        else:
            self._commit(call, outcome, counts, system)
        return outcome

    def _commit(self, call: PostgresCall, outcome: PostgresOutcome, counts: catalog.RowCounts, system: int) -> None:
        """Digest what a transaction changed, and commit it."""
        connection = self.link.connection
        try:
            # Constraints that wait for the end are checked now, and their triggers run before rows are counted.
            connection.execute("SET CONSTRAINTS ALL IMMEDIATE")
            connection.execute(catalog.PLAIN)
            changed = _since(counts, catalog.counts(connection))
            schema = catalog.system_count(connection) > system
            transaction = int(self.link.ask("SELECT pg_catalog.pg_current_xact_id_if_assigned()::text")[0])
            digest = digests.after_transaction(
                connection, self.digest, changed, transaction=transaction, schema=schema, told=call.text
            )
            connection.execute("COMMIT")
        except psycopg.Error as error:
            if self.link.status != pq.TransactionStatus.IDLE:
                connection.execute("ROLLBACK")
            outcome.failure = Failure(_told(error), "sql", error.sqlstate)
            self._look_at_sequences()
            return
        if schema:
            self.link.forget_definitions()
        self.digest = digest

    def _bare(self, call: PostgresCall, parameters: Any) -> PostgresOutcome:
        """Run a statement that cannot, or should not, be in a transaction: VACUUM, SET, LOCK."""
        outcome = self.link.send(call.text, call, parameters=parameters)
        if self.link.status == pq.TransactionStatus.IDLE and outcome.failure is None:
            self._reassess(call.text, large=not only(outcome.tags, _ROWLESS))
        return outcome

    # -- inside one --------------------------------------------------------------------------------------------------

    def _inside(self, call: PostgresCall) -> tuple[Fields, bytes]:
        """Run a call in the agent's open transaction: nothing is committed until the agent says so."""
        if call.tool in ("tables", "schema", "compare", "explain"):
            return {}, refused(
                call, f"{call.tool} is not available inside an open transaction: COMMIT or ROLLBACK first"
            )
        volatile = False
        if self.link.status == pq.TransactionStatus.INTRANS:
            volatile = VOLATILE.search(self.link.meaning(call.text, writing=True)) is not None
        before = self._position()
        large = self._changed_large_tables()
        try:
            parameters = parameters_of(call)
        except ValueError as error:
            return {}, refused(call, str(error))
        outcome = self.link.send(call.text, call, parameters=parameters)
        if self.link.status == pq.TransactionStatus.IDLE:
            self._reassess("\n".join([*self._in_transaction, call.text]), large=large or len(outcome.tags) > 1)
            self._in_transaction = []
            uncommitted = True
        else:
            # Savepoints and cursors are nothing that could be looked at.
            uncommitted = self._position() != before or not only(outcome.tags, READS)
            self._in_transaction += [call.text] if uncommitted else []
        return {"volatile": volatile, "uncommitted": uncommitted} | timed_out(outcome), answer_of(
            self.link, outcome, call
        )

    def _changed_large_tables(self) -> bool:
        """Say whether the agent's open transaction changed what is not read whole; one that failed changes nothing."""
        if self.link.status != pq.TransactionStatus.INTRANS:
            return False
        counts, system = self._began
        changed = _since(counts, catalog.counts(self.link.connection))
        large = (table in self.digest.chained or size[0] > catalog.SMALL_BYTES for table, size in changed.items())
        return any(large) or catalog.system_count(self.link.connection) > system

    def _position(self) -> Any:
        """Return what a statement in an open transaction may have moved."""
        if self.link.status != pq.TransactionStatus.INTRANS:
            return None
        connection = self.link.connection
        given = self.link.ask("SELECT pg_catalog.pg_current_xact_id_if_assigned()::text")[0]
        return given, catalog.counts(connection), catalog.system_count(connection), catalog.sequences(connection)

    # -- digests -----------------------------------------------------------------------------------------------------

    def _look_at_sequences(self) -> None:
        """A transaction that failed, or wrote nothing, may have drawn from sequences: they go on all the same."""
        now = catalog.sequences(self.link.connection)
        if now != self.digest.sequences:
            self.digest = DatabaseDigest.from_json(self.digest.to_json() | {"sequences": now})

    def _reassess(self, told: str, *, large: bool) -> None:
        """Digest the database anew where nobody saw what a text changed."""
        connection = self.link.connection
        connection.execute("BEGIN READ ONLY")
        try:
            connection.execute(catalog.PLAIN)
            self.digest = digests.after_anything(connection, self.digest, told, large=large)
        finally:
            connection.execute("ROLLBACK")
        self.link.forget_definitions()


def _begins(tags: list[str]) -> bool:
    return any(tag.split(" ")[0] in ("BEGIN", "START") for tag in tags)


def _since(before: catalog.RowCounts, now: catalog.RowCounts) -> catalog.RowCounts:
    changed = {}
    for table, (size, *rows) in now.items():
        earlier = before.get(table, (0, 0, 0, 0))[1:]
        moved = [n - m for n, m in zip(rows, earlier, strict=True)]
        if any(moved):
            changed[table] = (size, *moved)
    return changed


def _told(error: psycopg.Error) -> str:
    parts = [error.diag.message_primary or str(error).strip()]
    parts += [
        f"{name}: {text}"
        for name, text in (("DETAIL", error.diag.message_detail), ("HINT", error.diag.message_hint))
        if text
    ]
    return "\n".join(parts)
