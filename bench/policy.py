"""A policy that writes calls word by word: a transformer with a toy tokenizer, and one step of GRPO for it.

The policy reads its task, its calls and the beginnings of their outputs, as one text. So a tool that answers
differently changes what it does next.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256

import numpy as np

from bench.transformer import Adam, Array, Tokens, Transformer, softmax

CLIP, KL_WEIGHT, RATE, PASSES = 0.2, 0.01, 0.005, 4
OUTPUT_WORDS, BUCKETS = 5, 64
"""Words of an output that the policy reads, and different tokens of such words; a last token stands for the whole."""
Slots = Sequence[Sequence[str]]
"""What a call of a task is written with: its first word is one of the first sequence, and so on."""


class Tokenizer:
    """Numbers for words: one for each task, one for each word of each slot, and `BUCKETS` for words of outputs.

    Attributes:
        size: Number of tokens.
    """

    def __init__(self, tasks: Sequence[Slots]) -> None:
        self._slots: list[list[range]] = []
        self.size = len(tasks) + BUCKETS
        for slots in tasks:
            self._slots.append([])
            for words in slots:
                self._slots[-1].append(range(self.size, self.size + len(words)))
                self.size += len(words)

    def slots(self, task: int) -> Sequence[range]:
        """Return the tokens of each slot of a task, in the order of their words."""
        return self._slots[task]

    def read(self, output: str) -> list[int]:
        """Return the tokens of an output: those of its first words, and one of the whole."""
        words = [*output.split(maxsplit=OUTPUT_WORDS)[:OUTPUT_WORDS], output]
        return [len(self._slots) + sha256(word.encode()).digest()[0] % BUCKETS for word in words]


@dataclass(frozen=True)
class Choice:
    """A word that the policy chose. at: its position in the text. among: the tokens that it chose from."""

    at: int
    among: range
    probability: float


@dataclass
class Text:
    """A rollout as the policy reads it. advantage: how much better its rollout was than its group."""

    tokens: list[int]
    choices: list[Choice] = field(default_factory=list)
    advantage: float = 0.0


class Policy:
    """The policy, its optimizer, and the policy that it began as.

    Args:
        tasks: The slots of each task.
        turns: Calls of a rollout.
        seed: The seed of the weights.
    """

    def __init__(self, tasks: Sequence[Slots], turns: int, seed: int) -> None:
        self.tokenizer = Tokenizer(tasks)
        context = 1 + turns * (max(map(len, tasks)) + OUTPUT_WORDS + 1)
        self._model = Transformer(self.tokenizer.size, context, seed)
        self._first = Transformer(self.tokenizer.size, context, seed)
        self._adam = Adam(RATE)

    def write(self, task: int, text: Text, generator: np.random.Generator) -> list[int]:
        """Write a call at the end of a text, and return the numbers of its words in their slots."""
        written = []
        for among in self.tokenizer.slots(task):
            logits = self._model.logits(np.array([text.tokens]))[0, -1, among.start : among.stop]
            chances = softmax(logits)
            word = int(generator.choice(len(among), p=chances))
            text.choices.append(Choice(len(text.tokens), among, float(chances[word])))
            text.tokens.append(among[word])
            written.append(word)
        return written

    def kl(self, texts: Sequence[Text]) -> float:
        """Return the mean divergence of a word from the first policy, over the choices of texts, in nats."""
        batch = _Batch(texts, self.tokenizer.size)
        now, then = batch.chances(self._model.logits(batch.tokens)), batch.chances(self._first.logits(batch.tokens))
        return float((now * batch.logs(now, then)).sum(axis=1).mean())

    def learn(self, texts: Sequence[Text]) -> None:
        """Take GRPO's steps on the texts of several groups: the clipped objective, minus the weighted divergence."""
        batch = _Batch(texts, self.tokenizer.size)
        then = batch.chances(self._first.logits(batch.tokens))
        for _ in range(PASSES):
            gradients = self._model.gradients(batch.tokens, lambda logits: batch.slope(logits, then))
            self._adam.climb(self._model.weights, gradients)

    def digest(self) -> str:
        """Return a digest of all weights: policies with equal digests are the same."""
        weights = self._model.weights
        return sha256(b"".join(weights[name].tobytes() for name in sorted(weights))).hexdigest()


class _Batch:
    """The choices of texts as arrays, one row for each choice."""

    def __init__(self, texts: Sequence[Text], vocabulary: int) -> None:
        self.tokens: Tokens = np.zeros((len(texts), max(len(text.tokens) for text in texts)), dtype=np.int64)
        for row, text in enumerate(texts):
            self.tokens[row, : len(text.tokens)] = text.tokens
        choices = [(row, choice) for row, text in enumerate(texts) for choice in text.choices]
        self._rows = np.array([row for row, _ in choices])
        self._at = np.array([choice.at for _, choice in choices])
        self._written = self.tokens[self._rows, self._at]
        self._before = np.array([choice.probability for _, choice in choices])
        self._advantages = np.array([texts[row].advantage for row, _ in choices])
        self._allowed = np.zeros((len(choices), vocabulary), dtype=bool)
        for number, (_, choice) in enumerate(choices):
            self._allowed[number, choice.among.start : choice.among.stop] = True

    def chances(self, logits: Array) -> Array:
        """Return the probabilities of each choice's tokens."""
        return softmax(np.where(self._allowed, logits[self._rows, self._at - 1], -np.inf))

    def logs(self, now: Array, then: Array) -> Array:
        """Return the logarithms of the ratios of probabilities; 0 for tokens that could not be chosen."""
        return np.log(np.where(self._allowed, now, 1) / np.where(self._allowed, then, 1))

    def slope(self, logits: Array, then: Array) -> Array:
        """Return the gradient of GRPO's objective by the logits; then: probabilities of the first policy."""
        now, rows = self.chances(logits), np.arange(len(self._rows))
        ratio = now[rows, self._written] / self._before
        # The clipped objective is flat where the ratio has left its bounds in the direction of the advantage.
        up, down = self._advantages > 0, self._advantages < 0
        gain = np.where((up & (ratio > 1 + CLIP)) | (down & (ratio < 1 - CLIP)), 0, self._advantages * ratio)
        slope = -now * gain[:, None]
        slope[rows, self._written] += gain
        logs = self.logs(now, then)
        slope -= KL_WEIGHT * now * (logs - (now * logs).sum(axis=1, keepdims=True))
        found = np.zeros_like(logits)
        found[self._rows, self._at - 1] = slope / len(rows)
        return found
