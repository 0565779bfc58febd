"""One statement sent to the server, and its result read within limits of time and size.

The result is read in chunks of rows, in the server's text form: no value changes, and memory stays small. libpq's
asynchronous interface is used directly, because a statement must be cancelled while it runs.
"""

import contextlib
import select
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import psycopg
from psycopg import pq

from sandboxes.postgres.values import reader_of
from sandboxes.sql.results import Failure, RowCollector
from sandboxes.sql.values import encode_text

CANCEL_S = 0.5
"""How long the server may take to cancel a statement. After that the worker gives up, and its session is ended."""
MAX_DRAINED = 20_000
"""Rows that are read and discarded after the result is full, before the statement is cancelled."""
_ROWS = (pq.ExecStatus.SINGLE_TUPLE, pq.ExecStatus.TUPLES_CHUNK, pq.ExecStatus.TUPLES_OK)
_COPIES = (pq.ExecStatus.COPY_IN, pq.ExecStatus.COPY_OUT, pq.ExecStatus.COPY_BOTH)
CANCELLED, READ_ONLY, SYNTAX_ERROR = "57014", "25006", "42601"
"""SQLSTATEs (PostgreSQL's manual, appendix A)."""
NOT_IN_TRANSACTION = {"25001", "3B001", "2D000"}
"""SQLSTATEs of statements that fail inside a transaction block only, such as VACUUM and procedures that commit."""


_DETAIL, _HINT = pq.DiagnosticField.MESSAGE_DETAIL, pq.DiagnosticField.MESSAGE_HINT
ServerLossCause = Literal["timeout", "memory", "connection"]


class PostgresServerLostError(RuntimeError):
    """The connection is unusable: "timeout" (no cancellation), "memory" (of the client library) or "connection"."""

    def __init__(self, cause: ServerLossCause, message: str) -> None:
        super().__init__(message)
        self.cause: ServerLossCause = cause


@dataclass(slots=True)
class PostgresOutcome:
    """The outcome of a text with one or several statements."""

    rows: RowCollector  # Rows of the last statement, up to their limits.
    columns: list[str] = field(default_factory=list)  # Names of its columns; empty if it returns no rows.
    types: list[int] = field(default_factory=list)  # Object ids of the columns' types.
    tags: list[str] = field(default_factory=list)  # The server's command tag of each statement, such as "INSERT 0 1".
    failure: Failure | None = None
    cut: bool = False  # The last statement was cancelled because its result was full.
    affected: int = 0  # Rows that the last statement without columns changed.


class Statement:
    """Sends one text and reads all its results."""

    def __init__(self, connection: pq.abc.PGconn, rows: RowCollector, *, until: float, stop_when_full: bool) -> None:
        """Prepare a statement with a monotonic deadline; `stop_when_full` is for statements that only read."""
        self._connection, self._until, self._stop = connection, until, stop_when_full
        self._outcome = PostgresOutcome(rows)
        self._full = self._open = self._timed_out = False
        self._discarded, self._tag = 0, b""

    def run(self, text: str, parameters: Sequence[bytes | None] | None, *, single: bool) -> PostgresOutcome:
        """Run a text of one or several statements; `single` lets the server refuse several."""
        try:
            # The extended protocol accepts one statement only; the simple one accepts several.
            if single or parameters is not None:
                self._connection.send_query_params(text.encode(), parameters or [])
            else:
                self._connection.send_query(text.encode())
            _request_chunks(self._connection)
            while (result := self._next()) is not None:
                self._take(result)
        except (OSError, psycopg.Error) as error:
            raise _lost(str(error)) from error
        if self._connection.status != pq.ConnStatus.OK:
            raise _lost(self._connection.error_message.decode(errors="replace"))
        return self._outcome

    def _next(self) -> Any:
        while self._connection.is_busy():
            remaining_s = self._until - time.monotonic()
            ready = select.select([self._connection.socket], [], [], max(0.0, remaining_s))[0]
            if ready:
                self._connection.consume_input()
            elif self._timed_out:
                # The cancellation was sent CANCEL_S ago.
                raise PostgresServerLostError("timeout", "the server does not stop the statement")
            else:
                self._timed_out = True
                self._cancel()
        return self._connection.get_result()

    def _cancel(self) -> None:
        # The request goes over a connection of its own. If it fails, the deadline below ends the wait.
        self._until = time.monotonic() + CANCEL_S
        with contextlib.suppress(Exception):
            self._connection.get_cancel().cancel()

    def _take(self, result: Any) -> None:
        status = result.status
        if status in _ROWS:
            self._take_rows(result)
        if status in (pq.ExecStatus.TUPLES_OK, pq.ExecStatus.COMMAND_OK):
            if status == pq.ExecStatus.COMMAND_OK:
                # The result is that of the last statement, and this one has no columns.
                self._begin([], [])
            self._outcome.tags.append((result.command_status or self._tag).decode())
            self._outcome.affected = result.command_tuples or 0
            self._tag = b""
        elif status in (pq.ExecStatus.FATAL_ERROR, pq.ExecStatus.BAD_RESPONSE):
            self._fail(result)
        elif status in _COPIES:
            self._refuse_copy(status)

    def _take_rows(self, result: Any) -> None:
        if not self._open:
            names = [(result.fname(n) or b"").decode(errors="replace") for n in range(result.nfields)]
            self._begin(names, [result.ftype(n) for n in range(result.nfields)])
        # The last chunk has no rows. Its tag may have come with the chunk before.
        self._tag = result.command_status or self._tag
        self._open = result.status != pq.ExecStatus.TUPLES_OK
        for row in range(result.ntuples):
            if self._full:
                self._discarded += result.ntuples - row
                break
            values = [_value(result, row, n, self._outcome.types[n]) for n in range(result.nfields)]
            self._full = not self._outcome.rows.add(values)
        if self._stop and self._discarded > MAX_DRAINED and not self._outcome.cut:
            self._outcome.cut = True
            self._cancel()

    def _begin(self, names: list[str], types: list[int]) -> None:
        # The result of an earlier statement of the text is discarded: only the last one is returned.
        old = self._outcome.rows
        self._outcome.rows = RowCollector(old.max_rows, old.output_bytes)
        self._outcome.columns, self._outcome.types = names, types
        self._full, self._discarded = False, 0

    def _fail(self, result: Any) -> None:
        code = _field(result, pq.DiagnosticField.SQLSTATE)
        # Our own cancellation of a full result is not a failure.
        if self._outcome.cut and code == CANCELLED:
            return
        if self._timed_out and code == CANCELLED:
            self._outcome.failure = Failure(
                "the statement took longer than timeout_s, and was stopped", "timeout", code
            )
            return
        primary = _field(result, pq.DiagnosticField.MESSAGE_PRIMARY) or "the server gave no reason"
        detail, hint = (_field(result, which) for which in (_DETAIL, _HINT))
        # An error without SQLSTATE comes from the client library, which has no memory for the result.
        self._outcome.failure = Failure(explained(primary, detail, hint), "sql" if code else "limit", code or None)

    def _refuse_copy(self, status: Any) -> None:
        self._outcome.failure = Failure(
            "COPY between the server and a client has no client here: use SELECT, or INSERT … VALUES", "refused"
        )
        # End the COPY either way: the connection accepts no other statement until then.
        if status == pq.ExecStatus.COPY_IN:
            self._connection.put_copy_end(b"COPY FROM STDIN is not available here")
        else:
            self._cancel()
            while self._connection.get_copy_data(0)[0] > 0:
                pass


def explained(message: str, detail: str | None, hint: str | None) -> str:
    """Return an error of the server as agents read it."""
    return "\n".join([message, *(f"{name}: {text}" for name, text in (("DETAIL", detail), ("HINT", hint)) if text)])


def _lost(message: str) -> PostgresServerLostError:
    return PostgresServerLostError(
        "memory" if "memory" in message else "connection", message.strip() or "the server ended the connection"
    )


def _request_chunks(connection: pq.abc.PGconn) -> None:
    if pq.version() >= 170000:
        connection.set_chunked_rows_mode(100)
    else:
        connection.set_single_row_mode()


def _value(result: Any, row: int, column: int, oid: int) -> Any:
    data = result.get_value(row, column)
    if data is None:
        return None
    try:
        return reader_of(oid)(data.decode())
    except UnicodeDecodeError:
        # The session has another `client_encoding`.
        return encode_text(data)


def _field(result: Any, which: Any) -> str:
    return str((result.error_field(which) or b"").decode(errors="replace"))
