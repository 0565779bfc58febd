"""Renders why calls were no hits. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from proxy.cli.text import printable

_HITS = ("hit", "joined")


def render_reasons(items: Sequence[Mapping[str, Any]], *, task: str, every: bool) -> RenderableType:
    """Render why calls were no hits, one below the other, then what the reasons mean; `every` shows hits as well."""
    shown = [item for item in items if every or item["reason"] not in _HITS]
    hits = sum(item["reason"] in _HITS for item in items)
    table = Table(box=None, padding=(0, 1, 0, 0), expand=True, header_style="dim")
    for title in ("call", "reason", "node"):
        table.add_column(title, no_wrap=True)
    table.add_column("text", no_wrap=True, overflow="ellipsis", ratio=1)
    for item in shown:
        table.add_row(
            Text(str(item["turn"] + 1), style="dim"),
            Text(item["reason"], style="yellow" if item["reason"] not in _HITS else "green"),
            Text(printable(str(item["node"] or ""))),
            Text(printable(item["title"] or "(forgotten)")),
        )
        if item["nearest"] is not None:
            # Whole, also in a narrow terminal: its end is a command.
            nearest = Text(printable(_nearest(item, task)), style="dim", no_wrap=False, overflow="fold")
            table.add_row("", "", "", nearest)
    parts: list[RenderableType] = [Text(f"{hits} of {len(items)} calls were hits", style="bold"), table]
    for reason, meaning, remedy in dict.fromkeys((i["reason"], i["meaning"], i["remedy"]) for i in shown):
        parts.append(Text(f"{reason}: {meaning} {remedy}".rstrip()))
    return Group(*parts)


def _nearest(item: Mapping[str, Any], task: str) -> str:
    nearest = item["nearest"]
    ways = ", ".join(f"{at} {nearest[at]!r}" for at in ("here", "there") if nearest[at] is not None)
    known = f"known at {nearest['node']}; after {nearest['last_common']}: {ways}"
    return f"{known}; forkpoint diff {task} {nearest['node']} {item['node']}"
