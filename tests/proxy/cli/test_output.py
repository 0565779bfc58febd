"""How commands print."""

import json

import pytest

from proxy.cli.output import print_json, show
from proxy.cli.rendering.tree import render_tree


def test_json_of_hostile_texts_controls_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """An agent chooses labels and commands: a C1 control begins an escape sequence, a mark turns the line around."""
    view = {"title": "\x9b31m \x85 \x7f \u202e \u2066 \U000e0041 é 😀 \x1b]0;x\x07"}
    print_json(view)
    show(view, str, json=True)
    for printed in capsys.readouterr().out.split("}\n")[:-1]:
        assert printed.replace("\n", "").isprintable()
        assert json.loads(printed + "}") == view
        assert "é 😀" in printed


@pytest.mark.parametrize("columns", [None, "60"])
def test_a_pipe_gets_whole_rows_and_no_blanks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: str | None
) -> None:
    """COLUMNS is a person's wish, and so counts in a pipe too."""
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    call = {"title": "git " * 100}
    nodes = [
        {"id": "n1", "parent": None, "call": None, "children": 1, "effect": []},
        {"id": "n2", "parent": "n1", "call": call, "children": 0, "effect": ["files"]},
    ]
    show({"task": "t", "root": "n1", "nodes": nodes}, render_tree, json=False)
    lines = capsys.readouterr().out.splitlines()
    assert any(call["title"].strip() in line for line in lines) == (columns is None)
    assert max(map(len, lines)) < 500
