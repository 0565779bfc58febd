"""Why calls were no hits: one reason (`MEANINGS`) for each call of a rollout, from its tree and the store.

For a call that the tree knew only in other states, the nearest is named, with the calls by which the two paths part.
"""

import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

from pydantic import BaseModel

from proxy.control.call_titles import Titles
from proxy.control.parts import ControlPlane
from proxy.control.tree_reader import Reader
from proxy.control.views.resources import node_name
from proxy.control.views.rollouts import StepView
from proxy.storage.schema import is_whole
from proxy.tree.keys import call_key
from proxy.tree.tree import Node, Record, Tree, path

Reason = Literal[
    "hit",
    "joined",
    "new-call",
    "other-state",
    "state-changed",
    "not-kept",
    "private",
    "quarantined",
    "never-cached",
    "forgotten",
]
_SEEDS = "SOURCE_DATE_EPOCH, a seed or PYTHONDONTWRITEBYTECODE=1 in the task's `env` may help."
MEANINGS: Mapping[Reason, tuple[str, str]] = {
    "hit": ("The tree knew the answer.", ""),
    "joined": ("Another rollout was making the same call in the same state, and both got its answer.", ""),
    "new-call": ("No rollout of this task had made this call before.", ""),
    "other-state": (
        "Other rollouts had made this call, but in other states.",
        f"Compare the two states. Where only times, random names or byte code differ, {_SEEDS}",
    ),
    "state-changed": ("The call was known in an earlier state of this rollout, which has changed since.", ""),
    "not-kept": (
        "The tree knew this call here, but no way back to the state that it leads to.",
        "The view of the node says why its state is not kept. A larger `snapshot_bytes` keeps more states.",
    ),
    "private": (
        "The answer holds for this rollout alone: it came from a time limit, or a rule of the task says so.",
        "Raise the call's time limit, or change the task's `volatile` and `own` rules.",
    ),
    "quarantined": (
        "An audit has found that this call is answered differently each time, so it always runs.",
        "If the difference does not matter, give the task a mask for it.",
    ),
    "never-cached": ("The task's calls are never cached.", "Its spec says `cache: never`."),
    "forgotten": ("The record of this call was forgotten since.", ""),
}
"""What each reason means, and what helps; empty where nothing does."""
assert set(MEANINGS) == set(get_args(Reason))
_MAX_COMPARED = 1000
"""How many other states that know a call are compared with its own."""


class NearestState(BaseModel):
    """The nearest other state in which the same call was known.

    Attributes:
        last_common: The last node that its path has in common with the path of the rollout's state.
        here: The call by which the rollout's path leaves that node; null if the rollout was at it.
        there: The call by which the other path does; null if the other state is that node.
    """

    node: str
    rollouts: int
    last_common: str
    here: str | None
    there: str | None


class WhyView(BaseModel):
    """Why a call of a rollout was a hit or not.

    Attributes:
        turn: Number of the call in the rollout, from 0.
        title: The call in one line; null if its record was forgotten since.
        remedy: What helps; empty if nothing does, or nothing need.
        node: The node at which the call was made; null if its record was forgotten since.
        nearest: For `other-state` and `state-changed`: the nearest of these states.
    """

    turn: int
    title: str | None
    outcome: Literal["hit", "miss", "wait", "bypass"]
    reason: Reason
    meaning: str
    remedy: str
    node: str | None
    nearest: NearestState | None = None


class _Same(NamedTuple):
    record: int
    call: int
    key: bytes
    source: int


async def reasons(
    control: ControlPlane, reader: Reader, tree: Tree, rollout: Mapping[str, Any], steps: Iterable[StepView]
) -> list[WhyView]:
    """Return why each call of a rollout, as the store has it, was a hit or not. It visits the tree's records once."""
    aside = {record.id: record for record in tree.aside}
    known = [(step, reader.record(step.record, tree) or aside.get(step.record)) for step in steps]
    wanted = [record for step, record in known if record is not None and step.outcome in ("miss", "bypass")]
    find = partial(_same_calls, tree=tree.id, records=[(record.call, bytes(record.key)) for record in wanted])
    same = await control.read(find) if wanted else []
    titles, timings = Titles(control.store.records), control.executor.timings.of(rollout["id"])

    def made_before(step: StepView, record: Record) -> bool:
        # After a restart, only the times tell that another rollout has made the record.
        timing = timings.get(step.turn)
        return record.recorded_at < rollout["created_at"] if timing is None else timing.known

    return [
        _why(control, titles, tree, step, record, same, not_kept=record is not None and made_before(step, record))
        for step, record in known
    ]


def _same_calls(reader: sqlite3.Connection, *, tree: int, records: list[tuple[int, bytes]]) -> list[_Same]:
    calls, keys = {call for call, _ in records}, {key for _, key in records}
    sql = f"SELECT id, call, key, source FROM records WHERE tree = ? AND {is_whole('records')}"
    return [_Same(*row) for row in reader.execute(sql, (tree,)) if (row[1] in calls and row[1] != 0) or row[2] in keys]


def _why(
    control: ControlPlane,
    titles: Titles,
    tree: Tree,
    step: StepView,
    record: Record | None,
    same: list[_Same],
    *,
    not_kept: bool,
) -> WhyView:
    nearest = None
    if step.outcome in ("hit", "wait"):
        reason: Reason = "hit" if step.outcome == "hit" else "joined"
    elif record is None:
        reason = "forgotten"
    else:
        equal = (one for one in same if one.call == record.call or one.key == record.key)
        earlier = {one.source for one in equal if one.record < record.id}
        if not_kept:
            earlier.add(record.source.id)
        reason = _reason(control, tree, record, earlier, private=step.outcome == "bypass")
        if reason == "other-state":
            nearest = _nearest(tree, titles, record.source, earlier)
            # The nearest state lies on the rollout's own path.
            reason = "state-changed" if nearest.there is None else reason
    meaning, remedy = MEANINGS[reason]
    return WhyView(
        turn=step.turn,
        title=None if step.call is None else step.call.title,
        outcome=step.outcome,
        reason=reason,
        meaning=meaning,
        remedy=remedy,
        node=None if record is None else node_name(record.source),
        nearest=nearest,
    )


def _reason(control: ControlPlane, tree: Tree, record: Record, earlier: set[int], *, private: bool) -> Reason:
    if tree.spec.cache == "never":
        return "never-cached"
    if record.source.quarantined and call_key(control.store.records.call(record)) in record.source.quarantined:
        return "quarantined"
    if record.source.id in earlier:
        return "not-kept"
    if private:
        return "private"
    return "other-state" if earlier & tree.nodes.keys() else "new-call"


def _nearest(tree: Tree, titles: Titles, node: Node, others: set[int]) -> NearestState:
    """Return the state among `others` whose path is the longest along with the path to a node."""
    above = {at: steps for steps, at in enumerate(_upwards(node))}
    best: tuple[int, int, Node, Node] | None = None
    for number in sorted(others & tree.nodes.keys())[:_MAX_COMPARED]:
        other = tree.nodes[number]
        down, common = next((down, at) for down, at in enumerate(_upwards(other)) if at in above)
        if best is None or (above[common], down) < best[:2]:
            best = (above[common], down, other, common)
    assert best is not None
    _, _, other, common = best
    return NearestState(
        node=node_name(other),
        rollouts=other.visits,
        last_common=node_name(common),
        here=_first_call(titles, node, common),
        there=_first_call(titles, other, common),
    )


def _upwards(node: Node) -> Iterator[Node]:
    yield node
    yield from (record.source for record in path(node))


def _first_call(titles: Titles, node: Node, above: Node) -> str | None:
    """Return the call by which the path to a node leaves a node above it; None if they are the same."""
    return next((titles.of(record).text for record in path(node) if record.source is above), None)
