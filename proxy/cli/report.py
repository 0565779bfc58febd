"""`forkpoint report`: hit rate, tool time and rewards of groups of rollouts, of one run or of two side by side."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from proxy.cli.client import LONG_S, ControlClient
from proxy.cli.options import JsonOption, LabelOption, OnlyTask
from proxy.cli.output import show
from proxy.cli.rendering import report_page
from proxy.cli.rendering.lists import ListColumns
from proxy.cli.text import printable

Labels = list[str] | None


def report(
    proxy: ControlClient,
    task: OnlyTask = None,
    *,
    by: Annotated[str, typer.Option(help="Group by 'task', 'endpoint', or a label such as 'run' or 'step'.")] = "run",
    label: LabelOption = None,
    against: Annotated[
        Labels, typer.Option(help="Compare with the rollouts that have this label, such as run=r8. Repeatable.")
    ] = None,
    price: Annotated[float, typer.Option(help="Price of one hour of tool time, in dollars.", min=0)] = 0.0,
    html: Annotated[Path | None, typer.Option(help="Write the report with plots to this HTML file.")] = None,
    json: JsonOption = False,
) -> None:
    """Show what the cache did: hit rate, seconds executed and saved, percentiles, rewards and prices by group."""
    path = ["report"] if task is None else ["tasks", task, "report"]

    def read(labels: Labels) -> Any:
        query = {"by": by, "price": str(price), "label": labels or []}
        return proxy.request("GET", *path, within_s=LONG_S, params=query)

    reports = [read(label), *([read(against)] if against else [])]
    known = {"run", "task", "endpoint", *(name for each in reports for name in each["label_names"])}
    if by not in known and reports[0]["total"]["rollouts"]:
        raise typer.BadParameter(
            f"no rollout has this label. Choose one of: {', '.join(sorted(known))}.", param_hint="--by"
        )
    if html is not None:
        html.write_text(report_page.page(reports), encoding="utf-8")
    show(reports if against else reports[0], lambda _: render(reports), json=json)


_CELL_CHARS = 48
"""Longest cell of the table of calls: the whole command is in `--json`."""


def render(reports: Sequence[report_page.Json]) -> RenderableType:
    """Render one or two reports as tables."""
    return Group(*(part for each in reports for part in _parts(each)))


def _parts(view: report_page.Json) -> list[RenderableType]:
    names = [*(printable(report_page.name_of(row)) for row in view["rows"]), "total"]
    columns = report_page.columns_of(view)
    rows = [
        (name, *(cell(row) for _, cell in columns))
        for name, row in zip(names, (*view["rows"], view["total"]), strict=True)
    ]
    table = ListColumns((printable(str(view["by"])), *(name for name, _ in columns)), rows)
    arms = Table(*(name for name, _ in report_page.ARM_COLUMNS))
    for arm in view["arms"]:
        arms.add_row(*(cell(arm) for _, cell in report_page.ARM_COLUMNS))
    title = Text(printable(report_page.title_of(view)), style="bold")
    parts: list[RenderableType] = [title, Group(table)]
    if view["calls"]:
        chosen = report_page.call_columns_of(view)
        calls = [tuple(printable(cell(call))[:_CELL_CHARS] for _, cell in chosen) for call in view["calls"]]
        parts.append(Group(ListColumns(tuple(name for name, _ in chosen), calls)))
    parts += [Text(printable(note), style="dim") for note in report_page.notes_of(view)]
    parts.append(arms)
    if view["truncated"]:
        parts.append(Text("More groups were left out; choose some with --label.", style="dim"))
    return parts
