"""Results as notebooks show them, as data frames, and the notebook of examples/."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from examples.make_notebook import CELLS, NOTEBOOK, made
from forkpoint import to_dataframe
from forkpoint.results import Diff, Report, ReportRow, RolloutInfo
from tests.agents.clients import packages
from tests.forkpoint.test_trees import node
from tests.machine import require_sandboxes

ATTACK = "<script>alert('x')</script>\"onload=\"y"


def row(group: str) -> ReportRow:
    texts = {"group": group}
    return ReportRow(**{name: texts.get(name, 0) for name in ReportRow.__dataclass_fields__})  # type: ignore[arg-type]


def rollout(**more: Any) -> RolloutInfo:
    known = dict.fromkeys(RolloutInfo.__dataclass_fields__, "")
    return RolloutInfo(**{**known, "labels": {}, "steps": [], "marks": {}, **more})


def test_what_agents_wrote_is_escaped_and_cut() -> None:
    long = "x" * 100_000
    shown = [
        Report(
            total=row("a"), rows=[row(ATTACK)] * 1000, arms=[], truncated=False, calls=[{"title": ATTACK, ATTACK: 1}]
        ),
        Diff(files=[{"path": ATTACK, "diff": ATTACK + long}], raw={}),
        node("n2", "n1", ATTACK + long, observations=[{"call": {"title": ATTACK}}] * 1000, rollouts=[ATTACK] * 10_000),
        rollout(rollout=ATTACK, labels={"run": ATTACK}),
    ]
    for each in shown:
        html = each._repr_html_()
        assert "&lt;script" in html
        assert "<script" not in html
        assert '"onload' not in html
        assert len(html) < 100_000
    assert "… 950 more" in shown[0]._repr_html_()


def test_a_rollouts_token_is_not_shown() -> None:
    begun = rollout(token="fp_secret")  # noqa: S106 - no real one
    assert "fp_secret" not in begun._repr_html_()
    assert "fp_secret" not in str(to_dataframe([begun]).to_dict())


def test_labels_are_columns_with_their_types() -> None:
    frame = to_dataframe([rollout(labels={"step": 3, "reward": 0.5}), rollout(labels={"step": 4, "run": "r1"})])
    assert frame["label_step"].tolist() == [3, 4]
    assert frame["label_reward"].tolist()[0] == 0.5
    assert to_dataframe(Report(total=row("t"), rows=[row("a")], arms=[], truncated=False))["group"].tolist() == ["a"]


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forkpoint.notebook.find_spec", lambda _: None)
    with pytest.raises(ImportError, match="pandas or polars"):
        to_dataframe([])


def test_the_notebook_is_what_its_cells_give() -> None:
    """Times and temporary names differ, so that what is compared is which cells show what."""
    require_sandboxes()

    def shape(notebook: Any) -> list[Any]:
        return [
            ("".join(cell["source"]), [sorted(output.get("data", {"stream": 0})) for output in cell.get("outputs", ())])
            for cell in notebook["cells"]
        ]

    again = made()
    assert shape(again) == shape(json.loads(NOTEBOOK.read_text()))
    assert [text for text, _ in shape(again)] == [cell.strip() for cell in CELLS]
    frame = next(cell for cell in again["cells"] if 'by="step"))[[' in "".join(cell["source"]))
    # The second step's calls were all hits.
    assert " 1.00" in "".join(frame["outputs"][0]["data"]["text/plain"])


POLARS = """
import json, sys
from forkpoint import to_dataframe
from forkpoint.results import RolloutInfo

known = dict.fromkeys(RolloutInfo.__dataclass_fields__, "")
labels = ({"step": 3, "reward": 0.5}, {"step": 4, "run": "r1"})
frame = to_dataframe([RolloutInfo(**{**known, "steps": [], "marks": {}, "labels": each}) for each in labels], "polars")
chosen = frame.select("label_step", "label_reward", "label_run")
print(json.dumps([str(type(frame)), chosen.to_dicts(), [str(kind) for kind in chosen.dtypes]]))
"""


def test_polars_has_a_column_for_each_label() -> None:
    """In a process of its own, with Polars beside this environment. A label that begins late has its type too."""
    path = f"{Path(__file__).parents[2]}:{packages('polars==2.1.0', python=sys.executable)}"
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", POLARS], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    kind, rows, types = json.loads(done.stdout)
    assert "polars" in kind
    assert rows == [
        {"label_step": 3, "label_reward": 0.5, "label_run": None},
        {"label_step": 4, "label_reward": None, "label_run": "r1"},
    ]
    assert types == ["Int64", "Float64", "String"]
