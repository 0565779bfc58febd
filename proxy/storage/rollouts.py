"""Rollouts as rows, with the steps that they took.

Steps are written to the journal first and folded in here later: a reader folds the journal before it asks.
"""

import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from hashlib import sha256
from itertools import groupby
from typing import Any, NamedTuple

from proxy.storage.database import StoreDatabase
from proxy.storage.errors import DamagedError
from proxy.storage.journal_segments import JournalEntry
from proxy.storage.schema import is_whole

SHOWN = (
    "id, task, name, tree, start, node, calls, finished, created_at, lost, labels, used_at, "
    f"{is_whole('rollouts')} AS whole, (SELECT root FROM trees WHERE id = r.tree) AS root"
)
"""The columns of a rollout in a list, and the root of its tree."""
OF_AGENTS = "name < '~'"
"""Leaves out the rollouts that the proxy began for itself: names in URLs do not begin with `~`."""


class Overhead(NamedTuple):
    """What calls of one rollout and endpoint took beside their tools."""

    restore_s: float  # Getting sandboxes.
    replay_s: float  # Bringing sandboxes to the rollout's states.
    wait_s: float  # Waiting for other calls.


class RolloutStore:
    """Writes and reads rollouts."""

    def __init__(self, database: StoreDatabase) -> None:
        self._database = database

    def create(
        self, task: str, name: str, tree: int, node: int, token: str = "", labels: Mapping[str, str] | None = None
    ) -> int:
        """Write a rollout that is at node and has made no call, with the SHA-256 of its token; return its number."""
        rollout = self._database.take_number("rollouts")
        digest = sha256(token.encode()).digest() if token else None
        now = time.time()
        values = (
            rollout, task, name, tree, node, node, 0, 0, digest, now, "", json.dumps(labels or {}), now, 0.0, 0.0, 0.0,
        )  # fmt: skip
        with self._database.transaction() as execute:
            execute(f"INSERT INTO rollouts VALUES ({','.join('?' * len(values))})", values)
        return rollout

    def move(self, rollout: int, tree: int, node: int) -> None:
        """Write that a rollout that has made no call begins at a node of another tree."""
        with self._database.transaction() as execute:
            execute("UPDATE rollouts SET tree = ?, start = ?, node = ? WHERE id = ?", (tree, node, node, rollout))

    def put_labels(self, rollout: int, labels: Mapping[str, str]) -> None:
        """Write a rollout's labels in place of those that it had."""
        with self._database.transaction() as execute:
            execute("UPDATE rollouts SET labels = ? WHERE id = ?", (json.dumps(labels), rollout))

    def add_overhead(self, overheads: Mapping[tuple[int, str], Overhead]) -> None:
        """Add what calls took beside their tools, by the number of their rollout and their endpoint."""
        sums = (
            "UPDATE rollouts SET restore_s = restore_s + ?, replay_s = replay_s + ?, wait_s = wait_s + ? WHERE id = ?"
        )
        # A rollout may have been deleted since.
        by_endpoint = (
            "INSERT INTO overheads (restore_s, replay_s, wait_s, rollout, endpoint) "
            "SELECT ?, ?, ?, id, ? FROM rollouts WHERE id = ? ON CONFLICT (rollout, endpoint) DO UPDATE SET "
            "restore_s = restore_s + excluded.restore_s, replay_s = replay_s + excluded.replay_s, "
            "wait_s = wait_s + excluded.wait_s"
        )
        with self._database.transaction():
            self._database.execute_many(sums, [(*spent, rollout) for (rollout, _), spent in overheads.items()])
            self._database.execute_many(
                by_endpoint, [(*spent, at, rollout) for (rollout, at), spent in overheads.items()]
            )

    def unused(self, since: float) -> list[tuple[int, str, str, int]]:
        """Return number, task, name and calls of running rollouts without a call since then. Fold the journal before.

        Rollouts whose position is lost are not among them: their agents get an error until the rollouts are ended.
        """
        sql = "SELECT id, task, name, calls FROM rollouts WHERE finished = 0 AND lost = '' AND used_at < ?"
        return self._database.rows(sql, (since,))

    def finish(self, rollout: int) -> None:
        """Write that a rollout has ended, and delete the notes on it."""
        with self._database.transaction() as execute:
            execute("DELETE FROM notes WHERE rollout = ?", (rollout,))
            execute("UPDATE rollouts SET finished = 1 WHERE id = ?", (rollout,))

    def of_task(
        self,
        task: str,
        *,
        name: str | None = None,
        running: bool = False,
        newest: bool = False,
        limit: int = -1,
    ) -> list[dict[str, Any]]:
        """Return a task's rollouts, each with the root of its tree, the oldest first. Fold the journal before.

        Those that the proxy began for itself, to ask a server for its lists, are not among them. A limit of -1 is none.
        """
        sql = f"SELECT {SHOWN} FROM rollouts r WHERE task = :task AND {OF_AGENTS}"
        sql += " AND name = :name" if name is not None else ""
        # Whether a damaged row has ended is not known.
        sql += f" AND (finished = 0 OR NOT {is_whole('rollouts')})" if running else ""
        sql += f" ORDER BY id {'DESC' if newest else 'ASC'} LIMIT :limit"
        return mended(self._database.views(sql, {"task": task, "name": name, "limit": limit}), self._database.row)

    def by_token(self, token: str) -> tuple[str, str] | None:
        """Return task and name of the running rollout with this token; None if there is none."""
        # Looked up by digest: how long the index takes tells nothing about the token. 192 random bits need no salt.
        digest = sha256(token.encode()).digest()
        # A damaged row could name another rollout.
        sql = f"SELECT task, name FROM rollouts WHERE token_digest = ? AND finished = 0 AND {is_whole('rollouts')}"
        row = self._database.row(sql, (digest,))
        return None if row is None else (row[0], row[1])

    def steps(
        self, rollout: int, end: str = " ORDER BY turn", values: Mapping[str, Any] | None = None
    ) -> list[tuple[int, int, int]]:
        """Return turn, record and outcome of a rollout's steps. Fold the journal before. Raises DamagedError.

        `end` is the end of the query: a condition, an order and a limit, with the parameters in `values`.
        """
        return self._whole_steps(rollout, end, values or {})

    def latest_records(self, rollout: int, count: int) -> list[int]:
        """Return the records of the last steps, the last one first. Fold the journal before. Raises DamagedError."""
        return [
            record for _, record, _ in self._whole_steps(rollout, " ORDER BY turn DESC LIMIT :count", {"count": count})
        ]

    def _whole_steps(self, rollout: int, end: str, values: Mapping[str, Any]) -> list[tuple[int, int, int]]:
        sql = f"SELECT turn, record, outcome, {is_whole('steps')} AS whole FROM steps WHERE rollout = :rollout{end}"
        rows = self._database.views(sql, {"rollout": rollout, **values})
        if not all(row["whole"] for row in rows):
            raise DamagedError(f"a step of rollout {rollout} is damaged in the store.")
        return [(row["turn"], row["record"], row["outcome"]) for row in rows]

    def fold(self, steps: Sequence[JournalEntry]) -> None:
        """Write steps, and each rollout's node, in one transaction, as calls of this moment; skip known steps."""
        last, now = {step.rollout: step for step in steps}, time.time()
        with self._database.transaction():
            self._database.execute_many("INSERT OR IGNORE INTO steps VALUES (?, ?, ?, ?)", steps)
            self._database.execute_many(
                "UPDATE rollouts SET calls = ?1, node = COALESCE((SELECT target FROM records WHERE id = ?2), node), "
                # A damaged record does not say where the rollout is. Its agent gets an error after the next start.
                f"lost = CASE WHEN EXISTS (SELECT 1 FROM records WHERE id = ?2 AND NOT {is_whole('records')}) "
                "THEN 'the record of its last call is damaged in the store' ELSE lost END, "
                "used_at = ?4 WHERE id = ?3 AND calls < ?1",
                [(step.turn + 1, step.record, step.rollout, now) for step in last.values()],
            )

    def recover(self, steps: Sequence[JournalEntry]) -> dict[int, str]:
        """Write an ended process's steps that continue where the store stands; say by rollout what is missing."""
        wrong: dict[int, str] = {}
        sound: list[JournalEntry] = []
        # Stable: the steps of one rollout stay in their order.
        for rollout, own in groupby(sorted(steps, key=lambda step: step.rollout), key=lambda step: step.rollout):
            row = self._database.row(
                f"SELECT calls, node, name FROM rollouts WHERE id = ? AND lost = '' AND {is_whole('rollouts')}",
                (rollout,),
            )
            if row is None:
                # Deleted, or lost already.
                continue
            calls, node, name = row
            for step in own:
                if step.turn < calls:
                    continue
                sql = f"SELECT source, target FROM records WHERE id = ? AND {is_whole('records')}"
                record = self._database.row(sql, (step.record,))
                if step.turn > calls or record is None or record[0] != node:
                    wrong[rollout] = f"call {calls} of rollout {name!r} is missing in the journal or in the store"
                    break
                calls, node = calls + 1, record[1]
                sound.append(step)
        if sound:
            self.fold(sound)
        return wrong

    def lose(self, rollouts: Collection[int] | None, why: str) -> int:
        """Write why running rollouts (None: all) have lost their position; return how many are newly lost."""
        which = "1" if rollouts is None else f"id IN ({','.join(map(str, filter(None, rollouts)))})"
        with self._database.transaction() as execute:
            sql = f"UPDATE rollouts SET lost = ? WHERE finished = 0 AND lost = '' AND {which}"
            return int(execute(sql, (why,)).rowcount)

    def positions(self, tree: int) -> list[int]:
        """Return the numbers of the nodes that running rollouts of a tree were at when the journal was folded."""
        sql = "SELECT DISTINCT node FROM rollouts WHERE tree = ? AND finished = 0 AND lost = ''"
        return [row[0] for row in self._database.rows(sql, (tree,))]

    def positions_of(self, task: str) -> list[tuple[int, int]]:
        """Return the tree and the node of each running rollout of a task, as `positions` does; no damaged ones."""
        sql = "SELECT tree, node FROM rollouts WHERE task = ? AND finished = 0 AND lost = ''"
        return self._database.rows(f"{sql} AND {is_whole('rollouts')}", (task,))


def mended(
    rows: list[dict[str, Any]], read: Callable[[str, tuple[int]], tuple[Any, ...] | None]
) -> list[dict[str, Any]]:
    """Return rows of rollouts (`SHOWN`) in which damaged rows have nothing that a view could not show."""
    # Only columns of the index on names, so that SQLite answers from it without reading the damaged row.
    sql = "SELECT name FROM rollouts INDEXED BY idx_rollouts_task_name WHERE task > '' AND rowid = ?"
    for row in rows:
        if not row["whole"]:
            indexed = read(sql, (row["id"],))
            row |= {"labels": "{}", "used_at": 0.0, "created_at": 0.0}
            row["name"] = str(indexed[0]) if indexed and indexed[0] else row["name"]
    return rows


def label_path(name: str) -> str:
    """Return the path of a label in the column `labels`, for SQLite's JSON functions. Names hold no quotes."""
    return f'$."{name}"'


def label_value(column: str, path: str) -> str:
    """Return the SQL expression of a label's value by its path; NULL without the label, or in a damaged row."""
    return f"CASE WHEN json_valid({column}) THEN json_extract({column}, {path}) END"


def labels_condition(labels: Mapping[str, str], column: str) -> tuple[list[str], dict[str, str]]:
    """Return the SQL conditions that choose rollouts with all of these labels, and the parameters' values."""
    conditions, values = [], dict[str, str]()
    for number, (name, value) in enumerate(labels.items()):
        conditions.append(f"{label_value(column, f':path{number}')} = :label{number}")
        values |= {f"path{number}": label_path(name), f"label{number}": value}
    return conditions, values
