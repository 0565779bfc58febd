"""Messages between the `sqlite` driver and its workers."""

from typing import Any, Literal

from sandboxes.ipc.codec import IpcMessage, IpcRecord, IpcRequest, Number
from sandboxes.ipc.messages import Done
from sandboxes.sqlite.counters import RowCounters


class StateGone(IpcMessage, op="sqlite_state_gone"):
    """The files do not match the request, for this reason."""

    reason: str


class OpenFork(IpcRequest[Done | StateGone], op="open_fork"):
    """Open a fork, for this request and the following ones.

    Attributes:
        path: The fork's database.
        root: The root state's database.
        pages: The origin's saved pages; None if there are none.
        saved_frames: The log's length when they were saved.
        frames: The log's length at the state to open.
        counters: The counters of that state's connection.
        settings: Its settings, by pragma.
    """

    path: str
    root: str
    pages: str | None
    saved_frames: int
    frames: int
    counters: RowCounters
    settings: dict[str, int]


class SharedState(IpcRecord):
    """A frozen state that a shared worker reads.

    Attributes:
        key: Names the state and its settings.
        path: Its database.
        frames: The length of its log.
        settings: The settings of its connection, by pragma.
        counted: Whether the rollout's counters are not those of a new connection.
    """

    key: str
    path: str
    frames: int
    settings: dict[str, int]
    counted: bool


class ForkState(IpcRecord):
    """A fork after a call. The first four members are as in `DatabaseState`.

    Attributes:
        session: Whether there is session state besides.
        wrote: Whether the call may have written something.
        lost: Whether a script failed and left changes that only the driver can undo.
    """

    digest: str
    frames: int
    counters: RowCounters
    settings: dict[str, int]
    session: bool
    wrote: bool
    lost: bool


class ToolDone(IpcMessage, op="sqlite_tool_done"):
    """A tool was run; the body is the agent's result.

    Attributes:
        seconds: How long it ran.
        volatile: Whether it used the clock or random numbers.
        kind: The kind of its error; None if there was none.
        repeatable: Whether another run fails in the same way, whatever the machine.
        needs_private: Whether it must run on a fork; there is no result then.
        fork: The fork after it; None on a shared state.
    """

    seconds: Number
    volatile: bool
    kind: str | None
    repeatable: bool
    needs_private: bool
    fork: ForkState | None = None


class RunTool(IpcRequest[ToolDone | StateGone], op="run_sqlite_tool"):
    """Run a tool of the sql endpoint, on a shared state or on the fork.

    Attributes:
        tool: The tool.
        arguments: Its arguments.
        output_bytes: Limit of the result's rows.
        frozen_ms: The time that statements see, in milliseconds since the Unix epoch; None for the present.
        seed: The seed of random numbers, if the clock is frozen.
        state: The state to read; None for the fork.
        fork: The fork to open first; None if it is open.
    """

    tool: str
    arguments: dict[str, Any]
    output_bytes: int
    frozen_ms: int | None
    seed: bytes
    state: SharedState | None = None
    fork: OpenFork | None = None


class ReadPages(IpcRequest[Done], op="read_pages"):
    """Return the pages of the fork that differ from the root's, as the body."""


class BuildFailed(IpcMessage, op="sqlite_build_failed"):
    """The source makes no database, for this reason."""

    error: str


class BuildDatabase(IpcRequest[Done | BuildFailed], op="build_database"):
    """Build a root state's database.

    Attributes:
        source: What it is built from: a script or rows, which are the body, or the file itself.
        path: The database.
        table: The table that gets the rows.
    """

    source: Literal["script", "csv", "file"]
    path: str
    table: str = ""
