"""Routes for audits: what was found, masks, and asking for one."""

from typing import Annotated

from fastapi import APIRouter, Body, Response
from pydantic import BaseModel, Field

from proxy.audit.auditor import SampleSource, Tally
from proxy.audit.confidence import clopper_pearson
from proxy.audit.noise_masks import Masks
from proxy.control.call_titles import TITLE_CHARS, title
from proxy.control.routes.params import EngineDep, RootQuery, TaskName, place_of, tree_of
from proxy.control.views.resources import NodeName, node_name
from proxy.engine import Engine
from proxy.tree.task import Task
from proxy.tree.tree import Tree

router = APIRouter()


class Bound(BaseModel):
    """What is known of a rate of wrong answers: an interval that holds it with this confidence (Clopper-Pearson).

    kind: hits, a share of those given, or records, a sample of the recorded calls. checked: run again; differing: of
    them. unreachable: not checked, because no way leads to their state any more; they are not in the rate.
    """

    kind: SampleSource
    checked: int
    differing: int
    unreachable: int
    rate: float
    low: float
    high: float
    confidence: float
    last_at: float


class Finding(BaseModel):
    """A recorded call that did not come again. node: where it was made; leads_to: where it led."""

    record: int
    node: NodeName
    leads_to: NodeName
    title: str
    why: str
    quarantined: bool
    found_at: float


class AuditProgress(BaseModel):
    """An audit that runs, or that was just asked for. of: calls to look at."""

    of: int
    checked: int
    differing: int
    unreachable: int
    failed: int


class AuditView(BaseModel):
    """What audits saw of a task's tree. root: its. masks: noise that answers were compared without, in all trees.

    quarantine: the policy.
    """

    task: str
    root: NodeName
    bounds: list[Bound]
    findings: list[Finding]
    masks: Masks
    quarantine: bool
    running: AuditProgress | None


class AuditRequest(BaseModel):
    """What to check. sample: so many calls, drawn evenly; null: all. node: of those that led there or came after; the
    root of another tree means that tree.
    """

    sample: int | None = Field(default=100, ge=1, le=1_000_000)
    node: NodeName | None = None
    seed: int | None = Field(default=None, ge=0, le=1 << 62, description="draws the same sample again")


def bounds(rows: list[tuple[str, int, int, int, float]]) -> list[Bound]:
    """Return bounds from what the store counted."""
    found = []
    for kind, checked, differing, unreachable, at in rows:
        interval = clopper_pearson(differing, checked)
        found.append(
            Bound(
                kind=kind,  # type: ignore[arg-type]
                checked=checked,
                differing=differing,
                unreachable=unreachable,
                rate=differing / checked if checked else 0.0,
                low=interval.low,
                high=interval.high,
                confidence=interval.confidence,
                last_at=at,
            )
        )
    return found


@router.get("/tasks/{task}/audit")
async def get_audit(engine: EngineDep, task: TaskName, root: RootQuery = None) -> AuditView:
    """Show what audits saw: bounds on the rate of wrong answers, and the calls that differ."""
    found = await engine.tasks.find(task)
    return _view(engine, found, tree_of(engine, found, root))


@router.put("/tasks/{task}/audit/masks")
async def put_masks(engine: EngineDep, task: TaskName, masks: Masks) -> AuditView:
    """Say what noise in this task's answers does not count when they are compared."""
    found = await engine.tasks.find(task)
    engine.store.audits.put_masks(task, masks.model_dump_json())
    return _view(engine, found, found.tree)


@router.post("/tasks/{task}/verify", status_code=202)
async def verify(
    engine: EngineDep, task: TaskName, wanted: Annotated[AuditRequest | None, Body()] = None
) -> AuditProgress:
    """Begin to run recorded calls again in fresh sandboxes, and to compare. GET …/audit shows how far it is."""
    found = await engine.tasks.find(task)
    asked = wanted or AuditRequest()
    tree, below = (found.tree, found.tree.root) if asked.node is None else place_of(engine, found, asked.node)
    return _progress(engine.audit.begin(task, tree, below, asked.sample, asked.seed))


@router.delete("/tasks/{task}/verify", status_code=204, response_class=Response)
async def stop(engine: EngineDep, task: TaskName, root: RootQuery = None) -> None:
    """Stop the audit that runs; what it has seen stays known."""
    await engine.audit.stop(tree_of(engine, await engine.tasks.find(task), root))


def _view(engine: Engine, task: Task, tree: Tree) -> AuditView:
    running = engine.audit.running(tree)
    return AuditView(
        task=task.name,
        root=node_name(tree.root),
        bounds=bounds(engine.store.audits.totals(tree.id)),
        findings=[
            Finding(
                record=record,
                node=f"n{source}",
                leads_to=f"n{target}",
                title=title(engine.store.records.call_without_upload(call))[:TITLE_CHARS],
                why=why,
                quarantined=bool(quarantined),
                found_at=at,
            )
            for record, source, target, call, why, quarantined, at in engine.store.audits.findings(tree.id)
        ],
        masks=engine.audit.masks(task.name),
        quarantine=engine.audit.quarantine,
        running=None if running is None else _progress(running),
    )


def _progress(tally: Tally) -> AuditProgress:
    return AuditProgress(**{name: getattr(tally, name) for name in AuditProgress.model_fields})
