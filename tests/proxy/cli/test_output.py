"""How commands print."""

import json

import pytest

from proxy.cli.output import print_json, show


def test_json_of_hostile_texts_controls_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """An agent chooses labels and commands: a C1 control begins an escape sequence, a mark turns the line around."""
    view = {"title": "\x9b31m \x85 \x7f \u202e \u2066 \U000e0041 é 😀 \x1b]0;x\x07"}
    print_json(view)
    show(view, str, json=True)
    for printed in capsys.readouterr().out.split("}\n")[:-1]:
        assert printed.replace("\n", "").isprintable()
        assert json.loads(printed + "}") == view
        assert "é 😀" in printed
