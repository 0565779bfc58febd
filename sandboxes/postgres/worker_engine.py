"""PostgreSQL in a worker: statements are run read-only first, and where the server refuses that, in the sandbox's own
database.

What a call changed is the server's word: the transaction id that it assigned, its counters of changed rows, its
sequences. No statement is taken apart to find out.
"""

import time
from collections import OrderedDict

from sandboxes.postgres.connection import Link, PostgresCall, WriteAttemptError, answer_reading, refused
from sandboxes.postgres.digest import DatabaseDigest
from sandboxes.postgres.private_database import PrivateDatabase
from sandboxes.postgres.statement import PostgresServerLostError
from sandboxes.workers.engine import Fields

CONNECTIONS = 4
"""Databases that one reader stays connected to."""


def make_engine() -> "PostgresEngine":
    """See `sandboxes.sqlbox.engine.Engine`."""
    return PostgresEngine()


class PostgresEngine:
    """Readers stay connected to the databases used last; an own worker has one, and keeps its digest."""

    def __init__(self) -> None:
        self._links: OrderedDict[str, Link] = OrderedDict()
        self._own: PrivateDatabase | None = None

    def open(self, request: Fields) -> Fields:
        """Connect to `dsn`, the own database of a sandbox, with its `digest`. `prime`: the sequences it has used."""
        self.close()
        self._own = PrivateDatabase(Link(request["dsn"]), DatabaseDigest.from_json(request["digest"]))
        self._own.prime(request["prime"])
        self._own.look_around()
        return {"backend": self._own.link.connection.info.backend_pid}

    def run(self, request: Fields, body: bytes) -> tuple[Fields, bytes]:  # noqa: ARG002 - the interface's
        call = PostgresCall(
            request["tool"], request["arguments"], request["output_bytes"],
            time.monotonic() + float(request["arguments"]["timeout_s"]),
        )  # fmt: skip
        started = time.perf_counter()
        try:
            told, answer = _read(self._link(request["dsn"]), call) if self._own is None else self._own.run(call)
        except PostgresServerLostError as error:
            return {"lost": error.cause, "told": str(error)}, b""
        return told | {"seconds": time.perf_counter() - started}, answer

    def close(self) -> None:
        for link in [*self._links.values(), *([self._own.link] if self._own else [])]:
            link.close()
        self._links.clear()
        self._own = None

    def _link(self, dsn: str) -> Link:
        link = self._links.pop(dsn, None)
        if link is None or not link.usable:
            link = Link(dsn)
        self._links[dsn] = link
        if len(self._links) > CONNECTIONS:
            self._links.popitem(last=False)[1].close()
        return link


def _read(link: Link, call: PostgresCall) -> tuple[Fields, bytes]:
    """Answer a call on a shared database, where nothing may be changed; or say that it must write."""
    try:
        told, answer = answer_reading(link, call)
    except WriteAttemptError:
        if call.tool in ("compare", "explain"):
            return {}, refused(call, f"{call.tool} takes statements that only read")
        return {"must_write": True}, b""
    finally:
        # Whatever a statement left in the connection, a lock before it failed, say, is nothing to those who follow.
        if link.usable:
            link.connection.execute("DISCARD ALL")
    return told, answer
