"""Routes under `/api/v1` that only the page needs: columns, titles, calls, failures and timings."""

import asyncio
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Annotated

import orjson
from fastapi import Depends, Path, Query, Request, Response
from pydantic import BaseModel

from proxy.control.call_titles import Titles
from proxy.control.paging import ListQuery, Page, list_query
from proxy.control.parts import ControlPlane
from proxy.control.routes.params import (
    ControlDep,
    NewName,
    OwnQuery,
    PositionDep,
    RolloutName,
    TaskDep,
    TreeDep,
    api_router,
    own_of,
)
from proxy.control.routes.rollouts import begin
from proxy.control.tree_reader import rollouts_by_node
from proxy.control.views.answers import ShownAnswer, shown_answer
from proxy.control.views.nodes import CallView, EffectName, ResourcesView
from proxy.control.views.rollouts import RolloutView
from proxy.refusals import RefusalError
from proxy.times import UtcTime
from proxy.tree.tree import Node, Record
from proxy.ui.columns import TreeColumns, columns_of, tree_columns
from proxy.ui.lookups import Lookups, PassageView

_TITLES = 500
"""Titles in one response."""
_TITLES_PER_SLICE = 16
"""Titles that are read between two turns of the event loop: about 0.5 ms."""
_PASSAGES = 200
"""Rollouts that the view of a record lists."""
_COLUMNS = {200: {"model": TreeColumns}}


class TitleView(BaseModel):
    """A call in one line, and the node that it leads to; for an observation its own."""

    node: str
    record: int
    text: str
    exit_code: int | None
    seconds: float
    hits: int


class RecordView(BaseModel):
    """A recorded call with its answer.

    Attributes:
        leads_to: The node that it leads to; for an observation the same node.
        private: Whether the record serves only the rollout that made it.
        reproducible: Whether a replay of the call is expected to reach the same state.
        resources: What the call used of the machine; null if nothing is known.
        passed: The latest rollouts that made the call, at most 200.
    """

    record: int
    node: str
    leads_to: str
    call: CallView
    upload_bytes: int
    effect: list[EffectName]
    seconds: float
    hits: int
    recorded_at: UtcTime
    private: bool
    reproducible: bool
    resources: ResourcesView | None
    answer: ShownAnswer
    passed: list[PassageView]


class FailuresView(BaseModel):
    """The failed calls of a tree and of observations (`reads`) up to a record: `after` of the next request."""

    upto: int
    nodes: list[int]
    reads: list[int]


class TimingView(BaseModel):
    """When a call was answered (null if before the proxy started), and where its time went."""

    answered_at: UtcTime | None
    wait_s: float = 0.0
    restore_s: float = 0.0
    replay_s: float = 0.0
    tool_s: float = 0.0
    replayed_calls: int = 0


page_data = api_router("page")


@dataclass(frozen=True, slots=True)
class PageData:
    """What the page's routes keep between requests; `lookups` read what the tree in memory does not hold."""

    lookups: Lookups
    titles: Titles

    @classmethod
    def over(cls, control: ControlPlane) -> "PageData":
        """Build the parts over an engine."""
        return cls(Lookups(control.store), Titles(control.store.records))


async def page_of(request: Request) -> PageData:
    """Return the application's page data. It is a coroutine because FastAPI runs plain functions in threads."""
    page: PageData = request.app.state.page
    return page


PageDep = Annotated[PageData, Depends(page_of)]


@page_data.get("/tasks/{task}/columns", response_class=Response, responses=_COLUMNS)  # type: ignore[arg-type]
async def get_columns(
    control: ControlDep,
    task: TaskDep,
    tree: TreeDep,
    after: Annotated[int, Query(ge=0, le=1 << 60, description="Return the nodes after this node number.")] = 0,
    limit: Annotated[int, Query(ge=1, le=20_000)] = 10_000,
    own: OwnQuery = False,
) -> Response:
    """Show a tree as columns of numbers, in the order of its nodes' creation, with its rollouts and sandboxes."""
    part = await own_of(control, task, tree) if own else None
    read = await columns_of(tree, after, limit, part)
    nodes = len(tree.nodes if part is None else part.nodes)
    standing = {node.id: names for node, names in rollouts_by_node(task).items() if tree.nodes.get(node.id) is node}
    slots = [(slot.position, slot.warm) for slot in control.pool.roster.slots]
    sandboxes = [(p.id, warm) for p, warm in slots if isinstance(p, Node) and tree.nodes.get(p.id) is p]
    return Response(
        orjson.dumps(tree_columns(task.name, tree, read, standing, sandboxes, nodes)), media_type="application/json"
    )


@page_data.get("/tasks/{task}/titles")
async def get_titles(
    page: PageDep,
    tree: TreeDep,
    nodes: Annotated[str, Query(pattern=r"^[0-9]{1,18}(,[0-9]{1,18})*$", max_length=10_000)],
) -> Page[TitleView]:
    """Show the calls that led to nodes, each in one line. Unknown node numbers are left out."""
    known = [tree.nodes.get(int(number)) for number in nodes.split(",")[:_TITLES]]
    origins = [node.origin for node in known if node is not None and node.origin is not None]
    return Page.whole(await _titles(page.titles, origins))


@page_data.get("/tasks/{task}/nodes/{node}/observations")
async def get_observations(
    control: ControlDep,
    page: PageDep,
    task: TaskDep,
    position: PositionDep,
    wanted: Annotated[ListQuery, list_query("hits", "record", default="-hits")],
    own: OwnQuery = False,
) -> Page[TitleView]:
    """List the observations at a node, by hits."""
    part_of = await own_of(control, task, position[0]) if own else None
    observations = (
        record
        for record in position[1].records.values()
        if record.observation and (part_of is None or record.id in part_of.records)
    )
    by_hits = wanted.key == "hits"
    part = wanted.sorted_part(observations, lambda record: (record.hits, -record.id) if by_hits else (record.id,))
    return Page(items=await _titles(page.titles, part.entries), total=part.total, next=part.next)


@page_data.get("/tasks/{task}/failures")
async def get_failures(
    page: PageDep,
    tree: TreeDep,
    after: Annotated[int, Query(ge=0, le=1 << 60, description="Return the failures after this record number.")] = 0,
) -> FailuresView:
    """List the nodes with failed calls: a non-zero exit code, or a status of 400 or above."""
    known = await page.lookups.failures(tree.id)
    new = [(source, target) for record, source, target in known.calls if record > after]
    return FailuresView(
        upto=known.upto,
        nodes=sorted({target for source, target in new if source != target}),
        reads=sorted({target for source, target in new if source == target}),
    )


@page_data.get("/tasks/{task}/nodes/{node}/calls/{record}")
async def get_call(
    control: ControlDep,
    page: PageDep,
    position: PositionDep,
    record: Annotated[int, Path(ge=0, le=1 << 60, description="Number of the record.")],
) -> RecordView:
    """Show a call that was made at a node or led to it, with its answer and its rollouts."""
    recorded = _record(position[1], record)
    call, result = control.store.records.call(recorded), control.store.records.result(recorded)
    control.journal.fold()
    passed = await page.lookups.passages(recorded.id, _PASSAGES)
    return RecordView(
        record=recorded.id,
        node=f"n{recorded.source.id}",
        leads_to=f"n{recorded.target.id}",
        call=CallView.of(call),
        upload_bytes=len(call.body),
        effect=recorded.effect.names,  # type: ignore[arg-type]
        seconds=recorded.seconds,
        hits=recorded.hits,
        recorded_at=recorded.recorded_at,
        private=recorded.private,
        reproducible=recorded.reproducible,
        resources=ResourcesView.of(control.store.records.resources(recorded)),
        answer=await asyncio.to_thread(shown_answer, result),
        passed=passed,
    )


@page_data.get("/tasks/{task}/rollouts/{rollout}/timings")
async def get_timings(control: ControlDep, task: TaskDep, rollout: RolloutName) -> dict[int, TimingView]:
    """Show when a rollout's calls were answered and where their time went, by turn. Calls of long ago are left out."""
    rows = control.store.rollouts.of_task(task.name, name=rollout)
    if not rows:
        return {}
    spent, times = control.executor.timings.of(rows[-1]["id"]), control.step.notes.times.of(rows[-1]["id"])
    since = time.time() - time.monotonic()
    return {
        turn: TimingView(
            answered_at=since + times[turn] if turn in times else None, **(asdict(spent[turn]) if turn in spent else {})
        )
        for turn in sorted({*spent, *times})
    }


@page_data.post("/tasks/{task}/nodes/{node}/fork", status_code=201)
async def fork_at_node(
    control: ControlDep, task: TaskDep, position: PositionDep, request: Request, name: NewName
) -> RolloutView:
    """Begin a rollout at a node."""
    return begin(control, task, name, *position, request)


async def _titles(titles: Titles, records: Iterable[Record]) -> list[TitleView]:
    """Return titles. They are read in slices, between which hits are answered."""
    views = []
    for number, record in enumerate(records):
        if number % _TITLES_PER_SLICE == _TITLES_PER_SLICE - 1:
            await asyncio.sleep(0)
        text, code = titles.of(record)
        views.append(
            TitleView(
                node=f"n{record.target.id}",
                record=record.id,
                text=text,
                exit_code=code,
                seconds=record.seconds,
                hits=record.hits,
            )
        )
    return views


def _record(node: Node, number: int) -> Record:
    candidates = [*node.records.values(), *([] if node.origin is None else [node.origin])]
    for record in candidates:
        if record.id == number:
            return record
    raise RefusalError(
        404, "no-such-call", f"node n{node.id} has no record {number}. GET …/nodes/n{node.id} lists its records."
    )
