"""The route that compares a group of rollouts by the states that they reached."""

import sqlite3
from collections.abc import Mapping, Sequence
from functools import cache, partial
from itertools import groupby
from typing import Annotated

import orjson
from fastapi import Query
from pydantic import BaseModel

from proxy.control.call_titles import stored_title
from proxy.control.routes.params import ControlDep, LabelQuery, TaskDep, api_router, wanted_labels
from proxy.storage.records import same_calls
from proxy.storage.rollouts import labels_condition
from proxy.storage.schema import is_whole
from proxy.tree.groups import MadeCall, RolloutWay, Shared, compared, threshold
from proxy.tree.labels import REWARD

_MOST_ROLLOUTS, _MOST_SHOWN = 500, 50
"""The most rollouts that are compared, and the most entries of each list of a comparison."""

router = api_router("rollouts")


class PartingView(BaseModel):
    """A node from which rollouts went to different states, and the calls (`ways`) by which they left it."""

    node: str
    ways: list["SharedView"]


class SharedView(BaseModel):
    """A call, or a state, with the rollouts that made or reached it.

    Attributes:
        call: The call in one line; null for a state alone, or if the call cannot be read.
        node: The node that it led to, or the state; null for a call alone.
    """

    call: str | None = None
    node: str | None = None
    rollouts: list[str]


class ComparisonView(BaseModel):
    """Rollouts of a task, aligned by state.

    Attributes:
        truncated: Whether there are more; the newest were compared.
        above: Rewards above this count as high; null if the rewards do not tell rollouts apart.
        parts: Where rollouts part, the parting of most rollouts first.
        same_end: States that several rollouts are at.
        winning_states: States that only rollouts with a high reward reached: the first such of each of them.
        winning_calls: Calls that only they made.
    """

    rollouts: int
    truncated: bool
    above: float | None
    high: list[str]
    parts: list[PartingView]
    same_end: list[SharedView]
    winning_states: list[SharedView]
    winning_calls: list[SharedView]


@router.get("/tasks/{task}/compare", name="compare_rollouts")
async def compare(
    control: ControlDep,
    task: TaskDep,
    label: LabelQuery = None,
    rollout: Annotated[
        list[str] | None,
        Query(max_length=_MOST_ROLLOUTS, description="Only rollouts of this name. It may be repeated."),
    ] = None,
    above: Annotated[
        float | None,
        Query(allow_inf_nan=False, description="Rewards above this are high. Default: the middle of all rewards."),
    ] = None,
) -> ComparisonView:
    """Compare rollouts by state: where they part and end alike, and what only those with a high reward did."""
    read = partial(_compare, task=task.name, labels=wanted_labels(label), names=rollout, above=above)
    return await control.read(read)


def _compare(
    connection: sqlite3.Connection,
    *,
    task: str,
    labels: Mapping[str, str],
    names: list[str] | None,
    above: float | None,
) -> ComparisonView:
    conditions, values = labels_condition(labels, "r.labels")
    conditions += ["r.task = :task", "r.name NOT LIKE '~%'", "r.calls > 0", is_whole("rollouts", "r")]
    if names is not None:
        conditions.append("r.name IN (SELECT value FROM json_each(:names))")
        values["names"] = orjson.dumps(names).decode()
    sql = (
        f"SELECT id, name, start, node, labels FROM rollouts r WHERE {' AND '.join(conditions)} ORDER BY id DESC LIMIT"
    )
    rows = connection.execute(f"{sql} {_MOST_ROLLOUTS + 1}", {"task": task, **values}).fetchall()
    chosen = {row[0]: row[1:] for row in rows[:_MOST_ROLLOUTS][::-1]}
    sql = (
        "WITH made AS MATERIALIZED (SELECT s.rollout, s.turn, c.* FROM steps s JOIN records c ON c.id = s.record "
        "WHERE s.rollout IN (SELECT value FROM json_each(?)) "
        f"AND {is_whole('steps', 's')} AND {is_whole('records', 'c')}) SELECT rollout, same, source, target "
        f"FROM made JOIN ({same_calls('SELECT call FROM made')}) asks ON asks.id = made.call ORDER BY 1, turn"
    )
    steps = connection.execute(sql, (orjson.dumps(list(chosen)).decode(),))
    moves = {number: [MadeCall(*row[1:]) for row in group] for number, group in groupby(steps, lambda row: row[0])}
    ways = []
    for number, (name, start, node, text) in chosen.items():
        reward = orjson.loads(text).get(REWARD)
        ways.append(RolloutWay(name, start, node, None if reward is None else float(reward), moves.get(number, ())))
    above = threshold([way.reward for way in ways if way.reward is not None]) if above is None else above
    found = compared(ways, above)
    text_of = cache(partial(stored_title, connection))

    def views(ways: Sequence[Shared]) -> list[SharedView]:
        return [
            SharedView(
                call=None if each.call is None else text_of(each.call), rollouts=each.names,
                node=None if each.node is None else f"n{each.node}",
            )
            for each in ways[:_MOST_SHOWN]
        ]  # fmt: skip

    return ComparisonView(
        rollouts=len(ways), truncated=len(rows) > _MOST_ROLLOUTS, above=above,
        high=[way.name for way in ways if above is not None and way.reward is not None and way.reward > above],
        parts=[PartingView(node=f"n{node}", ways=views(left)) for node, left in found.parts[:_MOST_SHOWN]],
        same_end=views(found.same_end), winning_states=views(found.winning_states),
        winning_calls=views(found.winning_calls),
    )  # fmt: skip
