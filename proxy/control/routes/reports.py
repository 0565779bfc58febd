"""Routes of reports: what the cache did, by run, step, group, task or endpoint."""

import asyncio
import math
from dataclasses import replace
from functools import partial
from typing import Annotated

from fastapi import Query, Response

from proxy.control.parts import ControlPlane
from proxy.control.reports import ReportPart, ReportRequest, read_part, report_of
from proxy.control.routes.params import WHOLE, ControlDep, LabelQuery, TaskDep, api_router, wanted_labels
from proxy.control.views.report import ReportView
from proxy.http.sent_labels import OWNER
from proxy.tree.labels import NAME_PATTERN

By = Annotated[
    str, Query(pattern=NAME_PATTERN, description="Group by `task`, `endpoint`, or a label such as `run` or `step`.")
]
Price = Annotated[
    float, Query(alias="price", ge=0, le=1e9, description="Price of one hour of tool time, for example in dollars.")
]

router = api_router("activity")


@router.get("/report", name="get_report", dependencies=[WHOLE])
async def report(control: ControlDep, by: By = "run", label: LabelQuery = None, price: Price = 0.0) -> ReportView:
    """Report hit rate, tool time and rewards of all tasks."""
    return report_of([await _read(control, ReportRequest(by, wanted_labels(label), None, price))])


@router.get("/report/part", include_in_schema=False, dependencies=[WHOLE])
async def report_part(control: ControlDep, by: By = "run", label: LabelQuery = None, price: Price = 0.0) -> Response:
    """Return what this process has for the report, for the worker that makes the report of all."""
    part = await _read(control, ReportRequest(by, wanted_labels(label), None, price, control.own_tasks()))
    return Response(await asyncio.to_thread(part.packed), media_type="application/json")


@router.get("/tasks/{task}/report", name="get_task_report")
async def report_task(
    control: ControlDep, task: TaskDep, by: By = "run", label: LabelQuery = None, price: Price = 0.0
) -> ReportView:
    """Report hit rate, tool time and rewards of one task."""
    return report_of([await _read(control, ReportRequest(by, wanted_labels(label), task.name, price))])


async def _read(control: ControlPlane, request: ReportRequest) -> ReportPart:
    # A page that is opened again and again asks for the same, and the steps of a large store take seconds to read.
    read = partial(control.read, partial(read_part, request=request))
    part: ReportPart = await control.reports.get(repr(request), read)
    if request.by == OWNER and request.task is None:
        owned = control.cache.owned.items()
        kept = {q.owner[1:]: (used, None if math.isinf(q.most_bytes) else q.most_bytes) for q, used in owned}
        return replace(part, kept=kept)
    return part
