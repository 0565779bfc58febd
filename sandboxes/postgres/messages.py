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
    """Connect to a private database.

    Attributes:
        dsn: Names it.
        digest: Digest of its content.
        sequence_use: What the session knows of sequences.
    """

    dsn: str
    digest: DatabaseDigest
    sequence_use: SequenceUse


class PrivateState(IpcRecord):
    """A private database and its session after a call; see `DatabasePosition`.

    Attributes:
        database_changed: Whether the call changed the database.
        session_changed: Whether the call changed the session.
    """

    digest: DatabaseDigest
    sequence_use: SequenceUse
    has_session: bool
    witness: bytes
    database_changed: bool
    session_changed: bool


class StatementDone(IpcMessage, op="statement_done"):
    """A call was run; the body is the agent's result.

    Attributes:
        seconds: How long it ran.
        volatile: Whether another run of it may give something else.
        timed_out: Whether its time limit stopped it.
        private: The private database after it; None on a shared one.
    """

    seconds: Number
    volatile: bool
    timed_out: bool
    private: PrivateState | None = None


class MustWrite(IpcMessage, op="must_write"):
    """The call does more than read, and needs a private database."""


class ServerLost(IpcMessage, op="server_lost"):
    """The connection to the server is unusable; see `PostgresServerLostError`."""

    cause: ServerLossCause
    message: str


class RunStatement(IpcRequest[StatementDone | MustWrite | ServerLost], op="run_statement"):
    """Run a call.

    Attributes:
        tool: The tool.
        arguments: Its arguments.
        output_bytes: Limit of the result's rows.
        dsn: The shared database to read; None for the private one.
    """

    tool: str
    arguments: dict[str, Any]
    output_bytes: int
    dsn: str | None = None
