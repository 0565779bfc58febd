"""A notebook shows a tree, and nothing that an agent wrote becomes markup."""

from typing import Any

from forkpoint.results import Node
from forkpoint.trees import Tree


def node(name: str, parent: str | None, command: str, **more: Any) -> Node:
    call = None if parent is None else {"endpoint": "shell", "tool": "exec", "arguments": {}, "title": command}
    facts: dict[str, Any] = {
        "effect": ["files"], "seconds": 1.5, "hits": 1, "exit_code": 0, "snapshot": False, "rollouts": [],
        "observations": [], "flags": [], "children": 0,
    }  # fmt: skip
    return Node(id=name, parent=parent, call=call, **(facts | more))


def tree(*nodes: Node, truncated: bool = False) -> Tree:
    return Tree(task="<task>", root="n1", nodes=list(nodes), truncated=truncated)


def test_everything_of_agents_is_escaped() -> None:
    attack = "<script>alert('x')</script>\"onload=\"y"
    shown = tree(node("n1", None, ""), node("n2", "n1", attack, rollouts=[attack], flags=[attack]))._repr_html_()
    assert "<script" not in shown
    assert '"onload' not in shown
    assert "&lt;task&gt;" in shown


def test_only_branches_are_indented() -> None:
    """A chain of a thousand calls stays as narrow as its first call."""
    chain = [node(f"n{n}", f"n{n - 1}", f"call {n}", children=1) for n in range(2, 1001)]
    ends = [node("n1001", "n1000", "left"), node("n1002", "n1000", "right", exit_code=2)]
    chain[-1] = node("n1000", "n999", "fork", children=2)
    lines = str(tree(node("n1", None, "", children=1), *chain, *ends, truncated=True)).splitlines()
    assert lines[0] == "<task>"
    assert lines[1] == "  n1 start"
    assert lines[1000] == "  n1000 fork 1.50 s · 1 hit"
    assert lines[1001:] == ["    n1001 left 1.50 s · 1 hit", "    n1002 right 1.50 s · 1 hit · exit 2", "…"]


def test_long_titles_are_cut_to_one_line() -> None:
    line = str(tree(node("n1", None, ""), node("n2", "n1", "a\n" * 200))).splitlines()[2]
    assert "…" in line
    assert len(line) < 160
