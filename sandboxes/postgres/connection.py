"""A connection to one database, and the calls that only read there: tried first, and refused by the server where they
do more."""

import contextlib
import os
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import pq

from sandboxes.postgres import catalog
from sandboxes.postgres.statement import NOT_AS_ALONE, READ_ONLY, SEVERAL, PostgresOutcome, Statement
from sandboxes.postgres.tools import EXPLAIN, MAX_COMPARED, compare, listing
from sandboxes.postgres.values import parameter
from sandboxes.postgres.volatile import SESSION, VOLATILE, reach
from sandboxes.sql.results import Failure, RowCollector, failure, other, success
from sandboxes.workers.engine import Fields

READS = {"SELECT", "SHOW", "EXPLAIN", "VALUES", "TABLE"}
"""First words of the tags of statements that may have read and nothing else."""
_SESSION = """SELECT
    (SELECT string_agg(name || '=' || setting, ',' ORDER BY name) FROM pg_catalog.pg_settings
     WHERE source = 'session' AND name NOT IN ('application_name', 'client_encoding')),
    (SELECT string_agg(name || '=' || statement, ',' ORDER BY name) FROM pg_catalog.pg_prepared_statements
     WHERE from_sql),
    (SELECT string_agg(name || '=' || statement, ',' ORDER BY name) FROM pg_catalog.pg_cursors WHERE name <> ''),
    (SELECT string_agg(format('%s/%s/%s', classid, objid, mode), ',' ORDER BY classid, objid, mode)
     FROM pg_catalog.pg_locks WHERE locktype = 'advisory' AND pid = pg_catalog.pg_backend_pid()),
    (SELECT string_agg(c, ',' ORDER BY c) FROM pg_catalog.pg_listening_channels() c),
    (SELECT string_agg(relname, ',' ORDER BY relname) FROM pg_catalog.pg_class
     WHERE relnamespace = pg_catalog.pg_my_temp_schema() AND relkind IN ('r', 'v', 'S'))"""
_LOOK_AFTER_READ = """SELECT pg_catalog.pg_current_xact_id_if_assigned() IS NOT NULL OR EXISTS (SELECT 1
    FROM pg_catalog.pg_locks WHERE locktype = 'advisory' AND pid = pg_catalog.pg_backend_pid())"""


def application_name(worker: int) -> str:
    """Return the name under which the server knows the connections of a worker process."""
    return f"forkpoint-worker-{worker}"


@dataclass(slots=True)
class PostgresCall:
    """One call as the driver sends it."""

    tool: str
    arguments: dict[str, Any]
    output_bytes: int
    until: float

    @property
    def text(self) -> str:
        return str(self.arguments["sql"])

    @property
    def shape(self) -> str:
        return str(self.arguments.get("format", "json"))

    def rows(self) -> RowCollector:
        most = MAX_COMPARED if self.tool in ("compare", "explain") else int(self.arguments.get("max_rows", 100))
        return RowCollector(most, self.output_bytes)


class WriteAttemptError(Exception):
    """The server does not let this statement run as one that only reads."""


class Link:
    """One connection, and what is known of the database behind it."""

    def __init__(self, dsn: str) -> None:
        name = application_name(os.getpid())
        self.connection = psycopg.connect(dsn, autocommit=True, prepare_threshold=None, application_name=name)
        self._definitions: dict[bool, dict[str, str]] = {}
        self._types: dict[int, str] = {}

    @property
    def status(self) -> pq.TransactionStatus:
        return pq.TransactionStatus(self.connection.pgconn.transaction_status)

    def send(
        self, text: str, call: PostgresCall, *, parameters: Any = None, single: bool = False, stop: bool = False
    ) -> PostgresOutcome:
        """Run one text of the agent's."""
        statement = Statement(self.connection.pgconn, call.rows(), until=call.until, stop_when_full=stop)
        return statement.run(text, parameters, single=single)

    def ask(self, query: str) -> tuple[Any, ...]:
        """Run a query of ours and return its one row."""
        row: tuple[Any, ...] = self.connection.execute(query).fetchone()  # type: ignore[assignment]
        return row

    def meaning(self, text: str, *, writing: bool) -> str:
        """Return text with all that it may lead to."""
        if writing not in self._definitions:
            self._definitions[writing] = catalog.definitions(self.connection, writing=writing)
        return reach(text, self._definitions[writing])

    def forget_definitions(self) -> None:
        """The schema may be another now."""
        self._definitions.clear()
        self._types.clear()

    def type_names(self, oids: list[int]) -> list[str]:
        """Return the names of types by their object ids."""
        for oid in set(oids) - self._types.keys():
            # Where the agent's transaction has failed, nothing can be asked.
            failed = self.status == pq.TransactionStatus.INERROR
            self._types[oid] = "" if failed else str(self.ask(f"SELECT pg_catalog.format_type({oid}, NULL)")[0])
        return [self._types[oid] for oid in oids]

    def read(self, text: str, call: PostgresCall, parameters: Any = None) -> PostgresOutcome:
        """Run one statement that must only read, and leave nothing of it.

        Raises:
            MustWrite: the server refuses, or the statement did more than read. Nothing is left of that either.
        """
        self.connection.execute("BEGIN READ ONLY")
        try:
            outcome = self.send(text, call, parameters=parameters, single=True, stop=True)
            if outcome.failure is not None:
                code = outcome.failure.code
                # 42601 is any syntax error, and the refusal of several statements; the latter only may run.
                several = code == SEVERAL and "multiple commands" in outcome.failure.message
                if several or code == READ_ONLY or code in NOT_AS_ALONE:
                    raise WriteAttemptError
            elif not outcome.cut and (not only(outcome.tags, READS) or self._left_something()):
                raise WriteAttemptError
            return outcome
        finally:
            self._undo()

    def _left_something(self) -> bool:
        return self.status != pq.TransactionStatus.INTRANS or bool(self.ask(_LOOK_AFTER_READ)[0])

    def _undo(self) -> None:
        if self.status in (pq.TransactionStatus.INTRANS, pq.TransactionStatus.INERROR):
            self.connection.execute("ROLLBACK")

    @property
    def usable(self) -> bool:
        """Whether the connection is there, and waits for a statement."""
        return self.status == pq.TransactionStatus.IDLE

    def session(self) -> str:
        """Return what this connection alone has, empty where that is nothing. 2 ms."""
        if self.status == pq.TransactionStatus.INERROR:
            return "a transaction that failed"
        told = [part or "" for part in self.ask(_SESSION)]
        open_transaction = self.status == pq.TransactionStatus.INTRANS
        return repr((open_transaction, told)) if open_transaction or any(told) else ""

    def close(self) -> None:
        with contextlib.suppress(psycopg.Error):
            self.connection.close()


def answer_reading(link: Link, call: PostgresCall) -> tuple[Fields, bytes]:
    """Answer a call that reads.

    Raises:
        MustWrite: it does not only read.
    """
    if call.tool in ("tables", "schema"):
        return {}, listing(link.connection, call.tool, call.arguments.get("table"), call.rows().output_bytes)
    if call.tool == "script":
        raise WriteAttemptError
    meaning = link.meaning(" ".join(str(call.arguments.get(name, "")) for name in ("sql", "gold")), writing=False)
    if SESSION.search(meaning):
        raise WriteAttemptError
    told: Fields = {"volatile": VOLATILE.search(meaning) is not None}
    if call.tool == "compare":
        gold, ordered = str(call.arguments["gold"]), bool(call.arguments["ordered"])
        return told, compare(lambda text: link.read(text, call), call.text, gold, ordered=ordered)
    text = EXPLAIN + call.text if call.tool == "explain" else call.text
    try:
        parameters = parameters_of(call)
    except ValueError as error:
        return told, refused(call, str(error))
    outcome = link.read(text, call, parameters)
    return told | timed_out(outcome), answer_of(link, outcome, call)


def parameters_of(call: PostgresCall) -> list[bytes | None] | None:
    given = call.arguments.get("params")
    if given is None:
        return None
    if isinstance(given, dict):
        raise ValueError("PostgreSQL's parameters are numbered: send a list, and write $1, $2 in the statement")  # noqa: TRY004
    return [parameter(value) for value in given]


def answer_of(link: Link, outcome: PostgresOutcome, call: PostgresCall) -> bytes:
    """Return the agent's answer."""
    if outcome.failure is not None:
        return failure(outcome.failure, shape=call.shape, sql=call.text)
    types = link.type_names(outcome.types) if outcome.columns else None
    return success(outcome.columns, outcome.rows, shape=call.shape, types=types, changed=outcome.affected)


def refused(call: PostgresCall, why: str) -> bytes:
    """Return the answer to what is never done here."""
    told = Failure(why, "refused")
    if call.tool == "compare":
        return other({"match": False, "why": why, "error": told.to_json()})
    return failure(told, shape=call.shape)


def timed_out(outcome: PostgresOutcome) -> Fields:
    return {"timed_out": outcome.failure is not None and outcome.failure.kind == "timeout"}


def only(tags: list[str], words: set[str]) -> bool:
    return all(tag.split(" ")[0] in words for tag in tags)
