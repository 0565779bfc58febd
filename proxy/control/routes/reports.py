"""Routes of reports: what the cache did, by run, step, group, task or endpoint."""

import asyncio
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Query

from proxy.control.reports import ReportRequest, read_report
from proxy.control.routes.params import WHOLE, EngineDep, LabelQuery, TaskDep, wanted_labels
from proxy.control.views.report import ReportView
from proxy.engine import Engine
from proxy.tree.labels import NAME_PATTERN

By = Annotated[
    str, Query(pattern=NAME_PATTERN, description="Group by `task`, `endpoint`, or a label such as `run` or `step`.")
]
Price = Annotated[
    float, Query(alias="price", ge=0, le=1e9, description="Price of one hour of tool time, for example in dollars.")
]

router = APIRouter()


@router.get("/report", name="get_report", dependencies=[WHOLE])
async def report(engine: EngineDep, by: By = "run", label: LabelQuery = None, price: Price = 0.0) -> ReportView:
    """Report hit rate, tool time and rewards of all tasks."""
    return await _report(engine, ReportRequest(by, wanted_labels(label), None, price))


@router.get("/tasks/{task}/report", name="get_task_report")
async def report_task(
    engine: EngineDep, task: TaskDep, by: By = "run", label: LabelQuery = None, price: Price = 0.0
) -> ReportView:
    """Report hit rate, tool time and rewards of one task."""
    return await _report(engine, ReportRequest(by, wanted_labels(label), task.name, price))


async def _report(engine: Engine, request: ReportRequest) -> ReportView:
    engine.journal.fold()
    return await asyncio.to_thread(engine.store.database.read_apart, partial(read_report, request=request))
