"""SQLite in a worker: shared read-only connections, or the one connection of a sandbox that writes.

Theory of operation. A *shared* worker opens the state that a request names read-only, and keeps a few open. The engine
refuses every write, and the guard stops statements that need session state; the driver then runs the call again on a
fork. A *dedicated* worker, after an `open`, owns a fork. After each call it reads the new frames of the log and reports
the digest.

A state without a log never changes, so it is opened as immutable: SQLite then takes no locks and creates no files. The
connection of a fork is never closed, which would run a checkpoint; the process just ends.
"""

import functools
import os
import sqlite3
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

from sandboxes.ipc.codec import IpcMessage
from sandboxes.ipc.messages import Done
from sandboxes.sql.sqlite_authorizer import SETTINGS, Act
from sandboxes.sql.sqlite_connection import SqliteConnection
from sandboxes.sql.sqlite_tools import READING, ToolRun, Tools
from sandboxes.sql.sqlite_volatile import VolatileInputs
from sandboxes.sqlite import build as sqlite_build
from sandboxes.sqlite.counters import RowCounters, prime
from sandboxes.sqlite.messages import (
    BuildDatabase,
    BuildFailed,
    ForkState,
    OpenFork,
    ReadPages,
    RunTool,
    SharedState,
    StateGone,
    ToolDone,
)
from sandboxes.sqlite.pages import Pages, WalIndex, wal_bytes
from sandboxes.workers.engine import Answer

_MAX_OPEN = 4
"""States that a shared worker keeps open, with up to 2 MB of page cache each."""
_LIKE = "case_sensitive_like"
"""The one setting that SQLite cannot report."""
_WARM_UP = {"sql": "INSERT INTO t VALUES (1)", "params": [], "max_rows": 1, "timeout_s": 1.0, "format": "json"}


@functools.cache
def prepare() -> VolatileInputs:
    """Replace the library's clock, once in the zygote."""
    return VolatileInputs()


def make_engine() -> "SqliteEngine":
    """Create the engine of a worker."""
    return SqliteEngine(prepare())


class SqliteEngine:
    """The worker engine of the `sqlite` driver (`sandboxes.workers.engine.WorkerEngine`)."""

    def __init__(self, inputs: VolatileInputs) -> None:
        self._inputs = inputs
        self._shared: OrderedDict[str, SqliteConnection] = OrderedDict()
        self._logged = ""
        self._fork: ForkConnection | None = None

    def answer(self, request: IpcMessage, body: bytes) -> Answer:
        """Open a fork, run a tool, save a fork's pages, or build the database of a root state."""
        match request:
            case RunTool():
                return self._run(request)
            case OpenFork():
                return self._open(request), b""
            case ReadPages():
                assert self._fork is not None
                return Done(), self._fork.pages.save()
            case BuildDatabase():
                return self._build(request, body), b""
        raise AssertionError(f"{request.op} is not for this engine")

    def _open(self, request: OpenFork) -> Done | StateGone:
        # The fork may be the same file as a state that is open here: see `_close_logged`.
        self.close()
        self._fork = ForkConnection(request, self._inputs)
        return self._fork.begin()

    def _run(self, request: RunTool) -> Answer:
        self._inputs.begin(request.frozen_ms, request.seed)
        if request.fork is not None and isinstance(gone := self._open(request.fork), StateGone):
            return gone, b""
        if self._fork is not None:
            return self._fork.run(request)
        assert request.state is not None
        return self._read(request, request.state)

    def warm(self) -> None:
        """Use every code path once. The first use after a fork takes some milliseconds longer."""
        connection = SqliteConnection("file::memory:", self._inputs)
        connection.raw.execute("CREATE TABLE t (a)")
        tool_run = Tools(connection, private=True, output_bytes=1 << 10).run("query", _WARM_UP)
        _done(tool_run, 0.0, self._inputs)
        RowCounters.read(connection.raw)
        apply_settings(connection, read_settings(connection))
        connection.has_session()
        connection.close()

    def close(self) -> None:
        """Close the shared connections. The connection of a fork ends with its worker, without a checkpoint."""
        while self._shared:
            self._shared.popitem()[1].close()

    def _read(self, request: RunTool, state: SharedState) -> Answer:
        connection = self._connection(state)
        if isinstance(connection, StateGone):
            return connection, b""
        began = time.perf_counter()
        tools = Tools(connection, private=False, output_bytes=request.output_bytes)
        tool_run = tools.run(request.tool, request.arguments)
        # The call reads the rollout's counters, which this connection lacks; EXPLAIN of a change resets them.
        counts = tool_run.reads_counters or (request.tool not in READING and bool(tool_run.acts - {Act.READ}))
        done = _done(tool_run, began, self._inputs, needs_private=state.counted and counts)
        return done, b"" if done.needs_private else tool_run.body

    def _connection(self, state: SharedState) -> SqliteConnection | StateGone:
        cached = self._shared.get(state.key)
        if cached is not None:
            self._shared.move_to_end(state.key)
            return cached
        path = Path(state.path)
        immutable = "" if state.frames else "&immutable=1"
        if state.frames:
            self._close_logged()
        connection = SqliteConnection(f"{path.as_uri()}?mode=ro{immutable}", self._inputs)
        connection.raw.execute("SELECT count(*) FROM sqlite_schema").fetchone()
        if state.frames and (frames := _frames(path)) != state.frames:
            connection.close()
            return StateGone(f"its log has {frames} frames, not {state.frames}")
        apply_settings(connection, state.settings)
        self._shared[state.key] = connection
        self._logged = state.key if state.frames else self._logged
        # The least recently used state is first.
        while len(self._shared) > _MAX_OPEN:
            self._shared.popitem(last=False)[1].close()
        return connection

    def _close_logged(self) -> None:
        """Close the open state that has a log, if any."""
        # States of one root may be hard links of one file. SQLite identifies files by inode within a process, so it
        # would use one log for two such states.
        connection = self._shared.pop(self._logged, None)
        if connection is not None:
            connection.close()

    def _build(self, request: BuildDatabase, body: bytes) -> Done | BuildFailed:
        path = Path(request.path)
        try:
            match request.source:
                case "script":
                    sqlite_build.build_script(path, sqlite_build.text_of(body), self._inputs)
                case "csv":
                    sqlite_build.build_csv(path, request.table, body, self._inputs)
                case "file":
                    sqlite_build.settle(path, self._inputs)
        except (sqlite_build.BuildError, UnicodeDecodeError) as error:
            return BuildFailed(str(error))
        return Done()


class ForkConnection:
    """The connection of a dedicated worker to its fork."""

    def __init__(self, request: OpenFork, inputs: VolatileInputs) -> None:
        self._request, self._inputs = request, inputs
        self._path = Path(request.path)
        # The pages of the fork that differ from the root's.
        self.pages = Pages(Path(request.root), Path(request.pages).read_bytes() if request.pages else b"")
        self._frames = request.saved_frames
        self._settings: dict[str, int] = {}

    def begin(self) -> Done | StateGone:
        """Open the fork at its state. Later frames of its log belong to a call that was undone, and are cut off."""
        wal = self._path.with_name(self._path.name + "-wal")
        length = wal_bytes(self._request.frames, self.pages.page_size)
        if wal.exists() and wal.stat().st_size > length:
            os.truncate(wal, length)
        self._connection = SqliteConnection(self._path.as_uri(), self._inputs)
        self._connection.raw.execute("SELECT count(*) FROM sqlite_schema").fetchone()
        # These descriptors stay open as long as the connection: see `WalIndex.read`.
        self._index = os.open(f"{self._path}-shm", os.O_RDONLY | os.O_CLOEXEC)
        self._wal = os.open(wal, os.O_RDONLY | os.O_CLOEXEC)
        # Counters before settings: priming changes rows, which `query_only` would forbid.
        prime(self._connection.raw, self._request.counters)
        self._defaults = read_settings(self._connection)
        apply_settings(self._connection, self._request.settings)
        self._settings = dict(self._request.settings)
        frames = self._take_commits()
        if frames != self._request.frames:
            return StateGone(f"its log has {frames} frames, not {self._request.frames}")
        return Done()

    def run(self, request: RunTool) -> Answer:
        """Run a tool, and report the state of the database and the session after it."""
        began = time.perf_counter()
        tools = Tools(self._connection, private=True, output_bytes=request.output_bytes)
        if request.tool == "script":
            tool_run, lost = self._atomic(tools, request.arguments)
        else:
            tool_run, lost = tools.run(request.tool, request.arguments), False
        return _done(tool_run, began, self._inputs, fork=self._state(tool_run, lost=lost)), tool_run.body

    def _state(self, tool_run: ToolRun, *, lost: bool) -> ForkState:
        # Any statement may switch off the deferral of foreign keys, which holds until the next commit.
        if Act.SETTING in tool_run.acts or Act.PRIVATE in tool_run.acts or "defer_foreign_keys" in self._settings:
            now = read_settings(self._connection)
            self._settings = {name: value for name, value in now.items() if value != self._defaults[name]}
        frames = self._take_commits()
        return ForkState(
            self.pages.digest().hex(), frames, RowCounters.read(self._connection.raw), self._settings,
            session=self._connection.has_session(), wrote=bool(tool_run.acts - {Act.READ}), lost=lost,
        )  # fmt: skip

    def _atomic(self, tools: Tools, arguments: dict[str, Any]) -> tuple[ToolRun, bool]:
        """Run a script so that a failure undoes it; return its result, and whether it left changes nevertheless."""
        raw = self._connection.raw
        before = (self._take_commits(), RowCounters.read(raw), self._connection.has_session())
        nested = raw.in_transaction
        if nested:
            # The agent's transaction is open: undo the script alone, and keep the transaction.
            raw.execute("SAVEPOINT forkpoint_script")
        tool_run = tools.run("script", arguments)
        if nested and raw.in_transaction:
            # A script that ended the transaction has ended our savepoint with it.
            missing = not self._leave_savepoint(undo=tool_run.failure is not None)
            return tool_run, missing and tool_run.failure is not None
        if tool_run.failure is None:
            return tool_run, False
        # Statements before the failure may have committed, each in its own transaction.
        after = (self._take_commits(), RowCounters.read(raw), self._connection.has_session())
        return tool_run, after != before or before[2]

    def _leave_savepoint(self, *, undo: bool) -> bool:
        raw = self._connection.raw
        try:
            if undo:
                raw.execute("ROLLBACK TO forkpoint_script")
            raw.execute("RELEASE forkpoint_script")
        except sqlite3.OperationalError:
            return False
        return True

    def _take_commits(self) -> int:
        # The index shows committed frames only. An open transaction may have written more.
        index = WalIndex.read(self._index)
        if index.frames != self._frames:
            self.pages.take(self._wal, self._frames, index.frames, index.pages)
            self._frames = index.frames
        return self._frames


def read_settings(connection: SqliteConnection) -> dict[str, int]:
    """Return the connection's settings, by pragma."""
    raw = connection.raw
    read = {name: raw.execute(f"PRAGMA {name}").fetchone()[0] for name in SETTINGS if name != _LIKE}
    # Without a way to read it, observe its effect.
    return read | {_LIKE: 1 - raw.execute("SELECT 'a' LIKE 'A'").fetchone()[0]}


def apply_settings(connection: SqliteConnection, settings: dict[str, int]) -> None:
    """Set the connection's settings, by pragma."""
    for name, value in settings.items():
        connection.raw.execute(f"PRAGMA {name}={value}")


def _done(
    tool_run: ToolRun,
    began: float,
    inputs: VolatileInputs,
    *,
    needs_private: bool = False,
    fork: ForkState | None = None,
) -> ToolDone:
    failure = tool_run.failure
    return ToolDone(
        time.perf_counter() - began, inputs.used, failure.kind if failure is not None else None,
        # A value beyond the length limit fails on every machine, so this failure may be shared.
        repeatable=failure is not None and failure.code == "SQLITE_TOOBIG",
        needs_private=tool_run.needs_private or needs_private, fork=fork,
    )  # fmt: skip


def _frames(path: Path) -> int:
    fd = os.open(f"{path}-shm", os.O_RDONLY | os.O_CLOEXEC)
    return WalIndex.read(fd).frames
