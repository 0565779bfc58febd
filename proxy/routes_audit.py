"""Routes for audits: what was found, masks, and asking for one."""

from typing import Annotated

from fastapi import APIRouter, Body, Response
from pydantic import BaseModel, Field

from proxy.audit import Kind, Tally
from proxy.bounds import clopper_pearson
from proxy.engine import Engine
from proxy.forest import Task
from proxy.masks import Masks
from proxy.resources import NodeName
from proxy.routing import TaskName, node_of
from proxy.titles import TITLE_CHARS, title


class Bound(BaseModel):
    """What is known of a rate of wrong answers: an interval that holds it with this confidence (Clopper-Pearson).

    kind: hits, a share of those given, or records, a sample of the recorded calls. checked: run again; differing: of
    them. unreachable: not checked, because no way leads to their state any more; they are not in the rate.
    """

    kind: Kind
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


class Progress(BaseModel):
    """An audit that runs, or that was just asked for. of: calls to look at."""

    of: int
    checked: int
    differing: int
    unreachable: int
    failed: int


class AuditView(BaseModel):
    """What audits saw of a task. masks: noise that answers were compared without. quarantine: the policy."""

    task: str
    bounds: list[Bound]
    findings: list[Finding]
    masks: Masks
    quarantine: bool
    running: Progress | None


class Wanted(BaseModel):
    """What to check. sample: so many calls, drawn evenly; null: all. node: of those that led there or came after."""

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


def audit_routes(router: APIRouter, engine: Engine) -> None:
    """Add the routes."""

    @router.get("/tasks/{task}/audit")
    async def get_audit(task: TaskName) -> AuditView:
        """Show what audits saw: bounds on the rate of wrong answers, and the calls that differ."""
        return _view(engine, await engine.tasks.find(task))

    @router.put("/tasks/{task}/audit/masks")
    async def put_masks(task: TaskName, masks: Masks) -> AuditView:
        """Say what noise in this task's answers does not count when they are compared."""
        found = await engine.tasks.find(task)
        engine.store.put_masks(task, masks.model_dump_json())
        return _view(engine, found)

    @router.post("/tasks/{task}/verify", status_code=202)
    async def verify(task: TaskName, wanted: Annotated[Wanted | None, Body()] = None) -> Progress:
        """Begin to run recorded calls again in fresh sandboxes, and to compare. GET …/audit shows how far it is."""
        found = await engine.tasks.find(task)
        asked = wanted or Wanted()
        below = found.tree.root if asked.node is None else node_of(found, asked.node)
        return _progress(engine.audit.begin(found, below, asked.sample, asked.seed))

    @router.delete("/tasks/{task}/verify", status_code=204, response_class=Response)
    async def stop(task: TaskName) -> None:
        """Stop the audit that runs; what it has seen stays known."""
        await engine.audit.stop((await engine.tasks.find(task)).tree)


def _view(engine: Engine, task: Task) -> AuditView:
    running = engine.audit.running(task.tree)
    return AuditView(
        task=task.name,
        bounds=bounds(engine.store.audits(task.tree.id)),
        findings=[
            Finding(
                record=record,
                node=f"n{source}",
                leads_to=f"n{target}",
                title=title(engine.store.call_text(call))[:TITLE_CHARS],
                why=why,
                quarantined=bool(quarantined),
                found_at=at,
            )
            for record, source, target, call, why, quarantined, at in engine.store.findings(task.tree.id)
        ],
        masks=engine.audit.masks(task.name),
        quarantine=engine.audit.quarantine,
        running=None if running is None else _progress(running),
    )


def _progress(tally: Tally) -> Progress:
    return Progress(**{name: getattr(tally, name) for name in Progress.model_fields})
