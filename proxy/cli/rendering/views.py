"""Renders the REST API's JSON for the terminal, with rich. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from proxy.cli.rendering.lists import render_tasks
from proxy.cli.rendering.tree import describe
from proxy.cli.text import printable, shortened

_SPARKS = " ▁▂▃▄▅▆▇█"
"""Bars of a timeline, by height."""
_STYLES = {"hit": "green", "wait": "cyan", "miss": "yellow", "bypass": "magenta"}
_TOP_TASKS = 15
"""How many tasks `forkpoint top` shows."""
_WIDE = 100
"""Longest line of a list, in characters."""
_LINES = 200
"""Longest text or list, in lines."""

Json = Mapping[str, Any]


def render_rollout(view: Json) -> RenderableType:
    """Render a rollout: its calls in order, with bars for the seconds that their tools ran."""
    steps: Sequence[Json] = view["steps"]["items"]
    longest = max((float(step["seconds"]) for step in steps), default=0.0) or 1.0
    table = Table.grid(padding=(0, 1), expand=True)
    for _ in range(4):
        table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    for step in steps:
        seconds = float(step["seconds"])
        outcome = str(step["outcome"])
        text = "(forgotten)" if step["call"] is None else describe(step["call"])
        table.add_row(
            Text(str(step["turn"] + 1), style="dim"),
            Text(outcome, style=_STYLES.get(outcome, "")),
            Text(f"{seconds:.2f} s", justify="right"),
            Text("█" * max(1, round(12 * seconds / longest)) if seconds else "", style=_STYLES.get(outcome, "")),
            Text(f"{printable(str(step['node'] or ''))}  {text}"),
            Text(", ".join(step["marks"]), style="red"),
        )
    saved = sum(float(step["seconds"]) for step in steps if step["outcome"] in ("hit", "wait"))
    calls = "1 call" if view["calls"] == 1 else f"{view['calls']:,} calls"
    head = f"{view['task']} / {view['rollout']}: {calls}, {saved:.2f} s saved, {view['state']} at {view['node']}"
    return Group(Text(printable(head), style="bold"), table)


def render_comparison(view: Json) -> RenderableType:
    """Render rollouts that are aligned by state: one line for each way, with the rollouts that took it."""
    table = Table.grid(padding=(0, 2))
    parts = [(f"part at {part['node']}", part["ways"]) for part in view["parts"]]
    others = [("end alike", "same_end"), ("only high: states", "winning_states"), ("only high: calls", "winning_calls")]
    for name, ways in [*parts, *((name, view[member]) for name, member in others)]:
        for number, way in enumerate(ways):
            text = " ".join(printable(way[each]) for each in ("node", "call") if way[each] is not None)
            names = ", ".join(map(printable, way["rollouts"]))
            table.add_row("" if number else name, Text(shortened(text, _WIDE)), f"{len(way['rollouts'])}", Text(names))
    high = "" if view["above"] is None else f", {len(view['high'])} with a reward above {view['above']:g}"
    return Group(Text(f"{view['rollouts']} rollouts{high}", style="bold"), table)


def render_node(view: Json) -> RenderableType:
    """Render a node: its call and answer, past rollouts, and why it has a snapshot or not."""
    rows = Table.grid(padding=(0, 2))
    call = "start" if view["call"] is None else describe(view["call"])
    rows.add_row("call", Text(call, style="bold"))
    for name in ("parent", "seconds", "hits", "exit_code", "kept", "diverged", "unfreezable"):
        if view.get(name) not in (None, ""):
            rows.add_row(name.replace("_", " "), Text(printable(str(view[name]))))
    if used := view.get("resources"):
        known = (f"{name} {value:g}" for name, value in used.items() if value is not None)
        rows.add_row("used", Text(", ".join(known)))
    for name in ("effect", "flags", "rollouts", "leads_to"):
        if view.get(name):
            rows.add_row(name.replace("_", " "), Text(printable(", ".join(map(str, view[name])))))
    if view.get("passed"):
        rows.add_row("passed", Text(printable(", ".join(str(passed["rollout"]) for passed in view["passed"]))))
    parts: list[RenderableType] = [Text(printable(str(view["id"])), style="bold cyan"), rows]
    parts += _answer(view.get("answer"))
    if view["observations"]:
        parts.append(Text(f"{len(view['observations'])} read-only calls:", style="dim"))
        for observation in view["observations"][:_LINES]:
            parts.append(
                Text(f"  {shortened(describe(observation['call']), _WIDE)}  {observation['hits']} hits", style="dim")
            )
    return Group(*parts)


def _answer(answer: Json | None) -> list[RenderableType]:
    if answer is None:
        return []
    body = answer.get("json")
    texts: list[tuple[str, str]] = []
    if isinstance(body, dict) and "stdout" in body:
        texts = [(name, str(body[name])) for name in ("stdout", "stderr") if body.get(name)]
    elif body is not None:
        texts = [("answer", str(body))]
    elif answer.get("text"):
        texts = [("answer", str(answer["text"]))]
    lines: list[RenderableType] = []
    for name, text in texts:
        listed = text[: _LINES * 1000].splitlines()
        lines.append(Text(f"{name}:", style="dim"))
        lines += [Text(f"  {shortened(line, 4 * _WIDE)}") for line in listed[:_LINES]]
        if len(listed) > _LINES or answer["truncated"]:
            lines.append(Text("  …", style="dim"))
    if not texts:
        lines.append(Text(f"{answer['size_bytes']} bytes of {printable(str(answer['media_type']))}", style="dim"))
    return lines


def render_diff(view: Json) -> RenderableType:
    """Render the difference between two nodes."""
    parts: list[RenderableType] = [Text(printable(f"{view['a']} → {view['b']}"), style="bold")]
    if view["same"]:
        parts.append(Text("the same state"))
    for file in view["files"] or ():
        parts += _file(file)
    for session in view["sessions"] or ():
        parts.append(Text(printable(f"session {session['session']}"), style="bold"))
        changes = [*([session["cwd"]] if session["cwd"] else []), *session["variables"], *session["functions"]]
        for change in changes:
            parts += _changed(change)
    for database in view["databases"] or ():
        parts += _database(database)
    parts += [Text(printable(f"not shown: {text}"), style="dim") for text in view["unshown"]]
    return Group(*parts)


def _file(file: Json) -> Iterable[RenderableType]:
    sign, style = {"added": ("+", "green"), "removed": ("-", "red")}.get(str(file["change"]), ("~", "yellow"))
    sides = [side for side in (file["before"], file["after"]) if side]
    facts = " → ".join(f"{side['kind']} {side['mode']} {side['size_bytes']} B" for side in sides)
    yield Text(printable(f"{sign} {file['path']}"), style=style).append(f"  {facts}", style="dim")
    if file["unshown"]:
        yield Text(f"    {printable(str(file['unshown']))}", style="dim")
    for line in (file["diff"] or "").splitlines()[2 : _LINES + 2]:
        yield Text(
            f"    {shortened(line, 2 * _WIDE)}",
            style="green" if line.startswith("+") else "red" if line.startswith("-") else "dim",
        )


def _changed(change: Json) -> Iterable[RenderableType]:
    for sign, side, style in (("-", "before", "red"), ("+", "after", "green")):
        if change[side] is not None:
            yield Text(f"  {sign} {shortened(str(change[side]), 2 * _WIDE)}", style=style)


def _database(database: Json) -> Iterable[RenderableType]:
    yield Text(printable(f"database {database['database']}"), style="bold")
    for table in database["tables"]:
        rows = f"{table['before_rows']} → {table['after_rows']} rows"
        yield Text(printable(f"  {table['table']}  {rows}  {table['unshown']}"))
        for sign, side, style in (("-", "removed", "red"), ("+", "added", "green")):
            for row in table[side]:
                yield Text(f"    {sign} {shortened(str(row), 2 * _WIDE)}", style=style)


def render_audit(view: Json) -> RenderableType:
    """Render the results of a task's audits."""
    table = Table("sample of", "checked", "differing", "unreachable", "rate", "95 % confidence")
    for bound in view["bounds"]:
        table.add_row(
            str(bound["kind"]), f"{bound['checked']:,}", f"{bound['differing']:,}", f"{bound['unreachable']:,}",
            f"{bound['rate']:.3%}", f"{bound['low']:.3%} and {bound['high']:.3%}",
        )  # fmt: skip
    parts: list[RenderableType] = [table]
    for finding in view["findings"][:_LINES]:
        text = printable(f"{finding['node']}: {finding['why']}: {finding['title']}")
        parts.append(Text(text, style="red").append("  quarantined" if finding["quarantined"] else "", style="dim"))
    masks = [*view["masks"]["masks"], *view["masks"]["patterns"]]
    if masks:
        parts.append(Text(printable(f"comparisons ignore: {', '.join(masks)}"), style="yellow"))
    return Group(*parts)


def render_top(stats: Json, tasks: Sequence[Json], seconds: Sequence[Json]) -> RenderableType:
    """Render the totals, the last minute, and the busiest tasks."""
    head = Table.grid(padding=(0, 3))
    head.add_row(
        f"{stats['calls']:,} calls", f"{stats['hit_rate']:.1%} hits", f"{stats['saved_s']:,.1f} s saved",
        f"{stats['executed_s']:,.1f} s executed", f"{stats['divergences']:,} divergences",
        f"{stats['errors']:,} errors",
    )  # fmt: skip
    states = ", ".join(f"{count} {state}" for state, count in sorted(stats["sandboxes"].items())) or "none"
    snapshots = f"{stats['snapshot_bytes'] / 1e6:,.0f} of {stats['snapshot_budget_bytes'] / 1e6:,.0f} MB of snapshots"
    lines = Table.grid(padding=(0, 2))
    for name in ("hits", "misses", "waits", "replays"):
        values = [float(second[name]) for second in seconds]
        bars = Text(spark(values), style=_STYLES.get(name[:-1], ""))
        lines.add_row(name, bars, f"{values[-1] if values else 0:,.0f}/s")
    busiest = sorted(tasks, key=lambda task: (-int(task["running"]), -int(task["calls"])))[:_TOP_TASKS]
    return Group(head, Text(f"sandboxes: {states}; {snapshots}", style="dim"), lines, Text(), render_tasks(busiest))


def spark(values: Sequence[float]) -> str:
    """Return a line of bars; the largest value has a full bar."""
    top = max(values, default=0.0)
    if top <= 0:
        return _SPARKS[0] * len(values)
    return "".join(_SPARKS[0 if value <= 0 else max(1, round(value / top * (len(_SPARKS) - 1)))] for value in values)
