"""Rollouts as training data: one JSON object on a line for each, with messages, answers, timings and labels.

Of agents inside their sandbox, it can be a line for each turn instead: the nodes of a tree for training.

1. The lines are read on a connection of their own, a page of rows at a time, each page in a transaction that has ended
   before a byte of it is sent. So a reader that takes an hour does not keep the store's write-ahead log from being
   folded. Which rollouts are written is settled at the beginning, and each is written as it was when its line began.
2. Nothing is held but the call that is written and what `calls` says of each call of the rollout, so memory does not
   grow with the store.
3. Every answer is compared with its digest. A call whose record was forgotten or is damaged has no messages; then
   `complete` is false.

Arguments that a tool fills in, such as its time limit, are left out: no model wrote them.
Headers of requests to tool servers may be credentials, so they are left out.
"""

import codecs
import re
import sqlite3
from base64 import b64encode
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import orjson

from proxy.dialects.builtin_tools import defaults_of
from proxy.dialects.shell import exit_code
from proxy.storage.blobs import blob_of
from proxy.storage.database import StoreDatabase
from proxy.storage.records import answer_of
from proxy.storage.rollouts import labels_condition
from proxy.storage.schema import is_whole
from proxy.tree.call_totals import CallTotals
from proxy.tree.labels import REWARD, typed
from proxy.tree.rollout import Outcome
from sandboxes.calls import ResourceUse, ToolResult
from sandboxes.effects import Effect
from sandboxes.spec import EnvironmentSpec

ANSWER_BYTES = 1 << 20
"""Longest answer or upload in a line, in bytes, unless a request says otherwise: models read far less of one."""
HEAD_END = b',"messages":['
"""What ends the head of a line, which says whose rollout it is."""
SENT_BYTES = 256 << 10
"""Bytes that are collected before they are sent: fewer, larger writes to the socket."""
_FUNCTION = re.compile(r"[^A-Za-z0-9_-]")
"""Characters that names of functions cannot have in the chat formats of OpenAI and others."""
_FUNCTION_CHARS = 64
_WHOLE = is_whole("records")
_PAGE_STEPS = 1000
"""Steps that are read at once: 100 kB of memory, and a query for each thousand calls."""
_SAVED = frozenset({Outcome.HIT, Outcome.WAIT})


@dataclass(frozen=True, slots=True)
class TrajectoryRequest:
    """Which rollouts to write, and how."""

    tasks: tuple[str, ...] | None = None  # Only rollouts of these tasks; None for all.
    rollout: str | None = None  # Only rollouts of this name; None for all.
    labels: Mapping[str, str] = field(default_factory=dict)  # Only rollouts with all of these labels.
    answer_bytes: int = ANSWER_BYTES  # Longest answer or upload; longer ones are cut and marked.
    turns: bool = False  # In place of a line for each rollout, one for each turn of an agent inside its sandbox.


def trajectories(database: StoreDatabase, request: TrajectoryRequest) -> Iterator[bytes]:
    """Yield the lines in pieces of about 256 kB, of rollouts that made a call. Blocking. Fold the journal before."""
    with closing(database.open_reader()) as connection:
        pending = bytearray()
        for piece in _TrajectoryWriter(connection, request).pieces():
            pending += piece
            if len(pending) >= SENT_BYTES:
                yield bytes(pending)
                pending.clear()
        yield bytes(pending)


def count_rollouts(database: StoreDatabase, request: TrajectoryRequest) -> int:
    """Return how many rollouts `trajectories` would write now."""
    condition, values = _selected(request)
    (row,) = database.views(f"SELECT COUNT(*) AS count FROM rollouts WHERE {condition}", values)
    return int(row["count"])


def _selected(request: TrajectoryRequest) -> tuple[str, dict[str, str]]:
    parts, values = labels_condition(request.labels, "labels")
    parts += [is_whole("rollouts"), "name NOT LIKE '~%'", "calls > 0"]
    if request.tasks is not None:
        parts.append("task IN (SELECT value FROM json_each(:tasks))")
        values["tasks"] = orjson.dumps(request.tasks).decode()
    if request.rollout is not None:
        parts.append("name = :rollout")
        values["rollout"] = request.rollout
    return " AND ".join(parts), values


class _TrajectoryWriter:
    def __init__(self, connection: sqlite3.Connection, request: TrajectoryRequest) -> None:
        self._connection, self._request = connection, request
        # Of the tree that was looked at last: the record that came first to each node, and where it was made.
        self._origins: tuple[int, dict[int, tuple[int, int]]] = (-1, {})
        # The arguments that tools of a tree fill in, by its number, endpoint and tool.
        self._defaults: dict[tuple[int, str, str], Mapping[str, Any]] = {}

    def pieces(self) -> Iterator[bytes]:
        condition, values = _selected(self._request)
        (last,) = self._connection.execute("SELECT MAX(id) FROM rollouts").fetchone()
        sql = f"SELECT * FROM rollouts WHERE {condition} AND id > :after AND id <= :last ORDER BY id LIMIT 1"
        after: int = 0
        while True:
            cursor = self._connection.execute(sql, {**values, "after": after, "last": last})
            names, row = [column[0] for column in cursor.description], cursor.fetchone()
            # A statement whose rows are not all read keeps its transaction open.
            cursor.close()
            if row is None:
                return
            view = dict(zip(names, row, strict=True))
            yield from self._turns(view) if self._request.turns else self._line(view)
            after = view["id"]

    def _steps(self, rollout: int, calls: int) -> Iterator[tuple[int, int, int]]:
        """Yield turn, record and outcome of a rollout's first calls, in pages. Damaged steps are left out."""
        sql = (
            "SELECT turn, record, outcome FROM steps WHERE rollout = ? AND turn > ? AND turn < ? "
            f"AND {is_whole('steps')} ORDER BY turn LIMIT {_PAGE_STEPS}"
        )
        page = self._connection.execute(sql, (rollout, -1, calls)).fetchall()
        while page:
            yield from page
            page = self._connection.execute(sql, (rollout, page[-1][0], calls)).fetchall()

    def _line(self, row: Mapping[str, Any]) -> Iterator[bytes]:
        labels = typed(orjson.loads(row["labels"]))
        head = {
            "task": row["task"], "rollout": row["name"], "id": row["id"], "labels": labels,
            "reward": labels.get(REWARD), "finished": bool(row["finished"]),
            "created_at": row["created_at"], "used_at": row["used_at"],
            "start": f"n{row['start']}", "node": f"n{row['node']}",
        }  # fmt: skip
        yield orjson.dumps(head)[:-1] + HEAD_END
        calls, totals, complete, separator = [], CallTotals(), not row["lost"], b""
        marks = Counter[str]({"machine": 1} if row["lost"] else {})
        # Without a damaged step, the line is not complete.
        for turn, record, number in self._steps(row["id"], row["calls"]):
            outcome = Outcome(number)
            call, messages = self._call(row["tree"], turn, record, outcome)
            totals.answered(outcome, call["tool_s"])
            calls.append(orjson.dumps(call))
            marks.update(call["marks"])
            complete = complete and bool(messages)
            for message in messages:
                yield separator + orjson.dumps(message)
                separator = b","
        tail = {
            "complete": complete and len(calls) == row["calls"], "marks": dict(marks),
            "totals": {
                "calls": len(calls), **totals.by_name, "executed_s": totals.executed_s, "saved_s": totals.saved_s,
                "restored_s": row["restore_s"], "replayed_s": row["replay_s"], "waited_s": row["wait_s"],
            },
        }  # fmt: skip
        yield b'],"calls":['
        for number, each in enumerate(calls):
            yield b"," + each if number else each
        yield b"]," + orjson.dumps(tail)[1:] + b"\n"

    def _turns(self, row: Mapping[str, Any]) -> Iterator[bytes]:
        """Yield a line for each response of a rollout's own model, with the request that it answers.

        The first request of a rollout that began at a later node is in an answer on the way to there. What follows a
        call that cannot be read is left out: its number and its request would be unknown.
        """
        way = self._way_to(row["tree"], row["start"])
        reward = typed(orjson.loads(row["labels"])).get(REWARD)
        turn, node, waiting = -1, "", dict[int, str | None]()
        steps = (record for _, record, _ in self._steps(row["id"], row["calls"]))
        for number, record in enumerate(chain(way, steps)):
            stored = self._stored(record)
            recorded = None if stored is None else self._recorded(stored)
            if stored is None or recorded is None:
                return
            made, _, result = recorded
            if made["endpoint"] != "harness":
                continue
            parent, node, turn, arguments = node, f"n{stored[6]}", turn + 1, made["arguments"]
            answered, done = arguments.get("connection"), orjson.loads(result.body)
            prompt = waiting.pop(answered, None)
            if made["tool"] == "deliver" and number >= len(way):
                line = {"task": row["task"], "rollout": row["name"], "turn": turn, "node": node, "parent": parent}
                line |= {"prompt": prompt, "response": arguments["said"], "reward": reward}
                yield orjson.dumps(line) + b"\n"
            waiting |= {request["connection"]: request.get("body") for request in done["requests"]}

    def _way_to(self, tree: int, node: int) -> list[int]:
        if self._origins[0] != tree:
            sql = f"SELECT target, id, source FROM records WHERE tree = ? AND source != target AND {_WHOLE}"
            self._origins = (
                tree,
                {row[0]: row[1:] for row in self._connection.execute(f"{sql} ORDER BY id DESC", (tree,))},
            )
        way = []
        while (origin := self._origins[1].get(node)) is not None:
            way.append(origin[0])
            node = origin[1]
        return way[::-1]

    def _call(self, tree: int, turn: int, record: int, outcome: Outcome) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Return what `calls` says of a call, and its two messages; no messages if its record cannot be read."""
        call: dict[str, Any] = {
            "turn": turn, "id": f"call_{turn}", "outcome": outcome.name.lower(),
            "hit": outcome in _SAVED, "record": record, "endpoint": None, "tool": None, "status": None,
            "media_type": None, "encoding": None, "truncated": False, "exit_code": None, "effect": [], "node": None,
            "tool_s": 0.0, "resources": None, "recorded_at": None, "marks": [],
        }  # fmt: skip
        row = self._stored(record)
        if row is None:
            return call, []
        use = ResourceUse(*row[7:])
        call |= {
            "effect": Effect(row[3]).names, "tool_s": row[4], "recorded_at": row[5], "node": f"n{row[6]}",
            "resources": None if use == ResourceUse() else use._asdict(),
        }  # fmt: skip
        recorded = self._recorded(row)
        if recorded is None:
            return call, []
        made, upload, result = recorded
        content, encoding, answer_cut = self._text(result.body)
        arguments, upload_cut = self._arguments(self._given(tree, made), upload)
        call |= {
            "endpoint": made["endpoint"], "tool": made["tool"], "status": result.status,
            "media_type": result.media_type, "encoding": encoding, "truncated": answer_cut or upload_cut,
            "exit_code": exit_code(result), "marks": result.marks,
        }  # fmt: skip
        name = _FUNCTION.sub("_", f"{made['endpoint']}_{made['tool']}")[:_FUNCTION_CHARS]
        function = {"name": name, "arguments": orjson.dumps(arguments).decode()}
        return call, [
            {
                "role": "assistant", "content": "",
                "tool_calls": [{"id": call["id"], "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": call["id"], "name": name, "content": content},
        ]  # fmt: skip

    def _stored(self, record: int) -> Any:
        sql = (
            f"SELECT call, upload, answer, effect, seconds, recorded_at, target, {', '.join(ResourceUse._fields)} "
            f"FROM records WHERE id = ? AND {_WHOLE}"
        )
        return self._connection.execute(sql, (record,)).fetchone()

    def _recorded(self, row: Any) -> tuple[Any, bytes, ToolResult] | None:
        """Return the call of a record's row, what was uploaded with it, and its answer; None if they are damaged."""
        call, upload, answer = (blob_of(self._connection, number) if number else b"" for number in row[:3])
        if call is None or upload is None or answer is None:
            return None
        return orjson.loads(call), upload, answer_of(answer)

    def _given(self, tree: int, made: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call that its request may have had: those that are not what the tool fills in."""
        key = (tree, made["endpoint"], made["tool"])
        if key not in self._defaults:
            sql = f"SELECT spec FROM trees WHERE id = ? AND {is_whole('trees')}"
            row = self._connection.execute(sql, (tree,)).fetchone()
            spec = None if row is None else EnvironmentSpec.model_validate_json(row[0])
            self._defaults[key] = {} if spec is None else defaults_of(*key[1:], spec)
        defaults, absent = self._defaults[key], object()
        return {name: value for name, value in made["arguments"].items() if defaults.get(name, absent) != value}

    def _arguments(self, arguments: Mapping[str, Any], upload: bytes) -> tuple[dict[str, Any], bool]:
        kept = {name: value for name, value in arguments.items() if name != "headers" or "target" not in arguments}
        if not upload:
            return kept, False
        text, encoding, cut = self._text(upload)
        return {**kept, "body" if encoding == "utf-8" else "body_base64": text}, cut

    def _text(self, data: bytes) -> tuple[str, str, bool]:
        """Return bytes as text, their encoding (`utf-8` or `base64`), and whether they were cut."""
        cut = len(data) > self._request.answer_bytes
        data = data[: self._request.answer_bytes] if cut else data
        try:
            # Not final: a character that the cut has halved is left out.
            return codecs.getincrementaldecoder("utf-8")().decode(data, final=not cut), "utf-8", cut
        except UnicodeDecodeError:
            return b64encode(data).decode(), "base64", cut
