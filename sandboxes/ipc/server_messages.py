"""Messages that start tool servers and call them."""

from typing import Literal

from sandboxes.ipc.codec import IpcMessage, IpcRecord, IpcRequest, Number
from sandboxes.ipc.messages import CallDone, Done


class ServerOrder(IpcRecord):
    """What a sandbox must know to start a tool server and to reach it."""

    name: str
    command: str  # The shell command that becomes the server.
    port: int | None  # The loopback port that it listens on; None if it talks over stdin and stdout.
    environment: dict[str, str]
    workdir: str
    ready: str  # "tcp", or the path that answers below 500 when the server is ready.
    ready_s: Number  # How long it may take until it is ready.
    # A connection over which a WebSocket runs is a process too; it needs its server first.
    # The server that this one is a connection to, made ready first; None for a server itself.
    behind: "ServerOrder | None" = None
    # For a side service, the shell command that exits with 0 once it is ready, or an empty text if its port tells; None
    # for a tool server.
    health: str | None = None


# Two descriptors for a server without a port: its stdin and its stdout.
class ServerConnected(IpcMessage, op="server_connected", descriptors=(1, 2)):
    """The descriptors lead to the server: one connection, or its stdin and its stdout."""

    # The proxy makes the protocol's handshake with a fresh process; an older one has had it.
    fresh: bool  # Whether the server was started for this call.
    note: str  # What an earlier call noted about this server process; empty if nothing.


# After this message the sandbox counts as dead: what the server did before is not known.
class ServerFailed(IpcMessage, op="server_failed"):
    """The server ended, or did not get ready in time."""

    # The codec refuses any other text, so the proxy may match without a default.
    kind: Literal["crashed", "silent"]  # "crashed" or "silent".
    detail: str  # The reason, with the last lines of the server's log.


class UseServer(IpcRequest[ServerConnected | ServerFailed], op="serve"):
    """Begin a call to a tool server; the body is what to send to it at once."""

    server: ServerOrder


# Only between `serve` and `served`: the supervisor waits for one of these two.
class ReconnectServer(IpcRequest[ServerConnected | ServerFailed], op="reconnect"):
    """During a call to a tool server: give another connection to it."""


class FinishServerCall(IpcRequest[CallDone], op="served"):
    """End a call to a tool server: its answer has come."""

    # Decides whether the call counts as a change of the server's memory.
    read: bool  # Whether the call is known not to change the server's memory.
    log: bool = False  # Whether the answer is to contain the server's log.
    # Optional and not empty by default: a call that agreed on nothing must not delete the note.
    note: str | None = None  # What later calls have to know about this server process; None leaves the note as it is.


class StartServers(IpcRequest[Done | ServerFailed], op="start_servers"):
    """Start tool servers as part of the root state."""

    servers: list[ServerOrder]
