"""A policy of two layers in NumPy, and one step of GRPO for it.

The policy sees its task, the turn, its last move and what the last move returned. So a tool that answers differently
changes what it does next.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

import numpy as np

HIDDEN, BUCKETS = 64, 16
CLIP, KL_WEIGHT, RATE, PASSES = 0.2, 0.01, 0.02, 3
Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


@dataclass(frozen=True)
class Turn:
    """A move of a rollout. advantage: how much better its rollout was than its group."""

    seen: Array
    move: int
    probability: float
    advantage: float = 0.0


class Policy:
    """The policy, its optimizer (Adam), and the policy that it began as."""

    def __init__(self, tasks: int, turns: int, moves: int, seed: int) -> None:
        self._tasks, self._turns, self.moves = tasks, turns, moves
        generator = np.random.default_rng(seed)
        width = tasks * turns + tasks * (moves + 1) + BUCKETS
        self._weights = [
            generator.normal(0, 0.5 / np.sqrt(width), (width, HIDDEN)),
            generator.normal(0, 0.5 / np.sqrt(HIDDEN), (HIDDEN, moves)),
        ]
        self._first = [weights.copy() for weights in self._weights]
        self._moments = [(np.zeros_like(weights), np.zeros_like(weights)) for weights in self._weights]
        self._updates = 0

    def look(self, task: int, turn: int, last: int | None, output: str) -> Array:
        """Return what the policy sees: ones and zeros."""
        seen = np.zeros(self._weights[0].shape[0])
        seen[task * self._turns + turn] = 1
        base = self._tasks * self._turns + task * (self.moves + 1)
        seen[base + (self.moves if last is None else last)] = 1
        seen[-1 - sha256(output.encode()).digest()[0] % BUCKETS] = 1
        return seen

    def probabilities(self, seen: Array, *, first: bool = False) -> Array:
        """Return the probabilities of the moves. first: by the policy that this one began as."""
        weights = self._first if first else self._weights
        logits = np.tanh(seen @ weights[0]) @ weights[1]
        powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
        return np.asarray(powers / powers.sum(axis=-1, keepdims=True))

    def kl(self, turns: Sequence[Turn]) -> float:
        """Return the mean divergence from the first policy over the states of turns, in nats."""
        seen = np.stack([turn.seen for turn in turns])
        now, then = self.probabilities(seen), self.probabilities(seen, first=True)
        return float((now * np.log(now / then)).sum(axis=1).mean())

    def learn(self, turns: Sequence[Turn]) -> None:
        """Take GRPO's steps on the turns of several groups: the clipped objective, minus the weighted divergence."""
        seen = np.stack([turn.seen for turn in turns])
        moves = np.array([turn.move for turn in turns])
        before = np.array([turn.probability for turn in turns])
        advantages = np.array([turn.advantage for turn in turns])
        then, rows = self.probabilities(seen, first=True), np.arange(len(turns))
        for _ in range(PASSES):
            now = self.probabilities(seen)
            ratio = now[rows, moves] / before
            # The clipped objective is flat where the ratio has left its bounds in the direction of the advantage.
            flat = ((advantages > 0) & (ratio > 1 + CLIP)) | ((advantages < 0) & (ratio < 1 - CLIP))
            slope = -now * (np.where(flat, 0, advantages) * ratio)[:, None]
            slope[rows, moves] += np.where(flat, 0, advantages) * ratio
            logs = np.log(now / then)
            slope -= KL_WEIGHT * now * (logs - (now * logs).sum(axis=1, keepdims=True))
            self._step(seen, slope / len(turns))

    def _step(self, seen: Array, slope: Array) -> None:
        hidden = np.tanh(seen @ self._weights[0])
        gradients = [seen.T @ ((slope @ self._weights[1].T) * (1 - hidden**2)), hidden.T @ slope]
        self._updates += 1
        for weights, gradient, (mean, square) in zip(self._weights, gradients, self._moments, strict=True):
            np.add(mean, 0.1 * (gradient - mean), out=mean)
            np.add(square, 0.001 * (gradient**2 - square), out=square)
            corrected = square / (1 - 0.999**self._updates)
            step = RATE * (mean / (1 - 0.9**self._updates)) / (np.sqrt(corrected) + 1e-8)
            np.add(weights, step, out=weights)
