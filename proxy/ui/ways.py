"""The ways of a tree's rollouts: the nodes that each reached, how its calls were answered, and its labels."""

import itertools
import json
import sqlite3
from dataclasses import replace
from functools import partial
from typing import Annotated

from pydantic import BaseModel

from proxy.control.paging import ListQuery, Page, list_query
from proxy.control.routes.params import ControlDep, TreeDep, api_router
from proxy.storage.schema import is_whole

MAX_STEPS = 100_000
"""Steps in one response, about 2 MB of JSON: the ways of 2,500 rollouts of 40 calls. Older rollouts are left out."""
_OUTCOMES = "hmwb"
"""Letters of the outcomes 0 to 3: hit, miss, wait, bypass."""

ways = api_router("page")


class WayView(BaseModel):
    """The way of a rollout, which may be another task's where tasks share the tree.

    Attributes:
        start: Number of the node that it began at.
        nodes: Number of the node after each call; 0 where the record was forgotten since.
        records: Number of the record that answered each call.
        seconds: How long the tool of each call ran when the call was recorded.
        outcomes: How each call was answered, a letter for each: `h`it, `m`iss, `w`ait or `b`ypass.
    """

    task: str
    rollout: str
    finished: bool
    labels: dict[str, str]
    start: int
    nodes: list[int]
    records: list[int]
    seconds: list[float]
    outcomes: str


class WaysView(Page[WayView]):
    """A page of ways; `damaged` counts rollouts and steps that are left out because their rows are damaged."""

    damaged: int = 0


@ways.get("/tasks/{task}/ways")
async def get_ways(
    control: ControlDep, tree: TreeDep, wanted: Annotated[ListQuery, list_query("created_at", default="-created_at")]
) -> WaysView:
    """List the ways of a tree's rollouts, the newest first. A page ends early after 100,000 steps."""
    return await control.read(partial(read_ways, tree=tree.id, wanted=wanted))


def read_ways(connection: sqlite3.Connection, tree: int, wanted: ListQuery) -> WaysView:
    """Read a page of a tree's ways, by when rollouts began. Fold the journal before. Blocking."""
    end, values = wanted.sql("id")
    # Names that begin with ~ are rollouts of the proxy itself.
    chosen = "FROM rollouts WHERE tree = :tree AND name < '~'"
    (total,) = connection.execute(f"SELECT COUNT(*) {chosen}", {"tree": tree}).fetchone()
    sql = f"SELECT id, task, name, finished, labels, start, calls, {is_whole('rollouts')} {chosen}{end}"
    rows = connection.execute(sql, {"tree": tree, **values}).fetchall()
    steps = itertools.accumulate(calls if whole else 0 for *_, calls, whole in rows)
    fitting = max(1, sum(upto <= MAX_STEPS for upto in steps))
    part = replace(wanted, limit=min(fitting, wanted.limit)).part(rows, total, lambda row: (row[0],))
    ways, damaged = list[WayView](), 0
    for number, task, name, finished, labels, start, _, whole in part.entries:
        if not whole:
            damaged += 1
            continue
        way, lost = _way(connection, number, task, name, finished, labels, start)
        ways.append(way)
        damaged += lost
    return WaysView(items=ways, total=part.total, next=part.next, damaged=damaged)


def _way(
    connection: sqlite3.Connection, number: int, task: str, name: str, finished: int, labels: str, start: int
) -> tuple[WayView, int]:
    """Return the way of a rollout, and how many of its steps are damaged: the list of its calls says what they are."""
    sql = (
        "SELECT s.record, s.outcome, COALESCE(c.target, 0), COALESCE(c.seconds, 0.0), "
        f"{is_whole('steps', 's')} AND (c.id IS NULL OR {is_whole('records', 'c')}) FROM steps s "
        "LEFT JOIN records c ON c.id = s.record WHERE s.rollout = ? ORDER BY s.turn LIMIT ?"
    )
    rows = connection.execute(sql, (number, MAX_STEPS)).fetchall()
    steps = [step for *step, whole in rows if whole]
    way = WayView(
        task=task,
        rollout=name,
        finished=bool(finished),
        labels=json.loads(labels),
        start=start,
        nodes=[node for _, _, node, _ in steps],
        records=[record for record, _, _, _ in steps],
        seconds=[round(seconds, 4) for _, _, _, seconds in steps],
        outcomes="".join(_OUTCOMES[outcome] for _, outcome, _, _ in steps),
    )
    return way, len(rows) - len(steps)
