"""The benchmark of training: a transformer whose gradients are right, GRPO that learns, and arms that are equal."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench import training
from bench.paired import interval, p_value
from bench.policy import Policy, Text
from bench.training import compared, run
from bench.training_tasks import steady
from bench.transformer import LAYERS, Transformer


def test_gradients_are_those_of_the_outputs() -> None:
    """Each weight's largest gradient is compared with the change of the objective when the weight changes a little."""
    generator = np.random.default_rng(1)
    model = Transformer(vocabulary=11, context=7, seed=2)
    tokens = generator.integers(0, 11, (3, 6))
    direction = generator.normal(size=(3, 6, 11))
    gradients = model.gradients(tokens, lambda _: direction)
    assert len(gradients) == len(model.weights) == 3 + 4 * LAYERS
    for name, gradient in gradients.items():
        place = np.unravel_index(np.abs(gradient).argmax(), gradient.shape)
        values = []
        for change in (1e-5, -1e-5):
            model.weights[name][place] += change
            values.append((model.logits(tokens) * direction).sum())
            model.weights[name][place] -= change
        assert gradient[place] == pytest.approx((values[0] - values[1]) / 2e-5, rel=1e-5), name


def test_a_token_does_not_see_later_ones() -> None:
    model = Transformer(vocabulary=5, context=4, seed=0)
    one, other = model.logits(np.array([[1, 2, 3, 4], [1, 2, 0, 0]]))
    assert one[:2] == pytest.approx(other[:2])
    assert one[2] != pytest.approx(other[2])


def test_policy_prefers_what_was_rewarded() -> None:
    policy, generator = Policy([[["a", "b"], ["c", "d", "e"]]], turns=2, seed=0), np.random.default_rng(0)

    def text() -> tuple[Text, float]:
        made, reward = Text([0]), 0.0
        for _ in range(2):
            reward += policy.write(0, made, generator) == [1, 2]
            made.tokens += policy.tokenizer.read("an output")
        return made, reward

    before = policy.digest()
    for _ in range(20):
        group = [text() for _ in range(8)]
        mean = np.mean([reward for _, reward in group])
        for made, reward in group:
            made.advantage = float(reward - mean)
        policy.learn([made for made, _ in group])
    assert np.mean([reward for _, reward in (text() for _ in range(20))]) > 1.5
    assert policy.kl([text()[0]]) > 0
    assert policy.digest() != before


def test_policy_reads_what_tools_print() -> None:
    """An output that is longer than what is read still changes a token."""
    tokenizer = Policy([[["a"]]], turns=1, seed=0).tokenizer
    assert tokenizer.read("1 2 3 4 5 6") == tokenizer.read("1 2 3 4 5 6")
    assert tokenizer.read("1 2 3 4 5 6") != tokenizer.read("1 2 3 4 5 7")


def test_both_arms_learn_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One epoch of three rollouts of the SQL task, with a thousandth of its work, behind real proxies."""
    monkeypatch.setattr(training, "GROUP", 3)
    (slow,) = (each for each in steady(tmp_path / "clip.mp4", tmp_path / "shop.sqlite") if each.kind == "sql")
    slots = [[word.replace("250000", "250") for word in words] for words in slow.slots]
    task = replace(slow, slots=slots, grade=str(slow.grade).replace("250000", "250"))
    cached, uncached = (run(arm, [task], 3, 1, tmp_path / arm) for arm in ("cached", "uncached"))
    same = compared(cached, uncached)
    assert same["equal_outputs"] == same["outputs"] == 15
    assert same["equal_rewards"]
    assert same["equal_kl"]
    assert same["equal_weights"]
    assert cached.epochs[0]["hit_rate"] > 0 == uncached.epochs[0]["hit_rate"]


def test_paired_test_is_exact() -> None:
    """Of the 16 choices of signs of (1, 2, 3, 4), only all plus and all minus are as far from zero."""
    assert p_value([1, 2, 3, 4]) == 2 / 16
    assert p_value([1, -2, 3, -4]) == 14 / 16
    assert p_value([0.0] * 6) == 1
    with pytest.raises(ValueError, match="21 pairs"):
        p_value([1.0] * 21)


def test_interval_has_what_the_test_does_not_reject() -> None:
    values = [0.1, 0.3, 0.2, 0.5, 0.25, 0.35, 0.15, 0.4]
    low, high = interval(values)
    assert 0.1 < low < np.mean(values) < high < 0.5
    assert p_value([value - low + 1e-6 for value in values]) <= 0.05
    assert p_value([value - low - 1e-6 for value in values]) > 0.05
    assert interval([1.0, 2.0]) == (-np.inf, np.inf)
