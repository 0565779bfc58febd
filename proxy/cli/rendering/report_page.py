"""One or two reports as one HTML file: tables and inline SVG, no scripts, every text escaped. Pure."""

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

Json = Mapping[str, Any]

_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 640, 200, 56, 28
_COLOURS = ("#2563eb", "#d97706")
"""Colours of the first and of the second report; they differ in brightness too."""
_SIGN = 7
"""Width of a character on an axis."""
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2rem auto; padding: 0 1rem; overflow-x: auto; }
table { border-collapse: collapse; margin: 1rem 0; } td, th { padding: .2rem .7rem; text-align: right; }
td:first-child, th:first-child { text-align: left; } tr:nth-child(even) { background: #8881; }
main { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); }
figure { margin: .5rem 1rem .5rem 0; } figcaption { font-weight: 600; } svg { width: 100%; }
svg text { font-size: 11px; fill: currentColor; } :root { color-scheme: light dark; }
"""
_PERCENT = "Hit rate in percent"
"""The figure whose axis ends at 100, whatever its values are."""
_PLOTS: tuple[tuple[str, Callable[[Json], float | None]], ...] = (
    (_PERCENT, lambda row: 100 * row["hit_rate"]),
    ("Tool seconds executed", lambda row: row["executed_s"]),
    ("Tool seconds saved", lambda row: row["saved_s"]),
    ("Mean reward", lambda row: row["reward"]),
)
Column = tuple[str, Callable[[Json], str]]
_COLUMNS: tuple[Column, ...] = (
    ("rollouts", lambda row: f"{row['rollouts']:,}"),
    ("calls", lambda row: f"{row['calls']:,}"),
    ("hit rate", lambda row: f"{row['hit_rate']:.1%}"),
    ("executed s", lambda row: f"{row['executed_s']:,.1f}"),
    ("saved s", lambda row: f"{row['saved_s']:,.1f}"),
    ("replayed s", lambda row: "" if row["replayed_s"] is None else f"{row['replayed_s']:,.1f}"),
    ("p50 s", lambda row: f"{row['p50_s']:.3f} → {row['paid_p50_s']:.3f}"),
    ("p95 s", lambda row: f"{row['p95_s']:.3f} → {row['paid_p95_s']:.3f}"),
    ("reward", lambda row: "" if row["reward"] is None else f"{row['reward']:.3f}"),
    ("spent $", lambda row: f"{row['executed_cost']:,.2f}"),
    ("saved $", lambda row: f"{row['saved_cost']:,.2f}"),
)
"""The columns of a report's table, after the group. The arrow leads from all to what was paid."""
_TOKEN_COLUMNS: tuple[Column, ...] = (
    ("model tokens", lambda row: f"{row['executed_tokens']:,}"),
    ("saved tokens", lambda row: f"{row['saved_tokens']:,}"),
)
"""More columns, of reports with calls to models."""
_RESOURCE_COLUMNS: tuple[Column, ...] = (
    ("CPU s", lambda row: _seconds(row["executed_cpu_s"])),
    ("saved CPU s", lambda row: _seconds(row["saved_cpu_s"])),
    ("peak MB", lambda row: _megabytes(row["peak_bytes"])),
)
"""More columns, of reports with calls whose use of the machine is known."""
_OWNED_COLUMNS: tuple[Column, ...] = (
    ("kept MB", lambda row: _megabytes(row["kept_bytes"])),
    ("of MB", lambda row: _megabytes(row["disk_bytes"])),
)
"""More columns, of reports by owner: the disk that kept states take, and its limit."""
_CALL_COLUMNS: tuple[Column, ...] = (
    ("slowest calls", lambda call: str(call["title"])),
    ("executed s", lambda call: f"{call['executed_s']:,.1f}"),
    ("runs", lambda call: f"{call['executed']:,}"),
    ("hits", lambda call: f"{call['saved']:,}"),
    ("why", lambda call: str(call["reason"])),
    ("task", lambda call: str(call["task"])),
    ("states", lambda call: f"{call['states']:,}" + f" ({call['differing']:,} differ)" * (call["differing"] > 0)),
)
"""The columns of the calls whose executions took longest."""
ARM_COLUMNS: tuple[Column, ...] = (
    ("cache", lambda arm: str(arm["cache"])),
    ("executed calls", lambda arm: f"{arm['executed']:,}"),
    ("tool s", lambda arm: f"{arm['tool_s']:,.1f}"),
    ("hit rate", lambda arm: f"{arm['hit_rate']:.1%}"),
    ("wrong answers", lambda arm: f"{arm['wrong']:,}"),
)
"""The columns of the comparison with other caches."""


def columns_of(report: Json) -> tuple[Column, ...]:
    """Return the columns of a report's table, after the group."""
    total = report["total"]
    tokens = _TOKEN_COLUMNS if total["executed_tokens"] or total["saved_tokens"] else ()
    owned = _OWNED_COLUMNS if any(row["kept_bytes"] is not None for row in report["rows"]) else ()
    return (*_COLUMNS, *tokens, *_resource_columns(report), *owned)


def call_columns_of(report: Json) -> tuple[Column, ...]:
    """Return the columns of a report's calls."""
    return (*_CALL_COLUMNS, *_resource_columns(report))


def _resource_columns(report: Json) -> tuple[Column, ...]:
    is_counted = any(report["total"][name] is not None for name in ("executed_cpu_s", "saved_cpu_s"))
    return _RESOURCE_COLUMNS if is_counted else ()


def notes_of(report: Json) -> list[str]:
    """Return what helps against the misses of a report, and how far it could help."""
    remedies = dict.fromkeys(f"{call['reason']}: {call['remedy']}" for call in report["calls"] if call["remedy"])
    best = next((arm["hit_rate"] for arm in report["arms"] if arm["cache"] == "stateless"), 0.0)
    now = report["total"]["hit_rate"]
    bound = [f"Hit rate {now:.1%}. It would be {best:.1%} if each call ran once for each task, whatever the state."]
    return [*(bound if best > now else []), *remedies]


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:,.2f}"


def _megabytes(value: int | None) -> str:
    return "" if value is None else f"{value / 1e6:,.1f}"


def name_of(row: Json) -> str:
    """Return the name of a group."""
    return "(none)" if row["group"] is None else str(row["group"])


def title_of(report: Json) -> str:
    """Return what a report is about."""
    chosen = [*(f"{name}={value}" for name, value in report["labels"].items())]
    if report["task"] is not None:
        chosen.append(f"task {report['task']}")
    return f"{', '.join(chosen) or 'all rollouts'}, by {report['by']}"


def page(reports: Sequence[Json]) -> str:
    """Return one or two reports as an HTML page."""
    titles = [title_of(report) for report in reports]
    legend = "".join(
        f'<p><span style="color:{colour}">■</span> {escape(title)}</p>'
        for colour, title in zip(_COLOURS, titles, strict=False)
    )
    figures = "".join(_figure(title, value, reports) for title, value in _PLOTS)
    tables = "".join(_tables(report, title) for report, title in zip(reports, titles, strict=True))
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Forkpoint report</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}"><style>{_STYLE}</style></head>'
        f"<body><h1>Forkpoint report</h1>{legend}<main>{figures}</main>{tables}</body></html>\n"
    )


def _tables(report: Json, title: str) -> str:
    rows = [*((name_of(row), row) for row in report["rows"]), ("total", report["total"])]
    left_out = "<p>More groups were left out.</p>" if report["truncated"] else ""
    columns = columns_of(report)
    head = [str(report["by"]), *(name for name, _ in columns)]
    shown = _table(head, [[name, *(cell(row) for _, cell in columns)] for name, row in rows])
    arms = _table([name for name, _ in ARM_COLUMNS], [[cell(arm) for _, cell in ARM_COLUMNS] for arm in report["arms"]])
    columns = call_columns_of(report)
    calls = [[cell(call) for _, cell in columns] for call in report["calls"]]
    slowest = _table([name for name, _ in columns], calls) if calls else ""
    notes = "".join(f"<p>{escape(note)}</p>" for note in notes_of(report))
    return f"<h2>{escape(title)}</h2>{shown}{left_out}{slowest}{notes}{arms}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>"


def _figure(title: str, value: Callable[[Json], float | None], reports: Sequence[Json]) -> str:
    """Return a plot of one figure over the groups, in the order in which they first appear; empty without values."""
    groups = list(dict.fromkeys(name_of(row) for report in reports for row in report["rows"]))
    lines = [{name_of(row): value(row) for row in report["rows"]} for report in reports]
    values = [number for line in lines for number in line.values() if number is not None]
    if not values:
        return ""
    low, high = min(0.0, *values), 100.0 if title == _PERCENT else max(0.0, *values)
    # Only groups that follow one another, such as steps, are joined by a line.
    is_series = len(groups) > 1 and all(name.isdigit() for name in groups)
    bar = min(40.0, 0.8 * (_WIDTH - _LEFT) / max(1, len(groups)) / len(lines))
    span = (high - low) or 1.0
    step = (_WIDTH - _LEFT) / max(1, len(groups))

    def x(position: int) -> float:
        return _LEFT + step * (position + 0.5)

    def y(number: float) -> float:
        return 8 + (_HEIGHT - _BOTTOM - 8) * (1 - (number - low) / span)

    marks = []
    for number, (colour, line) in enumerate(zip(_COLOURS, lines, strict=False)):
        points = [(x(n), y(v)) for n, name in enumerate(groups) if (v := line.get(name)) is not None]
        if is_series:
            path = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
            marks.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
            marks += [f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3" fill="{colour}"/>' for px, py in points]
            continue
        left = bar * (number - len(lines) / 2)
        marks += [
            f'<rect x="{px + left:.1f}" y="{min(py, y(0)):.1f}" width="{bar:.1f}" height="{abs(y(0) - py):.1f}" '
            f'fill="{colour}"/>'
            for px, py in points
        ]
    widest = _SIGN * (1 + max(len(_short(name)) for name in groups))
    every = math.ceil(widest / step)
    ticks = "".join(
        f'<text x="{x(n):.1f}" y="{_HEIGHT - 10}" text-anchor="middle">{escape(_short(name))}</text>'
        for n, name in enumerate(groups)
        if n % every == 0
    )
    scale = "".join(
        f'<text x="{_LEFT - 6}" y="{y(number) + 4:.1f}" text-anchor="end">{number:,.4g}</text>'
        f'<line x1="{_LEFT}" x2="{_WIDTH}" y1="{y(number):.1f}" y2="{y(number):.1f}" stroke="#8886"/>'
        for number in (low, low + span / 2, low + span)
    )
    return (
        f'<figure><figcaption>{escape(title)}</figcaption><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'role="img" aria-label="{escape(title)}">{scale}{ticks}{"".join(marks)}</svg></figure>'
    )


def _short(name: str) -> str:
    return name if len(name) <= 12 else f"{name[:11]}…"
