"""PostgreSQL in a worker: read-only connections to shared databases, or the private database of one sandbox.

Transaction id, counters of changed rows and sequences tell what a call changed; no statement is parsed to find out.
"""

import time
from collections import OrderedDict

from sandboxes.ipc.codec import IpcMessage
from sandboxes.postgres.connection import (
    CallFacts,
    PostgresCall,
    PostgresLink,
    WriteAttemptError,
    answer_reading,
    refused,
)
from sandboxes.postgres.messages import (
    DatabaseOpened,
    MustWrite,
    OpenDatabase,
    PrivateState,
    RunStatement,
    ServerLost,
    StatementDone,
)
from sandboxes.postgres.private_database import PrivateDatabase
from sandboxes.postgres.statement import PostgresServerLostError
from sandboxes.workers.engine import Answer

MAX_CONNECTIONS = 4
"""Databases that a shared worker stays connected to. Each connection is a process on the server."""


def make_engine() -> "PostgresEngine":
    """Create the engine of a worker."""
    return PostgresEngine()


class PostgresEngine:
    """The worker engine of the `postgres` driver: connected to the databases used last or, if dedicated, to its own."""

    def __init__(self) -> None:
        self._links: OrderedDict[str, PostgresLink] = OrderedDict()
        self._private: PrivateDatabase | None = None

    def answer(self, request: IpcMessage, body: bytes) -> Answer:  # noqa: ARG002 - the protocol has it
        """Connect to a private database, or run a call on it or on a shared one."""
        match request:
            case OpenDatabase():
                self.close()
                self._private = PrivateDatabase(PostgresLink(request.dsn), request.digest)
                self._private.prime(request.sequence_use)
                self._private.warm_up()
                return DatabaseOpened(self._private.link.connection.info.backend_pid), b""
            case RunStatement():
                return self._run(request)
        raise AssertionError(f"{request.op} is not for this engine")

    def _run(self, request: RunStatement) -> Answer:
        call = PostgresCall(
            request.tool, request.arguments, request.output_bytes,
            time.monotonic() + float(request.arguments["timeout_s"]),
        )  # fmt: skip
        started = time.perf_counter()
        state: PrivateState | None = None
        try:
            if request.dsn is not None:
                facts, result = _read(self._link(request.dsn), call)
            else:
                assert self._private is not None
                facts, state, result = self._private.run(call)
        except WriteAttemptError:
            return MustWrite(), b""
        except PostgresServerLostError as error:
            return ServerLost(error.cause, str(error)), b""
        seconds = time.perf_counter() - started
        return StatementDone(seconds, facts.volatile, facts.timed_out, facts.circumstantial, state), result

    def close(self) -> None:
        """Close all connections."""
        for link in [*self._links.values(), *([self._private.link] if self._private else [])]:
            link.close()
        self._links.clear()
        self._private = None

    def _link(self, dsn: str) -> PostgresLink:
        link = self._links.pop(dsn, None)
        if link is None or not link.usable:
            link = PostgresLink(dsn)
        self._links[dsn] = link
        if len(self._links) > MAX_CONNECTIONS:
            self._links.popitem(last=False)[1].close()
        return link


def _read(link: PostgresLink, call: PostgresCall) -> tuple[CallFacts, bytes]:
    try:
        return answer_reading(link, call)
    except WriteAttemptError:
        if call.tool in ("compare", "explain"):
            return CallFacts(), refused(call, f"{call.tool} takes statements that only read")
        raise
    finally:
        # A failed statement may have left something in the connection, such as a lock. The next call must not see it.
        if link.usable:
            link.connection.execute("DISCARD ALL")
            link.act_as_agent()
