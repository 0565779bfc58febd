"""A connection to one database, and calls that only read.

Theory of operation. Whether a statement writes is the server's decision, not a parser's:

1. Every call is first tried as reading, inside `BEGIN READ ONLY` … `ROLLBACK`. The server refuses most writes there.
2. Some effects are allowed in a read-only transaction: advisory locks, temporary tables, sequences of temporary tables.
   `PostgresLink.read` looks for them after the statement, and the tags show statements of other kinds.
3. Effects on the connection itself (`set_config`, prepared statements) survive a rollback. Their names are searched for
   before (`volatile.SESSION`, `session_history.UNSHOWN`), and the statement is not tried. So it is with ANALYZE and its
   like (`volatile.UPKEEP`).
4. In all these cases `WriteAttemptError` says that the call needs a private database. On a shared connection nothing of
   the attempt remains.
"""

import contextlib
import os
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import pq

from sandboxes.postgres import catalog
from sandboxes.postgres.catalog import EQUALS
from sandboxes.postgres.session_history import UNSHOWN
from sandboxes.postgres.statement import NOT_IN_TRANSACTION, READ_ONLY, SYNTAX_ERROR, PostgresOutcome, Statement
from sandboxes.postgres.tools import EXPLAIN, MAX_COMPARED, compare, listing
from sandboxes.postgres.values import parameter
from sandboxes.postgres.volatile import SESSION, UPKEEP, VOLATILE, reach
from sandboxes.sql.results import Failure, RowCollector, failure, other, success

READS = {"SELECT", "SHOW", "EXPLAIN", "VALUES", "TABLE"}
"""First words of the command tags of statements that may only have read."""
_OF_THE_MOMENT = ("53", "57", "58", "XX", "40001", "40P01")
"""Begins of SQLSTATEs (PostgreSQL's manual, appendix A) of what the server lacks now, or of what other sessions do."""


_SESSION = f"""SELECT
    (SELECT pg_catalog.string_agg(pg_catalog.concat(name, '=', setting), ',' ORDER BY name)
     FROM pg_catalog.pg_settings WHERE source {EQUALS} 'session'
     AND NOT (name {EQUALS} 'application_name' OR name {EQUALS} 'client_encoding')),
    (SELECT pg_catalog.string_agg((pg_catalog.to_jsonb(s) OPERATOR(pg_catalog.-) 'prepare_time')::pg_catalog.text, ','
         ORDER BY name) FROM pg_catalog.pg_prepared_statements s WHERE from_sql),
    (SELECT pg_catalog.string_agg(pg_catalog.concat(name, '=', statement), ',' ORDER BY name)
     FROM pg_catalog.pg_cursors WHERE NOT (name {EQUALS} '')),
    (SELECT pg_catalog.string_agg(pg_catalog.concat_ws('/', classid, objid, mode), ',' ORDER BY classid, objid, mode)
     FROM pg_catalog.pg_locks WHERE locktype {EQUALS} 'advisory' AND pid {EQUALS} pg_catalog.pg_backend_pid()),
    (SELECT pg_catalog.string_agg(c, ',' ORDER BY c) FROM pg_catalog.pg_listening_channels() c),
    (SELECT pg_catalog.string_agg(gid, ',' ORDER BY gid) FROM pg_catalog.pg_prepared_xacts
     WHERE database {EQUALS} pg_catalog.current_database()),
    (SELECT 'yes' FROM pg_catalog.pg_depend WHERE refclassid {EQUALS} 'pg_catalog.pg_namespace'::pg_catalog.regclass
     AND refobjid {EQUALS} pg_catalog.pg_my_temp_schema() LIMIT 1)"""
"""Session state: settings, prepared statements, cursors, advisory locks, channels, prepared transactions, and whether
the session has temporary objects of any kind, such as tables, functions and types. It shows the agent's settings, so
it cannot run under `catalog.plain`."""
_READ_HAD_EFFECT = f"""SELECT pg_catalog.pg_current_xact_id_if_assigned() IS NOT NULL OR EXISTS (SELECT 1
    FROM pg_catalog.pg_locks WHERE locktype {EQUALS} 'advisory' AND pid {EQUALS} pg_catalog.pg_backend_pid())"""
"""Whether a read-only transaction got a transaction id, or took an advisory lock."""


def application_name(worker: int) -> str:
    """Return the application name of the sessions of the worker with a process id."""
    return f"forkpoint-worker-{worker}"


@dataclass(slots=True)
class PostgresCall:
    """One call of an agent."""

    tool: str
    arguments: dict[str, Any]
    output_bytes: int  # Limit of the result's rows.
    until: float  # Deadline, as a value of `time.monotonic`.

    @property
    def text(self) -> str:
        """The statement or script."""
        return str(self.arguments["sql"])

    @property
    def words(self) -> str:
        """The statement with its parameters: equal ones do the same in equal states."""
        params = self.arguments.get("params")
        return self.text if params is None else f"{self.text}\n{params!r}"

    @property
    def said(self) -> str:
        """All texts of the call: the server may read a parameter as `now`, or run it as a query."""
        given = self.arguments.get("params") or ()
        params = given.values() if isinstance(given, dict) else given
        values = (text for value in params for text in (value.values() if isinstance(value, dict) else [value]))
        return " ".join([self.text, str(self.arguments.get("gold", "")), *(f"'{value}'" for value in values)])

    @property
    def shape(self) -> str:
        """The format of the result."""
        return str(self.arguments.get("format", "json"))

    def rows(self) -> RowCollector:
        """Return a collector with the call's limits."""
        max_rows = MAX_COMPARED if self.tool in ("compare", "explain") else int(self.arguments.get("max_rows", 100))
        return RowCollector(max_rows, self.output_bytes)


@dataclass(slots=True)
class CallFacts:
    """What a call says of itself besides its result."""

    volatile: bool = False  # Whether another run of it may give something else.
    timed_out: bool = False  # Whether its time limit stopped it.
    circumstantial: bool = False  # Whether it failed because of what else runs on the server.
    uncommitted: bool = False  # Whether it changed the session.
    name: str | None = None  # Names the call in the session's history; None if it only read.

    def note_failure(self, failure: Failure | None) -> None:
        """Note whether a failure says something of the moment, and not of the statement."""
        self.timed_out = failure is not None and failure.kind == "timeout"
        self.circumstantial = failure is not None and (failure.code or "").startswith(_OF_THE_MOMENT)


class WriteAttemptError(Exception):
    """The call does more than read, and needs a private database."""


class PostgresLink:
    """A connection to one database, with caches of its definitions and type names."""

    def __init__(self, dsn: str) -> None:
        name = application_name(os.getpid())
        self.connection = psycopg.connect(dsn, autocommit=True, prepare_threshold=None, application_name=name)
        self._definitions: dict[bool, dict[str, str]] = {}
        self._types: dict[int, str] = {}
        if self.query_row(f"SELECT current_user {EQUALS} session_user")[0]:
            raise psycopg.OperationalError("the login of a clone may not act as the agents' role")

    @property
    def status(self) -> pq.TransactionStatus:
        """The state of the current transaction."""
        return pq.TransactionStatus(self.connection.pgconn.transaction_status)

    def send(
        self, text: str, call: PostgresCall, *, parameters: Any = None, single: bool = False, stop: bool = False
    ) -> PostgresOutcome:
        """Run a text of the agent within its call's limits. `single`: one statement; `stop`: ends at a full result."""
        statement = Statement(self.connection.pgconn, call.rows(), until=call.until, stop_when_full=stop)
        outcome = statement.run(text, parameters, single=single)
        # A read is rolled back.
        if not single and self.status in (pq.TransactionStatus.IDLE, pq.TransactionStatus.INTRANS):
            self.act_as_agent()
        return outcome

    def query_row(self, query: str) -> tuple[Any, ...]:
        """Run a query of the driver and return its only row."""
        row: tuple[Any, ...] = self.connection.execute(query).fetchone()  # type: ignore[assignment]
        return row

    def meaning(self, text: str, *, writing: bool) -> str:
        """Return a text with the definitions of all objects that it may use (see `volatile.reach`)."""
        if writing not in self._definitions:
            with catalog.plain(self.connection):
                self._definitions[writing] = catalog.definitions(self.connection, writing=writing)
        return reach(text, self._definitions[writing])

    def forget_definitions(self) -> None:
        """Clear the caches, because the schema may have changed."""
        self._definitions.clear()
        self._types.clear()

    def type_names(self, oids: list[int]) -> list[str]:
        """Return the names of types, given by object id."""
        for oid in set(oids) - self._types.keys():
            # In a failed transaction, the server refuses all queries.
            failed = self.status == pq.TransactionStatus.INERROR
            name = "" if failed else self.query_row(f"SELECT pg_catalog.format_type({oid}, NULL)")[0]
            # With the client encoding SQL_ASCII, texts are bytes.
            self._types[oid] = name.decode(errors="replace") if isinstance(name, bytes) else str(name)
        return [self._types[oid] for oid in oids]

    def read(self, text: str, call: PostgresCall, parameters: Any = None) -> PostgresOutcome:
        """Run a statement in a read-only transaction and roll it back; WriteAttemptError if it did more than read."""
        self.connection.execute("BEGIN READ ONLY")
        try:
            outcome = self.send(text, call, parameters=parameters, single=True, stop=True)
            if outcome.failure is not None:
                code = outcome.failure.code
                # The server reports several statements as a syntax error. A private database accepts them.
                several = code == SYNTAX_ERROR and "multiple commands" in outcome.failure.message
                if several or code == READ_ONLY or code in NOT_IN_TRANSACTION:
                    raise WriteAttemptError
            elif not outcome.cut and (not only(outcome.tags, READS) or self._had_effect()):
                raise WriteAttemptError
            return outcome
        finally:
            self._roll_back()

    def _had_effect(self) -> bool:
        return self.status != pq.TransactionStatus.INTRANS or bool(self.query_row(_READ_HAD_EFFECT)[0])

    def _roll_back(self) -> None:
        if self.status in (pq.TransactionStatus.INTRANS, pq.TransactionStatus.INERROR):
            self.connection.execute("ROLLBACK")

    @property
    def usable(self) -> bool:
        """Whether the connection is open and idle."""
        return self.status == pq.TransactionStatus.IDLE

    def act_as_agent(self) -> None:
        """Act as the agents' role again: `DISCARD ALL` and `SET ROLE NONE` make a session act as its login."""
        self.connection.execute("RESET ROLE")

    def session(self) -> tuple[str, bool]:
        """Describe the session state (empty if there is none), and say whether there are temporary objects."""
        # In a failed transaction the server does not tell of temporary objects.
        if self.status == pq.TransactionStatus.INERROR:
            return "a transaction that failed", False
        *parts, temporary = self.query_row(_SESSION)
        open_transaction = self.status == pq.TransactionStatus.INTRANS
        return repr((open_transaction, parts)) if open_transaction or any(parts) else "", temporary is not None

    def close(self) -> None:
        """Close the connection."""
        with contextlib.suppress(psycopg.Error):
            self.connection.close()


def answer_reading(link: PostgresLink, call: PostgresCall) -> tuple[CallFacts, bytes]:
    """Run a call and return its result. Raises WriteAttemptError if it does more than read."""
    if call.tool in ("tables", "schema"):
        return CallFacts(), listing(link.connection, call.tool, call.arguments.get("table"), call.rows().output_bytes)
    if call.tool == "script":
        raise WriteAttemptError
    meaning = link.meaning(call.said, writing=False)
    if any(names.search(meaning) for names in (SESSION, UNSHOWN, UPKEEP)):
        raise WriteAttemptError
    facts = CallFacts(volatile=VOLATILE.search(meaning) is not None)
    if call.tool == "compare":
        gold, ordered = str(call.arguments["gold"]), bool(call.arguments["ordered"])
        return facts, compare(lambda text: link.read(text, call), call.text, gold, ordered=ordered)
    text = EXPLAIN + call.text if call.tool == "explain" else call.text
    try:
        parameters = parameters_of(call)
    except ValueError as error:
        return facts, refused(call, str(error))
    outcome = link.read(text, call, parameters)
    facts.note_failure(outcome.failure)
    return facts, answer_of(link, outcome, call)


def parameters_of(call: PostgresCall) -> list[bytes | None] | None:
    """Return a call's parameters in the server's text form; None if it has none. ValueError: one cannot be passed."""
    params = call.arguments.get("params")
    if params is None:
        return None
    if isinstance(params, dict):
        raise ValueError("PostgreSQL's parameters are numbered: send a list, and write $1, $2 in the statement")  # noqa: TRY004
    return [parameter(value) for value in params]


def answer_of(link: PostgresLink, outcome: PostgresOutcome, call: PostgresCall) -> bytes:
    """Encode an outcome as the agent's result."""
    if outcome.failure is not None:
        return failure(outcome.failure, shape=call.shape, sql=call.text)
    types = link.type_names(outcome.types) if outcome.columns else None
    return success(outcome.columns, outcome.rows, shape=call.shape, types=types, changed=outcome.affected)


def refused(call: PostgresCall, why: str) -> bytes:
    """Encode the result of a call that is not allowed."""
    error = Failure(why, "refused")
    if call.tool == "compare":
        return other({"match": False, "why": why, "error": error.to_json()})
    return failure(error, shape=call.shape)


def only(tags: list[str], kinds: set[str]) -> bool:
    """Return whether the first word of every command tag is one of `kinds`."""
    return all(tag.split(" ")[0] in kinds for tag in tags)
