"""Routes of audits: show the findings, set the noise masks, start and stop an audit."""

import math
from dataclasses import asdict
from typing import Annotated

from fastapi import Body, Response
from pydantic import AwareDatetime, BaseModel, Field

from proxy.audit.auditor import AuditProgress, SampleSource
from proxy.audit.confidence import CONFIDENCE, clopper_pearson
from proxy.audit.noise_masks import Masks
from proxy.control.call_titles import TITLE_CHARS, title
from proxy.control.parts import ControlPlane
from proxy.control.routes.params import ControlDep, TaskDep, TreeDep, api_router, position_of
from proxy.control.views.resources import NodeName, node_name
from proxy.times import UtcTime
from proxy.tree.task import Task
from proxy.tree.tree import Tree

router = api_router("audits")


class Bound(BaseModel):
    """A rate of wrong answers with its confidence interval (Clopper-Pearson).

    Attributes:
        kind: What was sampled: `hits` that were answered, or `records` of calls.
        unreachable: Calls that could not be checked because no path leads to their state; not part of the rate.
        rate: `differing` as a share of `checked`, from 0 to 1.
        last_at: When the last call was checked.
    """

    kind: SampleSource
    checked: int
    differing: int
    unreachable: int
    rate: float
    low: float
    high: float
    confidence: float
    last_at: UtcTime


class Finding(BaseModel):
    """A recorded call that an audit could not repeat; in quarantine it answers no calls any more."""

    record: int
    node: NodeName
    leads_to: NodeName
    title: str
    why: str
    quarantined: bool
    found_at: UtcTime


class AuditView(BaseModel):
    """The results of all audits of a tree; the masks hold for all trees of the task."""

    task: str
    root: NodeName
    bounds: list[Bound]
    findings: list[Finding]
    masks: Masks
    quarantine: bool
    running: AuditProgress | None


class AuditRequest(BaseModel):
    """What an audit checks.

    Attributes:
        sample: Number of calls, drawn evenly; null for all calls.
        node: Checks only this node and its subtree; null for the current tree. The root of another tree selects that
            tree.
        seed: Draws the same sample again; null for a random one.
        before: Checks only calls that were recorded before this time; null for all.
    """

    sample: int | None = Field(default=100, ge=1, le=1_000_000)
    node: NodeName | None = None
    seed: int | None = Field(default=None, ge=0, le=1 << 62, description="The same seed draws the same sample.")
    before: AwareDatetime | None = None


def bounds(rows: list[tuple[str, int, int, int, float]]) -> list[Bound]:
    """Return the rates of wrong answers from the store's counts."""
    return [
        Bound(
            kind=kind,  # type: ignore[arg-type]
            checked=checked,
            differing=differing,
            unreachable=unreachable,
            rate=differing / checked if checked else 0.0,
            **asdict(clopper_pearson(differing, checked)),
            confidence=CONFIDENCE,
            last_at=at,
        )
        for kind, checked, differing, unreachable, at in rows
    ]


@router.get("/tasks/{task}/audit")
async def get_audit(control: ControlDep, task: TaskDep, tree: TreeDep) -> AuditView:
    """Show the results of audits: bounds on the rate of wrong answers, and the calls that differ."""
    return _view(control, task, tree)


@router.put("/tasks/{task}/audit/masks")
async def put_masks(control: ControlDep, task: TaskDep, masks: Masks) -> AuditView:
    """Set the noise that comparisons of this task's answers ignore."""
    control.audit.put_masks(task.name, masks)
    return _view(control, task, task.tree)


@router.post("/tasks/{task}/verify", status_code=202, name="start_audit")
async def verify(
    control: ControlDep, task: TaskDep, audit: Annotated[AuditRequest | None, Body()] = None
) -> AuditProgress:
    """Start an audit: recorded calls run again in fresh sandboxes. GET …/audit shows its progress."""
    audit = audit or AuditRequest()
    tree, top = (task.tree, task.tree.root) if audit.node is None else position_of(control, task, audit.node)
    before = math.inf if audit.before is None else audit.before.timestamp()
    return control.audit.begin(task.name, tree, top, audit.sample, audit.seed, before)


@router.delete("/tasks/{task}/verify", status_code=204, response_class=Response, name="stop_audit")
async def stop(control: ControlDep, tree: TreeDep) -> None:
    """Stop the running audit. Its results so far are kept."""
    await control.audit.stop(tree)


def _view(control: ControlPlane, task: Task, tree: Tree) -> AuditView:
    return AuditView(
        task=task.name,
        root=node_name(tree.root),
        bounds=bounds(control.store.audits.totals(tree.id)),
        findings=[
            Finding(
                record=record,
                node=f"n{source}",
                leads_to=f"n{target}",
                title=title(control.store.records.call_without_upload(call))[:TITLE_CHARS],
                why=why,
                quarantined=bool(quarantined),
                found_at=noticed_at,
            )
            for record, source, target, call, why, quarantined, noticed_at in control.store.audits.findings(tree.id)
        ],
        masks=control.audit.masks(task.name),
        quarantine=control.audit.quarantine,
        running=control.audit.running(tree),
    )
