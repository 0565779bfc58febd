"""SQLite in a worker: shared read-only connections, or the one connection of a sandbox that writes."""

import functools
import os
import sqlite3
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

from sandboxes.sql.sqlite_authorizer import SETTINGS, Act
from sandboxes.sql.sqlite_connection import SqliteConnection
from sandboxes.sql.sqlite_tools import READING, ToolRun, Tools
from sandboxes.sql.sqlite_volatile import VolatileInputs
from sandboxes.sqlite import build as sqlite_build
from sandboxes.sqlite.counters import Counters, prime
from sandboxes.sqlite.pages import Pages, WalIndex, wal_bytes
from sandboxes.workers.engine import Fields

_OPEN_AT_ONCE = 4
"""States that a shared worker keeps open: 2 MB of page cache each."""
_LIKE = "case_sensitive_like"
_WARMING = {"sql": "INSERT INTO t VALUES (1)", "params": [], "max_rows": 1, "timeout_s": 1.0, "format": "json"}


@functools.cache
def prepare() -> VolatileInputs:
    """Put the clock in its place, once before the forks; it takes 2 ms."""
    return VolatileInputs()


def make_engine() -> "SqliteEngine":
    return SqliteEngine(prepare())


class SqliteEngine:
    """See `sandboxes.sqlbox.engine.Engine`.

    `run` without an `open` before reads at the state that its `place` names: `{"key", "path", "frames", "settings",
    "counted"}`. After an `open`, or with its request as `open`, it runs on that fork. Its answer's fields: `seconds`,
    `volatile`, `kind` (of the error), `needs_private`; on a fork also what `ForkConnection.state` says.
    """

    def __init__(self, inputs: VolatileInputs) -> None:
        self._inputs = inputs
        self._shared: OrderedDict[str, SqliteConnection] = OrderedDict()
        self._logged = ""
        self._fork: ForkConnection | None = None

    def open(self, request: Fields) -> Fields:
        """Open a fork: `{"path", "root", "pages", "saved_frames", "frames", "counters", "settings"}`.

        The answer is `{}`, or `{"gone": why}` where the files are not what request says.
        """
        # A fork may be one file with a state that is open here: see `_close_logged`.
        self.close()
        self._fork = ForkConnection(request, self._inputs)
        return self._fork.begin()

    def run(self, request: Fields, body: bytes) -> tuple[Fields, bytes]:
        """See `Engine.run`. Tools are those of the endpoint, `pages`, and `build_…` for root states."""
        tool = str(request["tool"])
        if tool.startswith("build_"):
            return self._build(tool, request, body), b""
        if tool == "pages":
            assert self._fork is not None
            return {}, self._fork.pages.save()
        self._inputs.begin(request["frozen_ms"], bytes.fromhex(request["seed"]))
        if request.get("open") and (gone := self.open(request["open"])):
            return gone, b""
        if self._fork is not None:
            return self._fork.run(tool, request)
        return self._read(tool, request)

    def warm(self) -> None:
        """Do everything once, ahead of the first request: after a fork the first time takes some ms longer."""
        connection = SqliteConnection("file::memory:", self._inputs)
        connection.raw.execute("CREATE TABLE t (a)")
        told = Tools(connection, private=True, output_bytes=1 << 10).run("query", _WARMING)
        _fields(told, 0.0, self._inputs)
        Counters.read(connection.raw)
        apply_settings(connection, read_settings(connection))
        connection.has_session()
        connection.close()

    def close(self) -> None:
        """Close the shared connections. A fork's is never closed: it ends with its worker, and writes nothing then."""
        while self._shared:
            self._shared.popitem()[1].close()

    def _read(self, tool: str, request: Fields) -> tuple[Fields, bytes]:
        place = request["place"]
        connection = self._connection(place)
        if isinstance(connection, str):
            return {"gone": connection}, b""
        began = time.perf_counter()
        told = Tools(connection, private=False, output_bytes=request["output_bytes"]).run(tool, request["arguments"])
        fields = _fields(told, began, self._inputs)
        if place["counted"] and (told.reads_counters or (tool not in READING and told.acts - {Act.READ})):
            # It reads what the rollout's earlier statements left there, or (EXPLAIN of a change) sets it back.
            fields["needs_private"] = True
        return fields, b"" if fields["needs_private"] else told.body

    def _connection(self, place: Fields) -> SqliteConnection | str:
        """Return the shared connection at a state, or say why there can be none."""
        known = self._shared.get(place["key"])
        if known is not None:
            self._shared.move_to_end(place["key"])
            return known
        path = Path(place["path"])
        still = "" if place["frames"] else "&immutable=1"
        if place["frames"]:
            self._close_logged()
        connection = SqliteConnection(f"{path.as_uri()}?mode=ro{still}", self._inputs)
        connection.raw.execute("SELECT count(*) FROM sqlite_schema").fetchone()
        if place["frames"] and (frames := _frames(path)) != place["frames"]:
            connection.close()
            return f"its log has {frames} frames, not {place['frames']}"
        apply_settings(connection, place["settings"])
        self._shared[place["key"]] = connection
        self._logged = place["key"] if place["frames"] else self._logged
        while len(self._shared) > _OPEN_AT_ONCE:
            self._shared.popitem(last=False)[1].close()
        return connection

    def _close_logged(self) -> None:
        """Close the state with a log that is open. States of one root may be one file by several names, and the library
        knows a file by its number: in one process, two of their logs would be taken for one."""
        connection = self._shared.pop(self._logged, None)
        if connection is not None:
            connection.close()

    def _build(self, tool: str, request: Fields, body: bytes) -> Fields:
        path = Path(request["path"])
        try:
            match tool:
                case "build_script":
                    sqlite_build.build_script(path, sqlite_build.text_of(body), self._inputs)
                case "build_csv":
                    sqlite_build.build_csv(path, request["table"], body, self._inputs)
                case "build_file":
                    sqlite_build.settle(path, self._inputs)
        except (sqlite_build.BuildError, UnicodeDecodeError) as error:
            return {"error": str(error)}
        return {}


class ForkConnection:
    """The connection of a sandbox that writes, on its fork."""

    def __init__(self, request: Fields, inputs: VolatileInputs) -> None:
        self._request, self._inputs = request, inputs
        self._path = Path(request["path"])
        saved = request["pages"]
        self.pages = Pages(Path(request["root"]), Path(saved).read_bytes() if saved else b"")
        self._frames = int(request["saved_frames"])
        self._settings: dict[str, int] = {}

    def begin(self) -> Fields:
        """Open the fork at the state that it is to be in: what its log has beyond that is cut off."""
        wal = self._path.with_name(self._path.name + "-wal")
        wanted = wal_bytes(self._request["frames"], self.pages.page_size)
        if wal.exists() and wal.stat().st_size > wanted:
            os.truncate(wal, wanted)
        self._connection = SqliteConnection(self._path.as_uri(), self._inputs)
        self._connection.raw.execute("SELECT count(*) FROM sqlite_schema").fetchone()
        self._index = os.open(f"{self._path}-shm", os.O_RDONLY | os.O_CLOEXEC)
        self._wal = os.open(wal, os.O_RDONLY | os.O_CLOEXEC)
        prime(self._connection.raw, Counters(*self._request["counters"]))
        self._defaults = read_settings(self._connection)
        apply_settings(self._connection, self._request["settings"])
        self._settings = dict(self._request["settings"])
        frames = self._take_commits()
        if frames != self._request["frames"]:
            return {"gone": f"its log has {frames} frames, not {self._request['frames']}"}
        return {}

    def run(self, tool: str, request: Fields) -> tuple[Fields, bytes]:
        """Run a tool and say what the database and the session are then."""
        began = time.perf_counter()
        tools = Tools(self._connection, private=True, output_bytes=request["output_bytes"])
        told, lost = self._atomic(tools, request["arguments"]) if tool == "script" else (None, False)
        if told is None:
            told = tools.run(tool, request["arguments"])
        fields = _fields(told, began, self._inputs)
        return fields | self.state(told) | {"lost": lost}, told.body

    def state(self, told: ToolRun) -> Fields:
        """Return `digest`, `frames`, `counters`, `settings`, whether there is a `session` besides, and whether the
        call `wrote`, or may have: did other than read."""
        if Act.SETTING in told.acts or Act.PRIVATE in told.acts:
            now = read_settings(self._connection)
            self._settings = {name: value for name, value in now.items() if value != self._defaults[name]}
        frames = self._take_commits()
        return {
            "digest": self.pages.digest().hex(),
            "frames": frames,
            "counters": Counters.read(self._connection.raw),
            "settings": self._settings,
            "session": self._connection.has_session(),
            "wrote": bool(told.acts - {Act.READ}),
        }

    def _atomic(self, tools: Tools, arguments: dict[str, Any]) -> tuple[ToolRun, bool]:
        """Run a script; say, too, whether it failed and left something that only the driver can take back."""
        raw = self._connection.raw
        before = (self._take_commits(), Counters.read(raw), self._connection.has_session())
        nested = raw.in_transaction
        if nested:
            raw.execute("SAVEPOINT forkpoint_script")
        told = tools.run("script", arguments)
        if nested and raw.in_transaction:
            # Where the script ended the transaction, its savepoint has ended too.
            gone = not self._leave_savepoint(undo=told.failure is not None)
            return told, gone and told.failure is not None
        if told.failure is None:
            return told, False
        after = (self._take_commits(), Counters.read(raw), self._connection.has_session())
        return told, after != before or before[2]

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
        index = WalIndex.read(self._index)
        if index.frames != self._frames:
            self.pages.take(self._wal, self._frames, index.frames, index.pages)
            self._frames = index.frames
        return self._frames


def read_settings(connection: SqliteConnection) -> dict[str, int]:
    """Return the connection's settings, by pragma."""
    raw = connection.raw
    read = {name: raw.execute(f"PRAGMA {name}").fetchone()[0] for name in SETTINGS if name != _LIKE}
    # It cannot be read, only seen.
    return read | {_LIKE: 1 - raw.execute("SELECT 'a' LIKE 'A'").fetchone()[0]}


def apply_settings(connection: SqliteConnection, settings: dict[str, int]) -> None:
    for name, value in settings.items():
        connection.raw.execute(f"PRAGMA {name}={value}")


def _fields(told: ToolRun, began: float, inputs: VolatileInputs) -> Fields:
    return {
        "seconds": time.perf_counter() - began,
        "volatile": inputs.used,
        "kind": told.failure.kind if told.failure is not None else None,
        # A value that is too large is too large on every machine.
        "repeatable": told.failure is not None and told.failure.code == "SQLITE_TOOBIG",
        "needs_private": told.needs_private,
    }


def _frames(path: Path) -> int:
    fd = os.open(f"{path}-shm", os.O_RDONLY | os.O_CLOEXEC)
    return WalIndex.read(fd).frames
