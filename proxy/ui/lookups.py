"""Queries of the page: failed calls, and the rollouts that made a call. They run in a thread."""

import asyncio
import re
import sqlite3
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from pydantic import BaseModel

from proxy.storage.blobs import whole_bytes
from proxy.storage.schema import is_whole
from proxy.storage.store import Store
from proxy.tree.rollout import Outcome

_BATCH = 500
"""Records in one query."""
_EXIT_CODE = re.compile(rb'(?<!\\)"exit_code":\s*(-?[0-9]+)')


@dataclass(slots=True)
class Failures:
    """The failed calls of a tree: numbers of record, source and target, up to the last that was examined."""

    upto: int = 0
    calls: list[tuple[int, int, int]] = field(default_factory=list)


class PassageView(BaseModel):
    """A rollout that made a call, by its number in the rollout from 0, and how it was answered."""

    rollout: str
    turn: int
    outcome: Literal["hit", "miss", "wait", "bypass"]


class Lookups:
    """Queries the store. Steps that the journal has not folded yet are not seen."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._failures: dict[int, Failures] = {}
        self._examining = asyncio.Lock()

    async def passages(self, record: int, limit: int) -> list[PassageView]:
        """Return the rollouts that made a call, the latest first. O(steps of all tasks), without holding the GIL."""
        sql = (
            "SELECT r.name, s.turn, s.outcome FROM steps s JOIN rollouts r ON r.id = s.rollout "
            f"WHERE s.record = ? AND {is_whole('steps', 's')} AND {is_whole('rollouts', 'r')} "
            "ORDER BY s.rollout DESC, s.turn DESC LIMIT ?"
        )
        read = partial(_all, sql=sql, values=(record, limit))
        rows = await asyncio.to_thread(self._store.database.read_apart, read)
        return [
            PassageView.model_validate({"rollout": name, "turn": turn, "outcome": Outcome(outcome).name.lower()})
            for name, turn, outcome in rows
        ]

    async def failures(self, tree: int) -> Failures:
        """Return the failed calls of a tree. Only records since the last request are examined, at 10 µs each."""
        async with self._examining:
            known = self._failures.setdefault(tree, Failures())
            more = True
            while more:
                examine = partial(_examine, tree=tree, known=known)
                more = await asyncio.to_thread(self._store.database.read_apart, examine)
            return known


def failed(answer: bytes) -> bool:
    """Return whether a recorded answer is a failure: a status of 400 or above, or a non-zero exit code."""
    head, _, body = answer.partition(b"\n")
    if int(head.partition(b" ")[0]) >= 400:
        return True
    codes = _EXIT_CODE.findall(body) if b"json" in head and body.startswith(b"{") else []
    return bool(codes) and int(codes[-1]) != 0


def _examine(connection: sqlite3.Connection, tree: int, known: Failures) -> bool:
    """Examine the next batch of records; return whether there may be more."""
    sql = (
        "SELECT c.id, c.source, c.target, b.packed, b.data, b.digest FROM records c JOIN blobs b ON b.id = c.answer "
        f"WHERE {is_whole('records', 'c')} AND c.tree = ? AND c.id > ? ORDER BY c.id LIMIT ?"
    )
    rows = _all(connection, sql, (tree, known.upto, _BATCH))
    for record, source, target, *blob in rows:
        known.upto = record
        answer = whole_bytes(*blob)
        # Whether a damaged answer is a failure is unknown.
        if answer is not None and failed(answer):
            known.calls.append((record, source, target))
    return len(rows) == _BATCH


def _all(connection: sqlite3.Connection, sql: str, values: tuple[int, ...]) -> list[tuple[Any, ...]]:
    return connection.execute(sql, values).fetchall()
