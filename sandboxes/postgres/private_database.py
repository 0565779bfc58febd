"""The private database of a sandbox, in its worker: runs calls, and reports what each changed.

Theory of operation. The driver needs the digest of the database after every call, and whether the session changed.
How a call runs depends on whether the agent has a transaction open:

1. *Outside a transaction*, a call is first tried as reading (`sandboxes.postgres.connection`). If it writes, it runs in
   a transaction of ours, so that the server's counters show exactly what it changed. The digest is computed before the
   commit. A failure rolls the transaction back.
2. Some statements behave differently in a transaction (SET, LOCK, cursors), or cannot run in one (VACUUM). They are
   recognised by their command tag or by the server's refusal, rolled back, and run again without our transaction.
3. A text may end our transaction itself (COMMIT), or begin the agent's (BEGIN). Changes of the former were not
   observed, so the small tables are read again.
4. Some changes do not show in the rows or the schema as the digest describes them: ANALYZE, VACUUM, CREATE OPERATOR.
   Their text then extends the digest, so that equal histories still have equal digests.
5. *Inside the agent's transaction*, nothing is committed, so the digest stays the same. What the transaction did is
   part of the session, and its texts become part of the witness.
6. What no catalog shows of the session is named by the texts that may have changed it (`SessionHistory`).
"""

import hashlib
from dataclasses import replace
from typing import Any

import psycopg
from psycopg import pq

from sandboxes.postgres import catalog, sequence_use
from sandboxes.postgres import digest as digests
from sandboxes.postgres.catalog import EQUALS
from sandboxes.postgres.connection import (
    READS,
    CallFacts,
    PostgresCall,
    PostgresLink,
    WriteAttemptError,
    answer_of,
    answer_reading,
    only,
    parameters_of,
    refused,
)
from sandboxes.postgres.digest import DatabaseDigest
from sandboxes.postgres.messages import PrivateState
from sandboxes.postgres.sequence_use import USES_SEQUENCES, SequenceUse
from sandboxes.postgres.session_history import HELD, SessionHistory
from sandboxes.postgres.statement import NOT_IN_TRANSACTION, PostgresOutcome, explained
from sandboxes.postgres.volatile import CURSOR, SESSION, UPKEEP, VOLATILE
from sandboxes.sql.results import Failure

_TRANSACTION_SENSITIVE = {"SET", "SAVEPOINT", "RELEASE", "LOCK", "DECLARE", "CLOSE", "FETCH", "MOVE"}
"""First words of the command tags of statements that behave differently inside a transaction."""
_ENDS = {"COMMIT", "ROLLBACK"}
"""First words of the command tags of statements that end a transaction."""
_CHANGES_ROWS = _ENDS | READS | {"BEGIN", "START", "INSERT", "UPDATE", "DELETE", "MERGE", "SAVEPOINT", "RELEASE", "SET"}
"""First words of the command tags of statements that change rows or nothing, but not the schema."""
_ROWLESS = _ENDS | {
    "SET", "RESET", "SHOW", "LISTEN", "UNLISTEN", "NOTIFY", "PREPARE", "DEALLOCATE", "DISCARD", "LOCK",
    "CLOSE", "FETCH", "MOVE", "SAVEPOINT", "RELEASE", "VACUUM", "ANALYZE", "CHECKPOINT",
}  # fmt: skip
"""First words of the command tags of statements that change no rows. DECLARE runs the query of a cursor WITH HOLD."""
_OF_PREPARED = {"PREPARE TRANSACTION", "COMMIT PREPARED", "ROLLBACK PREPARED"}
"""Command tags that begin like others, of statements that end a transaction or commit another one."""
_WRITTEN = """SELECT pg_catalog.sum(n_tup_ins), pg_catalog.sum(n_tup_upd), pg_catalog.sum(n_tup_del)
    FROM pg_catalog.pg_stat_xact_all_tables"""
"""How many rows of all tables the transaction has written, temporary ones among them."""
_TRANSACTION = """SELECT pg_catalog.pg_current_xact_id_if_assigned()::pg_catalog.text,
    EXISTS (SELECT 1 FROM pg_catalog.pg_cursors WHERE is_holdable)"""
"""The transaction's ID if it has written, and whether its COMMIT runs the query of a cursor WITH HOLD."""
_HAS_CURSORS = f"SELECT EXISTS (SELECT 1 FROM pg_catalog.pg_cursors WHERE NOT (name {EQUALS} ''))"


class PrivateDatabase:
    """A private database: its connection, the digest of its committed content, and what its session holds."""

    def __init__(self, link: PostgresLink, digest: DatabaseDigest) -> None:
        self.link, self.digest = link, digest
        self._session = ""
        self._history = SessionHistory()
        # Whether there are temporary objects.
        self._temporary = False
        self._use = SequenceUse()
        # Texts since the session's use of sequences was last looked at, with all that they may run.
        self._meanings: list[str] = []
        self._in_transaction: list[str] = []
        # Whether the agent's transaction may have written, and the system tables' counters at its start.
        self._wrote, self._counts_at_begin = False, dict[str, int]()
        # Texts that changed what the digest does not describe, since the last commit.
        self._undescribed: list[str] = []

    def prime(self, use: SequenceUse) -> None:
        """Restore what `currval` and `lastval` return."""
        sequence_use.restore(self.link.connection, use)
        self._use = use

    def warm_up(self) -> None:
        """Run the queries of a first write, so that the server has read its catalogs before it."""
        connection = self.link.connection
        with catalog.plain(connection):
            for query in (catalog.counts, catalog.system_counts, catalog.sequences):
                query(connection)
            for table in list(self.digest.tables)[:1]:
                catalog.table_digest(connection, table)
        for writing in (False, True):
            self.link.meaning("", writing=writing)
        self.link.session()

    def run(self, call: PostgresCall) -> tuple[CallFacts, PrivateState, bytes]:
        """Run a call; return what it says of itself, the state after it, and its result."""
        before, session = self.digest, self._session
        if self.link.status == pq.TransactionStatus.IDLE:
            facts, result = self._outside_transaction(call)
        else:
            facts, result = self._inside_transaction(call)
        if self._undescribed and self.link.status == pq.TransactionStatus.IDLE:
            self.digest = self.digest.extended(*self._undescribed)
            self._undescribed.clear()
        self._session, temporary = self.link.session()
        if self.link.status == pq.TransactionStatus.IDLE:
            # The call did more than read, so it may have changed temporary objects.
            if facts.name is not None and (temporary or self._temporary):
                self._history.temporary.append(facts.name)
                facts.uncommitted = True
            self._temporary = temporary
            self._history.clear_gone(self._session, temporary=temporary)
            words = call.words if facts.name is not None else None
            noted = len(self._history.shaped)
            shaped = self._history.note_shaped(words, self._session, temporary=temporary)
            # Each of these calls is a step, or a replay would leave it out.
            facts.uncommitted = facts.uncommitted or len(self._history.shaped) > noted
            if shaped and not (self._session or self._history):
                self._history.shaped.clear()
                self._reassess(shaped, large=True)
        use, self._use = self._use, self._look_at_sequences(before)
        session_state = repr((self._session, self._in_transaction, self._history, self._use)).encode()
        state = PrivateState(
            self.digest, self._use, has_session=bool(self._session or self._history) or not self._use.restorable,
            witness=hashlib.blake2b(self.digest.state().exact + session_state, digest_size=32).digest(),
            database_changed=self.digest != before,
            session_changed=self._session != session or self._use != use or facts.uncommitted,
        )  # fmt: skip
        return facts, state, result

    def _look_at_sequences(self, before: DatabaseDigest) -> SequenceUse:
        """Return what the session knows of sequences after a call; read only where the call may have changed it."""
        now = self.digest.sequences
        changed = [name for name in {*now, *before.sequences} if now.get(name) != before.sequences.get(name)]
        text = "\n".join(self._meanings)
        uses = USES_SEQUENCES.search(text) is not None
        if self.link.status != pq.TransactionStatus.IDLE or not (changed or uses):
            return self._use
        self._meanings.clear()
        return sequence_use.observe(self.link.connection, self._use, text, now if uses else changed, changed)

    # -- outside the agent's transactions ----------------------------------------------------------------------------

    def _outside_transaction(self, call: PostgresCall) -> tuple[CallFacts, bytes]:
        moves = (
            call.tool == "query" and self._session and CURSOR.search(call.text) and self.link.query_row(_HAS_CURSORS)[0]
        )
        # A FETCH passes as a read, but moves its cursor for good: run it without trying it first. So do calls that draw
        # from a temporary sequence.
        draws = (
            call.tool == "query"
            and self._temporary
            and USES_SEQUENCES.search(self.link.meaning(call.said, writing=False))
        )
        try:
            if not (moves or draws):
                facts, result = answer_reading(self.link, call)
                if self._history.seeded and facts.volatile:
                    meaning = self.link.meaning(call.said, writing=False)
                    facts.uncommitted = self._history.note_settings(call.words, meaning)
                return facts, result
        except WriteAttemptError:
            pass
        if call.tool in ("compare", "explain"):
            return CallFacts(), refused(call, f"{call.tool} takes statements that only read")
        try:
            parameters = parameters_of(call)
        except ValueError as error:
            return CallFacts(), refused(call, str(error))
        meaning = self.link.meaning(call.said, writing=True)
        self._meanings = [meaning]
        unseen = self._history.note_settings(call.words, meaning)
        name = self._history.name_of(call.words, meaning)
        # Its effect is outside of transactions, so a failure may have left a part of it.
        if UPKEEP.search(meaning):
            self._undescribed.append(call.words)
        facts = CallFacts(VOLATILE.search(meaning) is not None, uncommitted=unseen, name=name)
        # Until the counters are read, the transaction that the call may begin counts as one that has written.
        self._wrote, self._counts_at_begin = True, {}
        outcome = self._without_transaction(call, parameters, name) if moves else self._write(call, parameters, name)
        if self.link.status != pq.TransactionStatus.IDLE:
            self._in_transaction = [name]
        if moves and outcome.failure is None:
            self._history.cursor_moves.append(call.words)
            facts.uncommitted = True
        facts.note_failure(outcome.failure)
        return facts, answer_of(self.link, outcome, call)

    def _write(self, call: PostgresCall, parameters: Any, name: str) -> PostgresOutcome:
        connection = self.link.connection
        connection.execute("BEGIN")
        # The counters include earlier transactions. Their value now is the baseline of this one.
        with catalog.plain(connection):
            counts, system = catalog.counts(connection), catalog.system_counts(connection)
        outcome = self.link.send(call.text, call, parameters=parameters)
        if self.link.status == pq.TransactionStatus.IDLE:
            # The text ended our transaction itself, and may have run others after it.
            self._reassess(name, large=outcome.failure is not None or not only(outcome.tags, _ENDS))
            if not only(outcome.tags, _CHANGES_ROWS):
                self._undescribed.append(call.words)
        elif outcome.failure is not None:
            connection.execute("ROLLBACK")
            if outcome.failure.code in NOT_IN_TRANSACTION:
                return self._without_transaction(call, parameters, name)
            self._read_sequences()
        elif any(tag.split(" ")[0] in ("BEGIN", "START") for tag in outcome.tags):
            # Our BEGIN has become the agent's. It stays open.
            self._wrote, self._counts_at_begin = any(self._transaction()), system
        elif len(outcome.tags) == 1 and only(outcome.tags, _TRANSACTION_SENSITIVE | _ENDS):
            connection.execute("ROLLBACK")
            return self._without_transaction(call, parameters, name)
        else:
            transaction, holds = self._transaction()
            if transaction is None:
                # Without a transaction id nothing was written. Sequences are an exception: they need none.
                connection.execute("COMMIT")
                self._read_sequences()
            else:
                self._commit(call, outcome, counts, system, int(transaction), name)
            if holds:
                self._reassess(name, large=True)
        return outcome

    def _transaction(self) -> tuple[str | None, bool]:
        """Return the open transaction's ID if it has written, and whether its COMMIT runs the query of a cursor."""
        transaction, holds = self.link.query_row(_TRANSACTION)
        return transaction, holds

    def _commit(
        self,
        call: PostgresCall,
        outcome: PostgresOutcome,
        counts: catalog.RowCounts,
        system: dict[str, int],
        transaction: int,
        name: str,
    ) -> None:
        connection = self.link.connection
        try:
            # Check deferred constraints now: their triggers may change rows, which must be counted.
            connection.execute("SET CONSTRAINTS ALL IMMEDIATE")
            with catalog.plain(connection):
                changed = _since(counts, catalog.counts(connection))
                # DDL is a change of the system's tables.
                moved = catalog.moved(system, catalog.system_counts(connection))
                schema = bool(moved - catalog.STATISTICS)
                digest = digests.after_transaction(
                    connection, self.digest, changed, transaction=transaction, schema=schema, statement=name
                )
            connection.execute("COMMIT")
        except psycopg.Error as error:
            if self.link.status != pq.TransactionStatus.IDLE:
                connection.execute("ROLLBACK")
            said = error.diag
            message = explained(said.message_primary or str(error).strip(), said.message_detail, said.message_hint)
            outcome.failure = Failure(message, "sql", error.sqlstate)
            self._read_sequences()
            return
        if schema:
            self.link.forget_definitions()
        if moved - catalog.DESCRIBED or (schema and digest == self.digest):
            self._undescribed.append(call.words)
        self.digest = digest

    def _without_transaction(self, call: PostgresCall, parameters: Any, name: str) -> PostgresOutcome:
        """Run a statement that cannot, or should not, run in a transaction of ours: VACUUM, SET, LOCK."""
        outcome = self.link.send(call.text, call, parameters=parameters)
        if self.link.status == pq.TransactionStatus.IDLE:
            # A procedure may have committed before it failed.
            unknown = outcome.failure is not None or not only(outcome.tags, _ROWLESS)
            self._reassess(name, large=unknown or bool(_OF_PREPARED.intersection(outcome.tags)))
            if unknown and outcome.failure is None:
                self._undescribed.append(call.words)
        return outcome

    # -- inside the agent's transaction ------------------------------------------------------------------------------

    def _inside_transaction(self, call: PostgresCall) -> tuple[CallFacts, bytes]:
        """Run a call in the agent's open transaction. Only the agent's COMMIT commits."""
        if call.tool in ("tables", "schema", "compare", "explain"):
            return CallFacts(), refused(
                call, f"{call.tool} is not available inside an open transaction: COMMIT or ROLLBACK first"
            )
        # In a failed transaction no catalog can be read, and the server refuses the statement anyway.
        volatile = uses = False
        name = call.words
        if self.link.status == pq.TransactionStatus.INTRANS:
            meaning = self.link.meaning(call.said, writing=True)
            self._meanings.append(meaning)
            volatile = VOLATILE.search(meaning) is not None
            # Without defaults and triggers: their use of a sequence shows in the position.
            reading = self.link.meaning(call.said, writing=False)
            uses = any(names.search(reading) for names in (USES_SEQUENCES, SESSION, HELD))
            uses |= self._history.note_settings(call.words, meaning)
            name = self._history.name_of(call.words, meaning)
            if UPKEEP.search(meaning):
                self._undescribed.append(call.words)
        before = self._position()
        # Read before the statement: it may be the COMMIT, after which the counters are gone.
        moved = self._moved_since_begin()
        try:
            parameters = parameters_of(call)
        except ValueError as error:
            return CallFacts(), refused(call, str(error))
        outcome = self.link.send(call.text, call, parameters=parameters)
        if self.link.status == pq.TransactionStatus.IDLE:
            texts = [*self._in_transaction, call.words]
            # A COMMIT runs triggers and the queries of cursors, whose changes no counter shows any more.
            self._reassess("\n".join(texts), large=self._wrote or bool(moved) or len(outcome.tags) > 1)
            if moved or not only(outcome.tags, _CHANGES_ROWS):
                self._undescribed += texts
            name = "\n".join([*self._in_transaction, name])
            self._in_transaction = []
            uncommitted = True
        else:
            # Savepoints and cursors cannot be read back, so every statement of another kind counts as a change.
            uncommitted = uses or self._position() != before or not only(outcome.tags, READS)
            self._in_transaction += [name] if uncommitted else []
        facts = CallFacts(volatile, uncommitted=uncommitted, name=name)
        facts.note_failure(outcome.failure)
        return facts, answer_of(self.link, outcome, call)

    def _moved_since_begin(self) -> set[str]:
        """Return the system tables that the agent's open transaction changed, unless it failed."""
        if self.link.status != pq.TransactionStatus.INTRANS:
            return set()
        with catalog.plain(self.link.connection):
            return catalog.moved(self._counts_at_begin, catalog.system_counts(self.link.connection))

    def _position(self) -> Any:
        """Return a value that changes with every write in the open transaction; None after a failure in it."""
        if self.link.status != pq.TransactionStatus.INTRANS:
            return None
        transaction = self._transaction()
        self._wrote = self._wrote or any(transaction)
        with catalog.plain(self.link.connection):
            return transaction, self.link.query_row(_WRITTEN), catalog.sequences(self.link.connection)

    # -- digests -----------------------------------------------------------------------------------------------------

    def _read_sequences(self) -> None:
        """Update the digest's sequences, which advance even in a transaction that is rolled back."""
        with catalog.plain(self.link.connection):
            now = catalog.sequences(self.link.connection)
        if now != self.digest.sequences:
            self.digest = replace(self.digest, sequences=now)

    def _reassess(self, statement: str, *, large: bool) -> None:
        connection = self.link.connection
        with catalog.plain(connection):
            self.digest = digests.after_unobserved(connection, self.digest, statement, large=large)
        self.link.forget_definitions()


def _since(before: catalog.RowCounts, now: catalog.RowCounts) -> catalog.RowCounts:
    changed = {}
    for table, (size, *rows) in now.items():
        earlier = before.get(table, (0, 0, 0, 0))[1:]
        moved = [n - m for n, m in zip(rows, earlier, strict=True)]
        if any(moved):
            changed[table] = (size, *moved)
    return changed
