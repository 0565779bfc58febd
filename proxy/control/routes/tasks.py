"""Routes of tasks: list, define, show and delete them, and prepare sandboxes for the next batch."""

from typing import Annotated

from fastapi import Query, Request, Response

from proxy.control.paging import ListQuery, Order, Page, list_query
from proxy.control.parts import ControlPlane
from proxy.control.routes.params import ControlDep, RootQuery, TaskDep, TaskName, api_router, confined, granted, tree_of
from proxy.control.task_totals import TaskTotals
from proxy.control.views.resources import Batch, WarmView, node_name
from proxy.control.views.rollouts import TaskSummary, TaskView, task_view
from proxy.tree.task import Task
from sandboxes.driver import AdvisingDriver, fulfils
from sandboxes.spec import EnvironmentSpec

router = api_router("tasks")


@router.get("/tasks")
async def list_tasks(
    control: ControlDep,
    request: Request,
    wanted: Annotated[
        ListQuery, list_query("task", "created_at", "used_at", "calls", "hit_rate", "saved_s", default="task")
    ],
    q: Annotated[str, Query(max_length=200, description="Only tasks whose name contains this text.")] = "",
) -> Page[TaskSummary]:
    """List the tasks, with the totals of their rollouts."""
    totals = await control.task_totals.get()
    grant = granted(request)
    tasks = [
        (name, created_at, totals.get(name) or TaskTotals())
        for name, created_at in control.store.tasks.all()
        if q in name and grant.sees(name) and control.has(name)
    ]

    def order(task: tuple[str, float, TaskTotals]) -> Order:
        name, created_at, known = task
        return (
            created_at if wanted.key == "created_at" else name if wanted.key == "task" else getattr(known, wanted.key),
            name,
        )

    return wanted.sorted_part(tasks, order).page(lambda task: _summary(control, *task))


@router.put("/tasks/{task}", responses={201: {"model": TaskView}})
async def put_task(
    control: ControlDep, task: TaskName, request: Request, response: Response, spec: EnvironmentSpec | None = None
) -> TaskView:
    """Set a task's environment. A new environment starts a new tree; running rollouts stay in theirs."""
    known, created = await control.tasks.put(task, confined(request, spec or EnvironmentSpec()))
    response.status_code = 201 if created else 200
    return _task_view(control, known)


@router.get("/tasks/{task}")
async def get_task(control: ControlDep, task: TaskDep) -> TaskView:
    """Show a task."""
    return _task_view(control, task)


@router.delete("/tasks/{task}", status_code=204)
async def delete_task(control: ControlDep, task: TaskName) -> None:
    """Delete a task with its trees and rollouts."""
    await control.forgetting.delete_task(task)


@router.post("/tasks/{task}/warm", status_code=202)
async def warm_task(control: ControlDep, task: TaskName, batch: Batch, root: RootQuery = None) -> WarmView:
    """Prepare sandboxes at a tree's root for the next batch of rollouts, in the background."""
    tree = tree_of(control, await control.tasks.open(task), root)
    granted = control.warm.request(tree, batch.count)
    return WarmView(
        task=task,
        node=node_name(tree.root),
        granted=granted,
        ready=control.warm.ready(tree.root),
        expires_s=control.settings.sandbox_idle_s,
    )


def _task_view(control: ControlPlane, task: Task) -> TaskView:
    driver = control.drivers.get(task.spec.driver)
    advice = driver.advice(task.spec) if fulfils(driver, AdvisingDriver) else ""
    return task_view(task, control.store.tasks.summary(task.name), advice)


def _summary(control: ControlPlane, name: str, created_at: float, totals: TaskTotals) -> TaskSummary:
    counts = control.store.tasks.summary(name)
    return TaskSummary(
        task=name, created_at=created_at, nodes=counts["nodes"], rollouts=counts["rollouts"],
        running=totals.running, used_at=totals.used_at or None, **totals.as_dict(),
    )  # fmt: skip
