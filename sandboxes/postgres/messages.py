"""Messages between the `postgres` driver and its workers."""

from typing import Any

from sandboxes.ipc.codec import IpcMessage, IpcRecord, IpcRequest, Number
from sandboxes.postgres.digest import DatabaseDigest
from sandboxes.postgres.sequence_use import SequenceUse
from sandboxes.postgres.statement import ServerLossCause


class DatabaseOpened(IpcMessage, op="database_opened"):
    """The worker is connected to its private database. backend: the process id of the session on the server."""

    backend: int


class OpenDatabase(IpcRequest[DatabaseOpened], op="open_database"):
    """Connect to the private database that a DSN names."""

    dsn: str
    digest: DatabaseDigest
    sequence_use: SequenceUse  # What the session knows of sequences.


class PrivateState(IpcRecord):
    """A private database and its session after a call, and what the call changed; see `DatabasePosition`."""

    digest: DatabaseDigest
    sequence_use: SequenceUse
    has_session: bool
    witness: bytes
    database_changed: bool
    session_changed: bool


class StatementDone(IpcMessage, op="statement_done"):
    """A call was run; the body is the agent's result."""

    seconds: Number
    volatile: bool  # Whether another run of it may give something else.
    timed_out: bool
    circumstantial: bool = False  # Whether the server failed it for want of something that all sessions share.
    private: PrivateState | None = None  # The private database after it; None on a shared one.


class MustWrite(IpcMessage, op="must_write"):
    """The call does more than read, and needs a private database."""


class ServerLost(IpcMessage, op="server_lost"):
    """The connection to the server is unusable; see `PostgresServerLostError`."""

    cause: ServerLossCause
    message: str


class RunStatement(IpcRequest[StatementDone | MustWrite | ServerLost], op="run_statement"):
    """Run a call."""

    tool: str
    arguments: dict[str, Any]
    output_bytes: int  # Limit of the result's rows.
    dsn: str | None = None  # The shared database to read; None for the private one.
