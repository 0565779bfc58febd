"""A rollout or a task's tree as one HTML file: every call with its answer, to be sent to others. Pure.

1. The page shows trajectories. Calls with one record are one row in a tree.
2. Commands and answers are an attacker's data. Each text is escaped, and control characters and direction marks are
   shown as escapes. The page has no script, no link and no form. Its policy forbids everything but the one style
   sheet, which is named by its hash, and pictures inside the file.
3. Rows are `details` elements: browsers let a keyboard reach, open and close them. A tree is indented where it
   branches, as `forkpoint tree` does, so a rollout of ten thousand calls is a flat list and no deep nesting.
"""

import json
from base64 import b64encode
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from html import escape
from typing import Any

Json = Mapping[str, Any]

_TITLE_CHARS = 200
_MAX_INDENT = 30
"""Deepest indentation of a row; deeper branches stay there."""
_PICTURES = frozenset({"image/png", "image/jpeg", "image/webp", "image/gif"})
"""Types of answers that are shown as pictures. SVG is not among them: it is a document."""
_INDENTS = "".join(f".d{depth}{{margin-left:{depth * 1.2:.1f}rem}}" for depth in range(_MAX_INDENT + 1))
_STYLE = f"""
:root {{ color-scheme: light dark; }}
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 1200px; margin: 1.5rem auto; padding: 0 1rem; }}
code, pre {{ font: 13px/1.45 ui-monospace, monospace; }}
pre {{ white-space: pre-wrap; overflow-wrap: anywhere; max-height: 40rem; overflow: auto; }}
pre {{ background: #8882; padding: .5rem; }}
summary {{ cursor: pointer; padding: .1rem .3rem; overflow-wrap: anywhere; }}
summary:focus-visible {{ outline: 3px solid #2563eb; }}
details[open] {{ border-left: 3px solid #2563eb; padding-left: .5rem; }}
.m {{ opacity: .75; font-size: 13px; }} .x {{ color: #c2410c; font-weight: 600; }}
.o {{ display: inline-block; min-width: 4.5em; font-size: 13px; }}
dt {{ font-weight: 600; }} dd {{ margin: 0 0 .4rem 0; }} svg {{ vertical-align: middle; }} rect {{ fill: #2563eb; }}
img {{ max-width: 100%; }}
{_INDENTS}
"""


@dataclass(slots=True)
class _PageEntry:
    """A recorded call: what was called, its answer, and how rollouts got it."""

    call: Json
    function: Json
    content: str
    outcomes: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class _Node:
    """A node: the call that first led to it, calls made at it that led to no new node, and what is below."""

    name: str
    entry: _PageEntry | None = None
    others: list[_PageEntry] = field(default_factory=list)
    children: list["_Node"] = field(default_factory=list)
    rollouts: list[str] = field(default_factory=list)


def rollout_page(line: Json) -> Iterator[str]:
    """Yield the parts of a page that shows one rollout, call by call, as `GET …/trajectories` has it."""
    totals, answers = line["totals"], _answers(line)
    yield _head(f"{line['task']}: rollout {line['rollout']}")
    yield _table([
        ("task", line["task"]), ("labels", _labels(line)), ("nodes", f"{line['start']} to {line['node']}"),
        ("calls", f"{totals['calls']:,}, of which {totals['hits'] + totals['waits']:,} ran no tool"),
        ("seconds", _seconds(totals)),
    ])  # fmt: skip
    yield _incomplete(line["complete"])
    whole_s = sum(call["tool_s"] for call in line["calls"]) or 1.0
    began_s = 0.0
    for call in line["calls"]:
        if call["id"] not in answers:
            yield f'<p class="m">Call {call["turn"]} was forgotten or is damaged.</p>'
            continue
        entry = _PageEntry(call, *answers[call["id"]], Counter([call["outcome"]]))
        left, width = 120 * began_s / whole_s, max(1.0, 120 * call["tool_s"] / whole_s)
        bar = (
            '<svg width="120" height="8" aria-hidden="true">'
            f'<rect x="{left:.2f}" width="{width:.2f}" height="8"/></svg> '
        )
        yield _row(entry, 0, f'<span class="o">{escape(call["outcome"])}</span>{bar}', call["node"])
        began_s += call["tool_s"]
    yield _END


def tree_page(task: str, lines: Iterable[Json], *, limit: int) -> Iterator[str]:
    """Yield the parts of a page that shows the trajectories of a task as a tree of `limit` recorded calls at most."""
    tops, rows, shown, complete = _grow(lines, limit)
    yield _head(f"{task}: tree")
    yield _incomplete(complete)
    yield _table(rows) if rows else "<p>No rollout has made a call.</p>"
    if not shown:
        yield f"<p>Only the first {limit:,} recorded calls are shown.</p>"
    pending = [(0, node) for node in reversed(tops)]
    while pending:
        depth, node = pending.pop()
        if node.entry is None:
            yield f'<p class="d{min(depth, _MAX_INDENT)}"><code>{escape(node.name)}</code> start</p>'
        else:
            ended = f' <span class="m">▸ {escape(", ".join(map(_text, node.rollouts)))}</span>' if node.rollouts else ""
            yield _row(node.entry, depth, "", node.name, ended)
        yield from (_row(other, depth + 1, "· ", other.call["node"]) for other in node.others)
        below = depth + (len(node.children) > 1)
        pending += [(below, child) for child in reversed(node.children)]
    yield _END


def _grow(lines: Iterable[Json], limit: int) -> tuple[list[_Node], list[tuple[str, str]], bool, bool]:
    """Return the tops of the tree, a table row for each rollout, and whether all calls are shown and complete."""
    nodes: dict[str, _Node] = {}
    entries: dict[int, _PageEntry] = {}
    tops: list[_Node] = []
    rows: list[tuple[str, str]] = []
    shown = complete = True
    for line in lines:
        answers, complete = _answers(line), complete and line["complete"]
        at = line["start"]
        if at not in nodes:
            tops.append(nodes.setdefault(at, _Node(at)))
        for call in line["calls"]:
            if call["id"] not in answers or (call["record"] not in entries and len(entries) >= limit):
                shown = shown and call["id"] not in answers
                break
            entry = entries.get(call["record"])
            if entry is None:
                entry = entries[call["record"]] = _PageEntry(call, *answers[call["id"]])
                if call["node"] in nodes:
                    nodes[at].others.append(entry)
                else:
                    nodes[call["node"]] = _Node(call["node"], entry)
                    nodes[at].children.append(nodes[call["node"]])
            entry.outcomes[call["outcome"]] += 1
            at = call["node"]
        nodes[at].rollouts.append(line["rollout"])
        rows.append((line["rollout"], f"{_labels(line)}; {_seconds(line['totals'])}; ends at {at}"))
    return tops, rows, shown, complete


def _answers(line: Json) -> dict[str, tuple[Json, str]]:
    functions = {call["id"]: call["function"] for each in line["messages"] for call in each.get("tool_calls") or ()}
    return {
        each["tool_call_id"]: (functions[each["tool_call_id"]], each["content"])
        for each in line["messages"]
        if each["role"] == "tool"
    }


def _row(entry: _PageEntry, depth: int, before: str, node: str, after: str = "") -> str:
    call, code = entry.call, entry.call["exit_code"]
    counts = ", ".join(f"{count} {name}" for name, count in sorted(entry.outcomes.items()))
    facts = f"{node} · {call['tool_s']:.3g} s · {counts}"
    failed = f' <span class="x">exit {int(code)}</span>' if code else ""
    effects = ", ".join(map(str, call["effect"]))
    details = _table([
        ("call", f"{call['endpoint']}/{call['tool']}"), ("effect", effects), ("status", str(call["status"])),
        ("record", str(call["record"])),
    ])  # fmt: skip
    title = escape(_text(_title(entry)))
    return (
        f'<details class="d{min(depth, _MAX_INDENT)}"><summary>{before}<code>{title}</code>{failed} '
        f'<span class="m">{escape(facts)}</span>{after}</summary>{details}{_parts(entry)}</details>\n'
    )


def _parts(entry: _PageEntry) -> str:
    call, content = entry.call, entry.content
    blocks = [("Arguments", _pretty(entry.function["arguments"]))]
    value = _parsed(content) if call["encoding"] == "utf-8" else None
    media = str(call["media_type"]).partition(";")[0].strip().lower()
    picture = ""
    if call["encoding"] == "base64" and media in _PICTURES and not call["truncated"]:
        picture = f'<img alt="the answer" src="data:{media};base64,{escape(content)}">'
    elif call["encoding"] == "base64":
        blocks.append(("Answer", f"{len(content) * 3 // 4:,} bytes that are not text"))
    elif isinstance(value, dict) and isinstance(value.get("stdout"), str):
        blocks += [(name.capitalize(), str(value[name])) for name in ("stdout", "stderr") if value.get(name)]
    else:
        blocks.append(("Answer", _pretty(content)))
    cut = '<p class="m">The text was cut.</p>' if call["truncated"] else ""
    return (
        "".join(f"<h4>{name}</h4><pre>{escape(_text(text, lines=True))}</pre>" for name, text in blocks) + picture + cut
    )


def _title(entry: _PageEntry) -> str:
    arguments = _parsed(entry.function["arguments"])
    value: Json = arguments if isinstance(arguments, dict) else {}
    for name in ("command", "sql"):
        if isinstance(value.get(name), str):
            return str(value[name])[:_TITLE_CHARS]
    if "target" in value:
        return f"{value.get('method', '')} {value['target']} {value.get('body', '')}"[:_TITLE_CHARS]
    return f"{entry.call['endpoint']}/{entry.call['tool']} {entry.function['arguments']}"[:_TITLE_CHARS]


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    # Deep nesting is an attacker's too.
    except (ValueError, RecursionError):
        return None


def _pretty(text: str) -> str:
    try:
        return json.dumps(json.loads(text), indent=1, ensure_ascii=False)
    except (ValueError, RecursionError):
        return text


def _text(text: str, *, lines: bool = False) -> str:
    """Return text without control characters, direction marks and invisible spaces; they become escapes."""
    kept = "\n\t" if lines else ""
    return "".join(
        sign if sign.isprintable() or sign in kept else sign.encode("unicode_escape", "backslashreplace").decode()
        for sign in text
    )


def _labels(line: Json) -> str:
    shown = ((name, f"{value:g}" if isinstance(value, float) else value) for name, value in line["labels"].items())
    return ", ".join(f"{name}={value}" for name, value in shown) or "none"


def _seconds(totals: Json) -> str:
    return ", ".join(f"{totals[f'{name}_s']:,.2f} s {name}" for name in ("executed", "saved", "replayed"))


def _incomplete(is_complete: object) -> str:
    return "" if is_complete else "<p>Some calls were forgotten or are damaged, and are not shown.</p>"


def _table(rows: Sequence[tuple[str, str]]) -> str:
    return "<dl>" + "".join(f"<dt>{escape(_text(a))}</dt><dd>{escape(_text(b))}</dd>" for a, b in rows) + "</dl>"


def _head(title: str) -> str:
    digest = b64encode(sha256(_STYLE.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; form-action 'none'"
    shown = escape(_text(title))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<meta name="viewport" content="width=device-width"><meta name="referrer" content="no-referrer">'
        f"<title>{shown}</title><style>{_STYLE}</style></head><body><main><h1>{shown}</h1>"
        '<p class="m">Tab moves to the next call; Enter opens and closes it.</p>\n'
    )


_END = "</main></body></html>\n"
