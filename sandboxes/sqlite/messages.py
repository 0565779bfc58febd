"""Messages between the `sqlite` driver and its workers."""

from typing import Any, Literal

from sandboxes.ipc.codec import IpcMessage, IpcRecord, IpcRequest, Number
from sandboxes.ipc.messages import Done
from sandboxes.sqlite.counters import RowCounters


class StateGone(IpcMessage, op="sqlite_state_gone"):
    """The files do not match the request, for this reason."""

    reason: str


class OpenFork(IpcRequest[Done | StateGone], op="open_fork"):
    """Open a fork, for this request and the following ones."""

    path: str
    root: str  # The root state's database.
    pages: str | None  # The origin's saved pages; None if there are none.
    saved_frames: int  # The log's length when they were saved.
    frames: int  # The log's length at the state to open.
    counters: RowCounters
    settings: dict[str, int]  # Of the state's connection, by pragma.


class SharedState(IpcRecord):
    """A frozen state that a shared worker reads."""

    key: str  # Names the state and its settings.
    path: str
    frames: int  # The length of its log.
    settings: dict[str, int]  # Of its connection, by pragma.
    counted: bool  # Whether the rollout's counters are not those of a new connection.


class ForkState(IpcRecord):
    """A fork after a call. The first four members are as in `DatabaseState`."""

    digest: str
    frames: int
    counters: RowCounters
    settings: dict[str, int]
    session: bool  # Whether there is session state besides.
    wrote: bool  # Whether the call may have written something.
    lost: bool  # Whether a script failed and left changes that only the driver can undo.


class ToolDone(IpcMessage, op="sqlite_tool_done"):
    """A tool was run; the body is the agent's result."""

    seconds: Number
    volatile: bool  # Whether it used the clock or random numbers.
    kind: str | None  # The kind of its error; None if there was none.
    repeatable: bool  # Whether another run fails in the same way, whatever the machine.
    needs_private: bool  # Whether it must run on a fork; there is no result then.
    fork: ForkState | None = None  # The fork after it; None on a shared state.


class RunTool(IpcRequest[ToolDone | StateGone], op="run_sqlite_tool"):
    """Run a tool of the sql endpoint, on a shared state or on the fork."""

    tool: str
    arguments: dict[str, Any]
    output_bytes: int  # Limit of the result's rows.
    frozen_ms: int | None  # The time that statements see, since the Unix epoch; None for the present.
    seed: bytes  # The seed of random numbers, if the clock is frozen.
    state: SharedState | None = None  # The state to read; None for the fork.
    fork: OpenFork | None = None  # The fork to open first; None if it is open.


class ReadPages(IpcRequest[Done], op="read_pages"):
    """Return the pages of the fork that differ from the root's, as the body."""


class BuildFailed(IpcMessage, op="sqlite_build_failed"):
    """The source makes no database, for this reason."""

    error: str


class BuildDatabase(IpcRequest[Done | BuildFailed], op="build_database"):
    """Build a root state's database: from a script or rows, which are the body, or from the file itself."""

    source: Literal["script", "csv", "file"]
    path: str
    table: str = ""  # The table that gets the rows.
