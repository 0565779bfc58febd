"""Renders a task's tree for the terminal, with rich. Only branches are indented, not long trajectories. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from proxy.cli.text import printable

OBSERVATIONS_SHOWN = 3
"""Read-only calls that are listed for each node."""
ROLLOUTS_SHOWN = 3
"""Rollouts that are named at each node."""
NAMES_BESIDE = 24
"""Characters of rollouts' names up to which they stand in the line of their node; longer ones get a line."""
CALL_WIDTH = 16
"""Characters of a call that are left however much stands beside it."""
TREES_SHOWN = 10
"""Other trees of the task that are listed."""
SNAPSHOT = "◆"
ROLLOUT = "▸"
LEGEND = f"{SNAPSHOT} snapshot   {ROLLOUT} rollouts at this node   · read-only calls"

NodeView = Mapping[str, Any]


def render_tree(view: Mapping[str, Any], trees: Sequence[Mapping[str, Any]] = ()) -> RenderableType:
    """Render the response of `…/tree`, of any depth, without recursion; list those of `…/trees` that are not shown."""
    nodes: Sequence[NodeView] = view["nodes"]
    children: dict[Any, list[NodeView]] = {}
    for node in nodes:
        children.setdefault(node.get("parent"), []).append(node)
    known = {node["id"] for node in nodes}
    tops = [node for node in nodes if node.get("parent") not in known]
    rendered = Tree(Text(printable(str(view["task"])), style="bold"), guide_style="dim")
    pending = [(rendered, node) for node in reversed(tops)]
    while pending:
        branch, node = pending.pop()
        steps, forks = _follow(node, children)
        hidden = int(steps[-1].get("children", 0)) - len(forks)
        below = branch.add(_steps(steps, hidden))
        pending.extend((below, fork) for fork in reversed(forks))
    notes = [Text(LEGEND, style="dim")]
    if view.get("truncated"):
        notes.append(Text("The tree is too large to show at once: choose a subtree with --node, or a smaller --depth."))
    notes += [Text(note) for tree in trees if tree["root"] == view["root"] if (note := _sharers(tree))]
    return Group(rendered, *notes, *_others([tree for tree in trees if tree["root"] != view["root"]]))


def _sharers(tree: Mapping[str, Any]) -> str:
    names = [printable(name) for name in tree["shared_with"]]
    more = f" and {len(names) - TREES_SHOWN} more" if len(names) > TREES_SHOWN else ""
    shown = ", ".join(names[:TREES_SHOWN])
    return f"Shared with {shown}{more}: --own shows what this task did." if names else ""


def _others(trees: Sequence[Mapping[str, Any]]) -> Iterable[RenderableType]:
    if trees:
        yield Text("Other trees of this task, for other environments:")
    for tree in trees[:TREES_SHOWN]:
        counts = f"{tree['nodes']:,} nodes, {tree['calls']:,} calls, {tree['rollouts']:,} rollouts"
        now = " (current)" if tree["current"] else ""
        yield Text(printable(f"  --root {tree['root']}  {tree['title']}{now}")).append(f"  {counts}", style="dim")
    if len(trees) > TREES_SHOWN:
        yield Text("  … and more: GET …/trees lists all", style="dim")


def _follow(node: NodeView, children: Mapping[Any, Sequence[NodeView]]) -> tuple[list[NodeView], Sequence[NodeView]]:
    """Return the chain of only children that begins at a node, and the children of its last node."""
    steps = [node]
    while len(below := children.get(steps[-1]["id"], ())) == 1 and int(steps[-1].get("children", 1)) <= 1:
        steps.append(below[0])
    return steps, below


def _steps(steps: Iterable[NodeView], hidden: int) -> RenderableType:
    # The command gets the width that the marks leave. It is cut there and never wrapped. Names are never cut.
    grid = Table.grid(padding=(0, 1), expand=True)
    grid.add_column(no_wrap=True, style="cyan")
    grid.add_column(no_wrap=True, overflow="ellipsis", ratio=1, min_width=CALL_WIDTH)
    grid.add_column(no_wrap=True, justify="right")
    last = None
    for last in steps:
        names = _rollouts(last)
        beside = len(names) <= NAMES_BESIDE
        grid.add_row(printable(str(last["id"])), _title(last), _marks(last, names if beside else ""))
        if not beside:
            grid.add_row("", Text(f"{ROLLOUT} {names}", style="blue", overflow="fold", no_wrap=False), "")
        for row in _observations(last.get("observations", ())):
            grid.add_row("", *row)
    if hidden > 0 and last is not None:
        more = f"… {hidden} more below: --node {printable(str(last['id']))}"
        grid.add_row("", Text(more, style="dim"), "")
    return grid


def _title(node: NodeView) -> Text:
    if node.get("call") is None:
        return Text("start", style="bold")
    return Text(describe(node["call"]), style="bold")


def describe(call: Mapping[str, Any]) -> str:
    """Return a call in one printable line."""
    return printable(str(call.get("title", "")))


def _rollouts(node: NodeView) -> str:
    names = [printable(str(name)) for name in node.get("rollouts", ())]
    others = len(names) - ROLLOUTS_SHOWN
    return ", ".join(names[:ROLLOUTS_SHOWN]) + (f" and {others} more" if others > 0 else "")


def _marks(node: NodeView, names: str) -> Text:
    marks = Text()
    if node.get("call") is not None:
        marks.append(" ".join(printable(str(effect)) for effect in node.get("effect", ())) + "  ", style="yellow")
        marks.append(_cost(node))
    exit_code = node.get("exit_code")
    if exit_code:
        marks.append(f"  exit {exit_code}", style="red")
    if node.get("snapshot"):
        marks.append(f"  {SNAPSHOT}", style="green")
    for flag in node.get("flags", ()):
        marks.append(f"  {printable(str(flag))}", style="magenta")
    if names:
        marks.append(f"  {ROLLOUT} {names}", style="blue")
    return marks


def _observations(observations: Sequence[Mapping[str, Any]]) -> Iterable[tuple[Text, Text]]:
    """Yield a row for each read-only call with most hits, and one with the number of the others."""
    ranked = sorted(observations, key=lambda observation: -int(observation.get("hits", 0)))
    for observation in ranked[:OBSERVATIONS_SHOWN]:
        yield Text(f"· {describe(observation['call'])}", style="dim"), Text(_cost(observation), style="dim")
    if len(ranked) > OBSERVATIONS_SHOWN:
        yield Text(f"· {len(ranked) - OBSERVATIONS_SHOWN} more read-only calls", style="dim"), Text()


def _cost(record: Mapping[str, Any]) -> str:
    hits = int(record.get("hits", 0))
    return f"{float(record.get('seconds') or 0):.2f} s  {hits} {'hit' if hits == 1 else 'hits'}"
