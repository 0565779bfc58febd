"""PostgreSQL in a worker: read-only connections to shared databases, or the private database of one sandbox.

The server reports what a call changed: by the transaction id that it assigned, its counters of changed rows, and its
sequences. No statement is parsed to find out.
"""

import time
from collections import OrderedDict

from sandboxes.postgres.connection import PostgresCall, PostgresLink, WriteAttemptError, answer_reading, refused
from sandboxes.postgres.digest import DatabaseDigest
from sandboxes.postgres.private_database import PrivateDatabase
from sandboxes.postgres.sequence_use import SequenceUse
from sandboxes.postgres.statement import PostgresServerLostError
from sandboxes.workers.engine import Fields

MAX_CONNECTIONS = 4
"""Databases that a shared worker stays connected to. Each connection is a process on the server."""


def make_engine() -> "PostgresEngine":
    """Create the engine of a worker."""
    return PostgresEngine()


class PostgresEngine:
    """The worker engine of the `postgres` driver (`sandboxes.workers.engine.WorkerEngine`).

    A shared worker stays connected to the databases that it used last. A dedicated worker has one connection, and keeps
    the digest of its database.
    """

    def __init__(self) -> None:
        self._links: OrderedDict[str, PostgresLink] = OrderedDict()
        self._private: PrivateDatabase | None = None

    def open(self, request: Fields) -> Fields:
        """Connect to a private database.

        Args:
            request: `dsn`; `digest` of the content; `sequence_use`, what the session knows of sequences.

        Returns:
            `backend`: process id of the session on the server.
        """
        self.close()
        self._private = PrivateDatabase(PostgresLink(request["dsn"]), DatabaseDigest.from_json(request["digest"]))
        self._private.prime(SequenceUse.from_json(request["sequence_use"]))
        self._private.warm_up()
        return {"backend": self._private.link.connection.info.backend_pid}

    def run(self, request: Fields, body: bytes) -> tuple[Fields, bytes]:  # noqa: ARG002 - the protocol has it
        """Run a call on the private database, or read on the database that `dsn` names."""
        call = PostgresCall(
            request["tool"], request["arguments"], request["output_bytes"],
            time.monotonic() + float(request["arguments"]["timeout_s"]),
        )  # fmt: skip
        started = time.perf_counter()
        try:
            if self._private is None:
                fields, result = _read(self._link(request["dsn"]), call)
            else:
                fields, result = self._private.run(call)
        except PostgresServerLostError as error:
            return {"lost": error.cause, "message": str(error)}, b""
        return fields | {"seconds": time.perf_counter() - started}, result

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


def _read(link: PostgresLink, call: PostgresCall) -> tuple[Fields, bytes]:
    """Run a call on a shared database. The answer `must_write` says that the call needs a private one."""
    try:
        fields, result = answer_reading(link, call)
    except WriteAttemptError:
        if call.tool in ("compare", "explain"):
            return {}, refused(call, f"{call.tool} takes statements that only read")
        return {"must_write": True}, b""
    finally:
        # A failed statement may have left something in the connection, such as a lock. The next call must not see it.
        if link.usable:
            link.connection.execute("DISCARD ALL")
            link.act_as_agent()
    return fields, result
