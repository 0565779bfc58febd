"""docs/results.md and its plots are what the committed measurements say. `python -m bench.results` writes them."""

import json

import numpy as np
import pytest

from bench.policy import Policy, Turn
from bench.results import DOCS, PAGE, written


def test_page_shows_the_measurements() -> None:
    for path, text in written(PAGE.read_text()).items():
        assert path.read_text() == text, f"{path} is not what `python -m bench.results` writes"


def test_measured_arms_are_equal() -> None:
    """All tools of the benchmark are deterministic, so the cache may change no output, reward or divergence."""
    result = json.loads((DOCS / "results" / "training.json").read_text())
    for run in result["runs"]:
        assert run["equal_outputs"] == run["outputs"] > 0
        assert run["equal_rewards"]
        assert run["equal_kl"]


def test_policy_prefers_what_was_rewarded() -> None:
    policy = Policy(tasks=1, turns=1, moves=4, seed=0)
    seen = policy.look(0, 0, None, "")
    before = policy.probabilities(seen)
    turns = [Turn(seen, move, float(before[move]), 1.0 if move == 2 else -1.0) for move in range(4)]
    for _ in range(20):
        policy.learn(turns)
    after = policy.probabilities(seen)
    assert np.argmax(after) == 2
    assert after.sum() == pytest.approx(1)
    assert policy.kl(turns) > 0
