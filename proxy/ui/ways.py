"""The ways of a tree's rollouts: the nodes that each reached, how its calls were answered, and its labels.

The page lights a way in the map, colours nodes by the labels of their rollouts, and shows groups as lanes.
"""

import asyncio
import json
import sqlite3
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import BaseModel

from proxy.control.routes.params import PROBLEM, EngineDep, RootQuery, TaskName, tree_of
from proxy.storage.schema import is_whole

MAX_STEPS = 100_000
"""Steps in one response, about 2 MB of JSON: the ways of 2,500 rollouts of 40 calls. Older rollouts are left out."""
_OUTCOMES = "hmwb"
"""Letters of the outcomes 0 to 3: hit, miss, wait, bypass."""

ways = APIRouter(prefix="/api/v1", tags=["page"], responses={"4XX": PROBLEM, "5XX": PROBLEM})


class WayView(BaseModel):
    """The way of a rollout.

    Attributes:
        rollout: Name of the rollout.
        finished: Whether it has ended.
        labels: Its labels.
        start: Number of the node that it began at.
        nodes: Number of the node after each call; 0 where the record was forgotten since.
        records: Number of the record that answered each call.
        seconds: How long the tool of each call ran when the call was recorded.
        outcomes: How each call was answered, a letter for each: `h`it, `m`iss, `w`ait or `b`ypass.
    """

    rollout: str
    finished: bool
    labels: dict[str, str]
    start: int
    nodes: list[int]
    records: list[int]
    seconds: list[float]
    outcomes: str


class WaysView(BaseModel):
    """The ways of a tree's rollouts.

    Attributes:
        ways: The ways, those of the newest rollouts first.
        truncated: Whether older rollouts were left out.
        damaged: Rollouts and steps that are left out because rows of the store are damaged.
    """

    ways: list[WayView]
    truncated: bool
    damaged: int = 0


@ways.get("/tasks/{task}/ways")
async def get_ways(
    engine: EngineDep,
    task: TaskName,
    root: RootQuery = None,
    limit: Annotated[int, Query(ge=1, le=5000, description="Maximum number of rollouts.")] = 1000,
) -> WaysView:
    """Show the ways of a tree's newest rollouts."""
    tree = tree_of(engine, await engine.tasks.find(task), root)
    engine.journal.fold()
    read = partial(read_ways, tree=tree.id, limit=limit)
    return await asyncio.to_thread(engine.store.database.read_apart, read)


def read_ways(connection: sqlite3.Connection, tree: int, limit: int) -> WaysView:
    """Read the ways of a tree. Blocking: 5 µs for each step, in a thread of its own.

    Args:
        connection: A connection to the store that only reads. Fold the journal before.
        tree: Number of the tree.
        limit: Most rollouts.
    """
    found: list[WayView] = []
    room, damaged = MAX_STEPS, 0
    rows = connection.execute(
        # Names that begin with ~ are rollouts of the proxy itself.
        f"SELECT id, name, finished, labels, start, calls, {is_whole('rollouts')} FROM rollouts "
        "WHERE tree = ? AND name NOT LIKE '~%' ORDER BY id DESC LIMIT ?",
        (tree, limit + 1),
    ).fetchall()
    for number, name, finished, labels, start, calls, whole in rows[:limit]:
        if not whole:
            damaged += 1
            continue
        room -= calls
        if room < 0 and found:
            return WaysView(ways=found, truncated=True, damaged=damaged)
        steps = connection.execute(
            "SELECT s.record, s.outcome, COALESCE(c.target, 0), COALESCE(c.seconds, 0.0), "
            f"{is_whole('steps', 's')} AND (c.id IS NULL OR {is_whole('records', 'c')}) FROM steps s "
            "LEFT JOIN records c ON c.id = s.record WHERE s.rollout = ? ORDER BY s.turn LIMIT ?",
            (number, MAX_STEPS),
        ).fetchall()
        # The route that lists a rollout's calls says what is wrong with a damaged step.
        intact = [step for *step, whole in steps if whole]
        damaged += len(steps) - len(intact)
        found.append(_way(name, finished, labels, start, intact))
    return WaysView(ways=found, truncated=len(rows) > limit, damaged=damaged)


def _way(name: str, finished: int, labels: str, start: int, steps: list[list[Any]]) -> WayView:
    return WayView(
        rollout=name,
        finished=bool(finished),
        labels=json.loads(labels),
        start=start,
        nodes=[node for _, _, node, _ in steps],
        records=[record for record, _, _, _ in steps],
        seconds=[round(seconds, 4) for _, _, _, seconds in steps],
        outcomes="".join(_OUTCOMES[outcome] for _, outcome, _, _ in steps),
    )
