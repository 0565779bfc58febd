"""Renders lists of the REST API for the terminal. Pure.

Names come first and are never cut: where a terminal is too narrow, a line names the last columns, which are left out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from proxy.cli.text import printable

Json = Mapping[str, Any]
_GAP = 2
"""Blank characters between two columns."""


@dataclass(frozen=True, slots=True)
class ListColumns:
    """A table that fits its terminal."""

    titles: Sequence[str]  # The most important columns come first.
    rows: Sequence[Sequence[str]]  # The cells of each row.
    names: int = 1  # How many of the first columns are names. They are left-aligned and always shown.

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the table with as many columns as the terminal has room for."""
        shown = self._fitting(options.max_width)
        table = Table.grid(padding=(0, _GAP, 0, 0))
        for index in range(shown):
            name = index < self.names
            table.add_column(justify="left" if name else "right", overflow="fold", no_wrap=not name)
        table.add_row(*(Text(title, style="bold") for title in self.titles[:shown]))
        for row in self.rows:
            table.add_row(*map(Text, row[:shown]))
        yield table
        if hidden := self.titles[shown:]:
            yield Text(f"not shown here: {', '.join(hidden)}. Widen the terminal, or use --json.", style="dim")

    def _fitting(self, width: int) -> int:
        used = 0
        for index, title in enumerate(self.titles):
            used += max([len(title), *(len(row[index]) for row in self.rows)]) + _GAP
            if index >= self.names and used - _GAP > width:
                return index
        return len(self.titles)


def render_folder(view: Json) -> RenderableType:
    """Render a directory of a node, with what is missing from it."""
    marks = {"directory": "/", "symlink": " -> "}
    cells = [
        (
            printable(entry["name"]) + marks.get(entry["kind"], "") + printable(entry["target"] or ""),
            f"{entry['size_bytes']:,}" if entry["kind"] == "file" else "", entry["mode"],
            f"{entry['uid']}:{entry['gid']}",
        )
        for entry in view["entries"]
    ]  # fmt: skip
    lacks = "" if view["base"] else "Only what set-up and calls have changed: the base is the proxy's machine."
    more = "More entries were left out." if view["truncated"] else ""
    notes = [Text(note, style="dim") for note in (lacks, more) if note]
    return Group(ListColumns(("name", "bytes", "mode", "owner"), cells), *notes)


def render_tasks(rows: Sequence[Json]) -> RenderableType:
    """Render the tasks with the totals of their rollouts."""
    titles = ("task", "rollouts", "running", "calls", "hits", "saved s", "executed s", "nodes", "created")
    cells = [
        (
            printable(row["task"]), f"{row['rollouts']:,}", f"{row['running']:,}", f"{row['calls']:,}",
            f"{row['hit_rate']:.1%}", f"{row['saved_s']:,.1f}", f"{row['executed_s']:,.1f}", f"{row['nodes']:,}",
            _time(row["created_at"]),
        )
        for row in rows
    ]  # fmt: skip
    return _table(ListColumns(titles, cells), "no task yet")


def render_rollouts(rows: Sequence[Json]) -> RenderableType:
    """Render the rollouts of a task."""
    cells = [
        (
            printable(row["rollout"]), row["state"], row["node"], f"{row['calls']:,}",
            _time(row["created_at"]), printable(", ".join(f"{key}={value}" for key, value in row["labels"].items())),
        )
        for row in rows
    ]  # fmt: skip
    titles = ("rollout", "state", "node", "calls", "began", "labels")
    return _table(ListColumns(titles, cells, names=2), "no rollout yet")


def render_snapshots(rows: Sequence[Json]) -> RenderableType:
    """Render the snapshots."""
    cells = [
        (
            printable(row["task"]), row["node"], row["kind"], _size(row["size_bytes"]), f"{row['uses']:,}",
            f"{row['saved_s']:.2f}", f"{row['expected_uses']:.2f}", _time(row["created_at"]), printable(row["why"]),
        )
        for row in rows
    ]  # fmt: skip
    titles = ("task", "node", "kind", "size", "uses", "saves s", "expected uses", "taken", "why")
    return _table(ListColumns(titles, cells, names=3), "no snapshot yet")


def render_sandboxes(rows: Sequence[Json]) -> RenderableType:
    """Render the live sandboxes."""
    cells = [
        (
            printable(row["id"] or "-"), row["state"], printable(row["task"] or "-"), printable(row["rollout"] or "-"),
            row["node"] or "-", f"{row['calls']:,}", f"{row['age_s']:,.0f}", f"{row['idle_s']:,.0f}", row["why"],
        )
        for row in rows
    ]  # fmt: skip
    titles = ("sandbox", "state", "task", "rollout", "node", "calls", "age s", "idle s", "why")
    return _table(ListColumns(titles, cells, names=4), "no sandbox runs")


def render_members(view: Json) -> RenderableType:
    """Render the members of a cluster."""
    cells = []
    for row in view["members"]:
        state = "alive" if row["alive"] else "gone"
        cells.append((printable(row["name"]), state, f"{row['tasks']:,}", printable(row["link"])))
    heads = ("member", "state", "tasks", "link")
    quotas = [
        (printable(row["tasks"]), f"{row['calls']:,}", f"{row['running']:,}", f"{row['waiting']:,}")
        for row in view.get("quotas", ())
    ]
    members = _table(ListColumns(heads, cells, names=2), "no member")
    if not quotas:
        return members
    return Group(members, "", ListColumns(("quota of tasks", "calls", "running", "waiting"), quotas, names=1))


def render_moves(view: Json) -> RenderableType:
    """Render the loads of a cluster's members, and the tasks that move between them or would move."""
    loads = [(printable(row["name"]), f"{row['before']:,}", f"{row['after']:,}") for row in view["members"]]
    moves = [
        (
            printable(row["task"]), printable(row["from"]), printable(row["to"]), f"{row['load']:,}",
            "planned" if view["dry_run"] else "moved" if row["moved"] else "stays",
        )
        for row in view["moves"]
    ]  # fmt: skip
    return Group(
        ListColumns(("member", "load before", "after"), loads, names=1), "",
        _table(ListColumns(("task", "from", "to", "load", "state"), moves, names=3), "no task moves"),
    )  # fmt: skip


def render_nodes(rows: Sequence[Json]) -> RenderableType:
    """Render the proxies of a Ray cluster's nodes."""
    cells = [
        (row["address"], row["url"] or "", "ready" if row["ready"] else printable(row["problem"]), f"{row['starts']:,}")
        for row in rows
    ]
    return _table(ListColumns(("node", "base URL there", "state", "starts"), cells, names=3), "no node")


def render_stats(view: Json) -> RenderableType:
    """Render the totals and the budgets."""
    sandboxes = sum(view["sandboxes"].values())
    facts = (
        ("up", f"{view['uptime_s'] / 3600:,.1f} h since {_time(view['since'])}"),
        ("calls", f"{view['calls']:,}"),
        ("hit rate", f"{view['hit_rate']:.1%} ({view['hits']:,} hits, {view['waits']:,} waits)"),
        ("executed", f"{view['misses'] + view['bypasses']:,} calls in {view['executed_s']:,.1f} s"),
        ("saved", f"{view['saved_s']:,.1f} s of tool time"),
        ("replayed", f"{view['replayed_calls']:,} calls in {view['replayed_s']:,.1f} s"),
        ("sandboxes", f"{sandboxes:,} of at most {view['sandboxes_budget']:,}, by {view['sandboxes_bounded_by']}"),
        ("closed for room", f"{view['sandboxes_evicted']:,} sandboxes before their rollouts had ended"),
        ("snapshots", f"{view['snapshots']:,}, {_share(view, 'snapshot')}"),
        ("with processes", _share(view, "checkpoint")),
        ("audited", f"{view['audit_checked']:,} calls, {view['audit_differing']:,} differ"),
        ("divergences", f"{view['divergences']:,}"),
        ("errors", f"{view['errors']:,}, of which {view['recovered']:,} failed no call"),
    )
    table = Table.grid(padding=(0, _GAP))
    for name, value in facts:
        table.add_row(Text(name, style="dim"), Text(value))
    return table


def _share(view: Json, kind: str) -> str:
    return f"{_size(view[f'{kind}_bytes'])} of {_size(view[f'{kind}_budget_bytes'])}"


def _table(columns: ListColumns, empty: str) -> RenderableType:
    return Group(columns) if columns.rows else Text(empty, style="dim")


def _size(size_bytes: int) -> str:
    value, unit = float(size_bytes), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{value:,.0f} {unit}" if unit == "B" else f"{value:,.1f} {unit}"


def _time(text: str) -> str:
    """Return a time of the REST API without its fraction of a second."""
    return printable(f"{text[:10]} {text[11:19]}Z")
