"""Which calls of a tree failed, and who made a call: looked up in a thread, beside the store's writer."""

import asyncio
import re
import sqlite3
import zlib
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from proxy.storage.store import Store
from proxy.tree.rollout import Outcome

_BATCH = 500
_EXIT_CODE = re.compile(rb'(?<!\\)"exit_code":\s*(-?[0-9]+)')


@dataclass(slots=True)
class Failures:
    """The records of a tree whose call failed: (record, node it was made at, node it leads to). upto: the last one that
    was looked at.
    """

    upto: int = 0
    found: list[tuple[int, int, int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Passage:
    """A rollout that made a call: which of its calls it was (from 0), and how it was answered."""

    rollout: str
    turn: int
    outcome: str


class Lookups:
    """Asks the store. What the journal has not folded yet is not seen."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._failures: dict[int, Failures] = {}
        self._looking = asyncio.Lock()

    async def passages(self, record: int, limit: int) -> list[Passage]:
        """Return who made a call, the latest rollout first. O(steps of all tasks), outside the interpreter."""
        sql = (
            "SELECT r.name, s.turn, s.outcome FROM steps s JOIN rollouts r ON r.id = s.rollout "
            "WHERE s.record = ? ORDER BY s.rollout DESC, s.turn DESC LIMIT ?"
        )
        ask = partial(_all, sql=sql, values=(record, limit))
        rows = await asyncio.to_thread(self._store.database.read_apart, ask)
        return [Passage(name, turn, Outcome(outcome).name.lower()) for name, turn, outcome in rows]

    async def failures(self, tree: int) -> Failures:
        """Return which calls of a tree failed. What was looked at once is remembered: 10 us for each new record."""
        async with self._looking:
            known = self._failures.setdefault(tree, Failures())
            more = True
            while more:
                look_on = partial(_look_on, tree=tree, known=known)
                more = await asyncio.to_thread(self._store.database.read_apart, look_on)
            return known


def failed(answer: bytes) -> bool:
    """Say whether a recorded answer tells of a failure: a status from 400 on, or an exit code other than 0."""
    head, _, body = answer.partition(b"\n")
    if int(head.partition(b" ")[0]) >= 400:
        return True
    told = _EXIT_CODE.findall(body) if b"json" in head and body.startswith(b"{") else []
    return bool(told) and int(told[-1]) != 0


def _look_on(connection: sqlite3.Connection, tree: int, known: Failures) -> bool:
    """Look at the next records; say whether there may be more."""
    sql = (
        "SELECT c.id, c.source, c.target, b.packed, b.data FROM records c JOIN blobs b ON b.id = c.answer "
        "WHERE c.tree = ? AND c.id > ? ORDER BY c.id LIMIT ?"
    )
    rows = _all(connection, sql, (tree, known.upto, _BATCH))
    for record, source, target, packed, data in rows:
        known.upto = record
        if failed(zlib.decompress(data) if packed else bytes(data)):
            known.found.append((record, source, target))
    return len(rows) == _BATCH


def _all(connection: sqlite3.Connection, sql: str, values: tuple[int, ...]) -> list[tuple[Any, ...]]:
    return connection.execute(sql, values).fetchall()
