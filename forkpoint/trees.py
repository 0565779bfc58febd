"""Trees as notebooks show them. What agents made is escaped. Pure."""

from dataclasses import dataclass
from html import escape

from forkpoint.results import Node

_STYLE = "font-family:ui-monospace,monospace;font-size:12px;line-height:1.5;white-space:pre;overflow-x:auto"
_GREY = "opacity:.6"
_TITLE_CHARS = 120
"""Longest title of a call in a notebook, in characters."""
_MAX_INDENT = 40
"""Deepest indentation in levels; deeper branches are not indented any further."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """The nodes of a tree or of a subtree, parents first. A notebook shows it as an indented list.

    Attributes:
        task: Name of the task.
        root: Name of the tree's root.
        nodes: The nodes.
        truncated: Whether there are more nodes than were requested.
    """

    task: str
    root: str
    nodes: list[Node]
    truncated: bool

    def __getitem__(self, name: str) -> Node:
        """Return a node by its name. Raises KeyError if the tree has no such node, or it was left out."""
        for node in self.nodes:
            if node.id == name:
                return node
        raise KeyError(name)

    def __str__(self) -> str:
        lines = [f"{'  ' * level}{' '.join(part for part in _parts(node) if part)}" for level, node in self._levels()]
        return "\n".join([self.task, *lines, *(["…"] if self.truncated else [])])

    def _repr_html_(self) -> str:
        rows = [f"<div><b>{escape(self.task)}</b></div>"]
        for level, node in self._levels():
            name, title, facts = _parts(node)
            rows.append(
                f'<div style="padding-left:{level * 1.5}em" title="{escape(node.title)}">'
                f'<span style="{_GREY}">{escape(name)}</span> {escape(title)} '
                f'<span style="{_GREY}">{escape(facts)}</span></div>'
            )
        if self.truncated:
            rows.append(f'<div style="{_GREY}">… more nodes than were requested</div>')
        return f'<div style="{_STYLE}">{"".join(rows)}</div>'

    def _levels(self) -> list[tuple[int, Node]]:
        """Return each node with its level: a chain of only children keeps one level."""
        levels: dict[str, int] = {}
        branching = {node.id for node in self.nodes if node.children > 1}
        for node in self.nodes:
            above = levels.get(node.parent or "")
            level = 1 if above is None else above + (node.parent in branching)
            levels[node.id] = min(level, _MAX_INDENT)
        return [(levels[node.id], node) for node in self.nodes]


def _parts(node: Node) -> tuple[str, str, str]:
    """Return the name of a node, its title on one line, and what else is worth a look."""
    title = " ".join(node.title.split())
    title = title if len(title) <= _TITLE_CHARS else f"{title[: _TITLE_CHARS - 1]}…"
    facts = []
    if node.call is not None:
        facts = [f"{node.seconds:.2f} s", f"{node.hits} hit{'' if node.hits == 1 else 's'}"]
        if node.exit_code:
            facts.append(f"exit {node.exit_code}")
    facts += node.flags
    if node.rollouts:
        facts.append("at: " + ", ".join(node.rollouts))
    return node.id, title, " · ".join(facts)
