"""Commands that list what a running proxy has: tasks, rollouts, snapshots, sandboxes, totals."""

from fnmatch import fnmatchcase
from typing import Annotated

import typer

from proxy.cli.client import ControlClient
from proxy.cli.options import JsonOption, LabelOption, TaskArgument, complete_task
from proxy.cli.output import show
from proxy.cli.rendering.lists import render_rollouts, render_sandboxes, render_snapshots, render_stats, render_tasks

TaskFilter = Annotated[
    str | None, typer.Option("--task", help="Only those of this task.", autocompletion=complete_task)
]
LimitOption = Annotated[int, typer.Option(help="Most rows to list.", min=1, max=10_000)]


def tasks(
    proxy: ControlClient,
    match: Annotated[str | None, typer.Option(help="Only names that match this pattern (*, ?).")] = None,
    limit: LimitOption = 1000,
    json: JsonOption = False,
) -> None:
    """List the tasks with their rollouts, hits and seconds."""
    rows = proxy.items("tasks", most=limit if match is None else None)
    rows = [row for row in rows if match is None or fnmatchcase(row["task"], match)]
    show(rows[:limit], render_tasks, json=json)


def rollouts(
    proxy: ControlClient,
    task: TaskArgument,
    running: Annotated[bool, typer.Option("--running", help="Only rollouts that can go on.")] = False,
    label: LabelOption = None,
    limit: LimitOption = 1000,
    json: JsonOption = False,
) -> None:
    """List a task's rollouts, newest first."""
    query = {"sort": "-created_at", "label": label or [], "finished": False if running else None}
    rows = proxy.items("tasks", task, "rollouts", most=limit, **query)
    show([row for row in rows if not (running and row["lost"])], render_rollouts, json=json)


def snapshots(
    proxy: ControlClient, task: TaskFilter = None, limit: LimitOption = 1000, json: JsonOption = False
) -> None:
    """List the snapshots: what each costs, what it saves, and why it is kept."""
    show(proxy.items("snapshots", most=limit, task=task), render_snapshots, json=json)


def sandboxes(proxy: ControlClient, task: TaskFilter = None, json: JsonOption = False) -> None:
    """List the live sandboxes: where each is, and what it is used for."""
    show(proxy.items("sandboxes", task=task), render_sandboxes, json=json)


def stats(proxy: ControlClient, json: JsonOption = False) -> None:
    """Show the totals since the proxy started, and its budgets."""
    show(proxy.request("GET", "stats"), render_stats, json=json)
