"""The routes under `/api/v1` that the page needs beside those of everybody: columns, labels, calls, timings."""

import asyncio
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Annotated, Literal

import orjson
from fastapi import APIRouter, Depends, Path, Query, Request, Response
from pydantic import BaseModel

from proxy.control.call_titles import Titles
from proxy.control.routes.params import (
    PROBLEM,
    EngineDep,
    NewName,
    NodePath,
    RolloutName,
    RootQuery,
    TaskName,
    position_of,
    tree_of,
)
from proxy.control.tree_reader import rollouts_by_node
from proxy.control.views.answers import ShownAnswer, shown_answer
from proxy.control.views.nodes import CallView, EffectName
from proxy.control.views.rollouts import RolloutView, rollout_view
from proxy.engine import Engine
from proxy.refusals import RefusalError
from proxy.tree.tree import Node, Record
from proxy.ui.columns import TreeColumns, columns_of, tree_columns
from proxy.ui.lookups import Lookups

_LABELS = 500
_LABELS_AT_ONCE = 16
_PASSAGES = 200
_COLUMNS = {200: {"model": TreeColumns}}


class LabelView(BaseModel):
    """A call, cut to 200 characters. record: its number. node: where it leads, or was made if it changed nothing."""

    node: str
    record: int
    text: str
    exit_code: int | None
    seconds: float
    hits: int


class PassageView(BaseModel):
    """A rollout that made a call. turn: which of its calls that was, from 0."""

    rollout: str
    turn: int
    outcome: Literal["hit", "miss", "wait", "bypass"]


class RecordView(BaseModel):
    """A recorded call with its answer. node: where it was made. leads_to: the node it leads to, itself for one that
    changed nothing. passed: who made it, the latest first, 200 at most.
    """

    record: int
    node: str
    leads_to: str
    call: CallView
    upload_bytes: int
    effect: list[EffectName]
    seconds: float
    hits: int
    recorded_at: float
    private: bool
    reproducible: bool
    answer: ShownAnswer
    passed: list[PassageView]


class FailuresView(BaseModel):
    """Nodes that a failed call led to, and those at which one failed that changed nothing. upto: ask again from this
    record on.
    """

    upto: int
    nodes: list[int]
    reads: list[int]


class TimingView(BaseModel):
    """Where the seconds of a call went that was no hit."""

    wait_s: float
    restore_s: float
    replay_s: float
    tool_s: float
    replayed_calls: int


page_data = APIRouter(prefix="/api/v1", responses={"4XX": PROBLEM, "5XX": PROBLEM})


@dataclass(frozen=True, slots=True)
class PageData:
    """What the page's routes remember between requests.

    Attributes:
        lookups: Reads what the tree in memory does not hold: failures, and the rollouts that made a call.
        titles: One line for each call.
    """

    lookups: Lookups
    titles: Titles

    @classmethod
    def over(cls, engine: Engine) -> "PageData":
        """Build the parts over an engine."""
        return cls(Lookups(engine.store), Titles(engine.store.records))


async def page_of(request: Request) -> PageData:
    """Return the page's data of the application; a coroutine, because FastAPI runs others in threads."""
    page: PageData = request.app.state.page
    return page


PageDep = Annotated[PageData, Depends(page_of)]


@page_data.get("/tasks/{task}/columns", response_class=Response, responses=_COLUMNS)  # type: ignore[arg-type]
async def get_columns(
    engine: EngineDep,
    task: TaskName,
    after: Annotated[int, Query(ge=0, le=1 << 60, description="nodes made after the one of this number")] = 0,
    limit: Annotated[int, Query(ge=1, le=20_000)] = 10_000,
    root: RootQuery = None,
) -> Response:
    """Show a tree as columns of numbers, in the order in which its nodes were made, and who stands in it."""
    found = await engine.tasks.find(task)
    tree = tree_of(engine, found, root)
    read = await columns_of(tree, after, limit)
    here = {node.id: names for node, names in rollouts_by_node(found).items() if tree.nodes.get(node.id) is node}
    slots = [(slot.position, slot.warm) for slot in engine.pool.roster.slots]
    places = [(p.id, warm) for p, warm in slots if isinstance(p, Node) and tree.nodes.get(p.id) is p]
    return Response(orjson.dumps(tree_columns(task, tree, read, here, places)), media_type="application/json")


@page_data.get("/tasks/{task}/labels")
async def get_labels(
    engine: EngineDep,
    page: PageDep,
    task: TaskName,
    nodes: Annotated[str, Query(pattern=r"^[0-9]{1,18}(,[0-9]{1,18})*$", max_length=10_000)],
    root: RootQuery = None,
) -> list[LabelView]:
    """Show in one line each the calls that led to nodes, given by their numbers; unknown ones are left out."""
    titles = page.titles
    tree = tree_of(engine, await engine.tasks.find(task), root)
    known = [tree.nodes.get(int(number)) for number in nodes.split(",")[:_LABELS]]
    return await _labels(titles, [node.origin for node in known if node is not None and node.origin is not None])


@page_data.get("/tasks/{task}/nodes/{node}/observations")
async def get_observations(
    engine: EngineDep, page: PageDep, task: TaskName, node: NodePath, limit: Annotated[int, Query(ge=1, le=1000)] = 200
) -> list[LabelView]:
    """List the calls at a node that changed nothing, those with most hits first."""
    titles = page.titles
    _, here = position_of(engine, await engine.tasks.find(task), node)
    seen = sorted((r for r in here.records.values() if r.observation), key=lambda r: (-r.hits, r.id))
    return await _labels(titles, seen[:limit])


@page_data.get("/tasks/{task}/failures")
async def get_failures(
    engine: EngineDep,
    page: PageDep,
    task: TaskName,
    after: Annotated[int, Query(ge=0, le=1 << 60, description="a record's number")] = 0,
    root: RootQuery = None,
) -> FailuresView:
    """List the nodes whose call failed, or at which one failed: an exit code other than 0, a status from 400 on."""
    lookups = page.lookups
    tree = tree_of(engine, await engine.tasks.find(task), root)
    known = await lookups.failures(tree.id)
    new = [(source, target) for record, source, target in known.found if record > after]
    return FailuresView(
        upto=known.upto,
        nodes=sorted({target for source, target in new if source != target}),
        reads=sorted({target for source, target in new if source == target}),
    )


@page_data.get("/tasks/{task}/nodes/{node}/calls/{record}")
async def get_call(
    engine: EngineDep,
    page: PageDep,
    task: TaskName,
    node: NodePath,
    record: Annotated[int, Path(ge=0, le=1 << 60, description="a call's number among the tree's records")],
) -> RecordView:
    """Show a recorded call that was made at a node, or led to it, with its answer and who made it."""
    lookups = page.lookups
    _, here = position_of(engine, await engine.tasks.find(task), node)
    found = _record(here, record)
    call, result = engine.store.records.call(found), engine.store.records.result(found)
    engine.journal.fold()
    passed = await lookups.passages(found.id, _PASSAGES)
    return RecordView(
        record=found.id,
        node=f"n{found.source.id}",
        leads_to=f"n{found.target.id}",
        call=CallView(endpoint=call.endpoint, tool=call.tool, arguments=dict(call.arguments)),
        upload_bytes=len(call.body),
        effect=found.effect.names,  # type: ignore[arg-type]
        seconds=found.seconds,
        hits=found.hits,
        recorded_at=found.recorded_at,
        private=found.private,
        reproducible=found.reproducible,
        answer=await asyncio.to_thread(shown_answer, result),
        passed=[PassageView(**asdict(passage)) for passage in passed],
    )


@page_data.get("/tasks/{task}/rollouts/{rollout}/timings")
async def get_timings(engine: EngineDep, task: TaskName, rollout: RolloutName) -> dict[int, TimingView]:
    """Show where the time of a rollout's calls went, by turn: of those that were no hits, while remembered."""
    await engine.tasks.find(task)
    rows = engine.store.rollouts.of_task(task, name=rollout)
    known = engine.executor.timings.of(rows[-1]["id"]) if rows else {}
    return {turn: TimingView(**asdict(timing)) for turn, timing in known.items()}


@page_data.post("/tasks/{task}/nodes/{node}/fork", status_code=201)
async def fork_at_node(
    engine: EngineDep, task: TaskName, node: NodePath, request: Request, name: NewName
) -> RolloutView:
    """Begin a rollout at a node, whoever stands there."""
    found = await engine.tasks.find(task)
    begun = engine.tasks.begin(found, name, *position_of(engine, found, node))
    engine.warm.note_step(begun)
    row = engine.store.rollouts.of_task(task, name=name)[-1]
    return RolloutView(**rollout_view(row, str(request.base_url), begun))


async def _labels(titles: Titles, records: Iterable[Record]) -> list[LabelView]:
    """Return labels, read in slices: hits are answered between them."""
    labels = []
    for number, record in enumerate(records):
        if number % _LABELS_AT_ONCE == _LABELS_AT_ONCE - 1:
            await asyncio.sleep(0)
        text, code = titles.of(record)
        labels.append(
            LabelView(
                node=f"n{record.target.id}",
                record=record.id,
                text=text,
                exit_code=code,
                seconds=record.seconds,
                hits=record.hits,
            )
        )
    return labels


def _record(node: Node, number: int) -> Record:
    candidates = [*node.records.values(), *([] if node.origin is None else [node.origin])]
    for record in candidates:
        if record.id == number:
            return record
    raise RefusalError(404, "no-such-call", f"no call with number {number} is recorded at n{node.id}, or led to it.")
