"""docs/comparison.md and its plots are what the committed measurements say. `python -m bench.results` writes them."""

import json

from bench.results import DOCS, PAGE, written


def test_page_shows_the_measurements() -> None:
    for path, text in written(PAGE.read_text()).items():
        assert path.read_text() == text, f"{path} is not what `python -m bench.results` writes"


def test_measured_arms_are_equal() -> None:
    """Where all tools are deterministic, the cache may change no output, reward, divergence or weight."""
    result = json.loads((DOCS / "results" / "training.json").read_text())
    assert len(result["runs"]) >= 5
    for run in result["runs"]:
        assert run["equal_outputs"] == run["outputs"] > 0
        assert run["equal_rewards"]
        assert run["equal_kl"]
        assert run["equal_weights"]
