"""A small causal transformer in NumPy, with gradients of its own, and the optimizer Adam.

Each layer adds the output of attention to its input, and then the output of a perceptron. Both read a normalized input.
Each function returns its output with a function that turns the gradient of the output into gradients of its
arguments. `Transformer.gradients` calls those in reverse order.

All numbers are float64 and no operation draws random numbers. Equal weights and tokens give equal results.
"""

from collections.abc import Callable

import numpy as np

WIDTH, HEADS, LAYERS = 32, 2, 2
"""Numbers of a token's vector, attention heads and layers. The layers have 24,576 weights, and a word takes 0.2 ms."""
Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
Tokens = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
Gradients = dict[str, Array]


class Transformer:
    """A transformer with random weights.

    Args:
        vocabulary: Number of tokens.
        context: Most tokens of a text.
        seed: The seed of the weights.

    Attributes:
        weights: The weights by name.
    """

    def __init__(self, vocabulary: int, context: int, seed: int) -> None:
        generator = np.random.default_rng(seed)
        shapes = {"tokens": (vocabulary, WIDTH), "positions": (context, WIDTH), "logits": (WIDTH, vocabulary)}
        for layer in range(LAYERS):
            shapes |= {f"{layer}.attend": (WIDTH, 3 * WIDTH), f"{layer}.attended": (WIDTH, WIDTH)}
            shapes |= {f"{layer}.widen": (WIDTH, 4 * WIDTH), f"{layer}.narrow": (4 * WIDTH, WIDTH)}
        # As GPT-2: every weight is small, so the first policy is nearly uniform.
        self.weights = {name: generator.normal(0, 0.1, shape) for name, shape in shapes.items()}

    def logits(self, tokens: Tokens) -> Array:
        """Return the logits of the next token after each token; tokens: texts of equal length, one in each row."""
        return self._run(tokens)[0]

    def gradients(self, tokens: Tokens, slope: Callable[[Array], Array]) -> Gradients:
        """Return the gradients of an objective by the weights; slope: returns those by the logits."""
        logits, backward = self._run(tokens)
        return backward(slope(logits))

    def _run(self, tokens: Tokens) -> tuple[Array, Callable[[Array], Gradients]]:
        length = tokens.shape[1]
        state = self.weights["tokens"][tokens] + self.weights["positions"][:length]
        steps = []
        for layer in range(LAYERS):
            for part in (self._attention, self._perceptron):
                change, step = part(layer, state)
                state = state + change
                steps.append(step)
        normal, from_normal = _normalized(state)
        logits, from_logits = _product(normal, self.weights["logits"])

        def backward(slope: Array) -> Gradients:
            slope, last = from_logits(slope)
            slope, found = from_normal(slope), {"logits": last}
            for step in reversed(steps):
                more, gradients = step(slope)
                slope, found = slope + more, found | gradients
            found |= {name: np.zeros_like(self.weights[name]) for name in ("tokens", "positions")}
            found["positions"][:length] = slope.sum(axis=0)
            np.add.at(found["tokens"], tokens, slope)
            return found

        return logits, backward

    def _attention(self, layer: int, state: Array) -> tuple[Array, Callable[[Array], tuple[Array, Gradients]]]:
        """Return what each token takes from the tokens before it and from itself."""
        names = f"{layer}.attend", f"{layer}.attended"
        normal, from_normal = _normalized(state)
        mixed, from_mixed = _product(normal, self.weights[names[0]])
        rows, length, _ = mixed.shape
        # Queries, keys and values: [row, head, token, number].
        query, key, value = mixed.reshape(rows, length, 3, HEADS, -1).transpose(2, 0, 3, 1, 4)
        scale = (WIDTH / HEADS) ** -0.5
        scores = np.where(np.tri(length, dtype=bool), query @ key.swapaxes(-1, -2) * scale, -np.inf)
        shares = softmax(scores)
        heads = (shares @ value).transpose(0, 2, 1, 3).reshape(rows, length, WIDTH)
        output, from_output = _product(heads, self.weights[names[1]])

        def backward(slope: Array) -> tuple[Array, Gradients]:
            slope, last = from_output(slope)
            slope = slope.reshape(rows, length, HEADS, -1).transpose(0, 2, 1, 3)
            by_shares = slope @ value.swapaxes(-1, -2)
            by_scores = shares * (by_shares - (shares * by_shares).sum(axis=-1, keepdims=True)) * scale
            parts = np.stack([by_scores @ key, by_scores.swapaxes(-1, -2) @ query, shares.swapaxes(-1, -2) @ slope])
            slope, first = from_mixed(parts.transpose(1, 3, 0, 2, 4).reshape(rows, length, -1))
            return from_normal(slope), {names[0]: first, names[1]: last}

        return output, backward

    def _perceptron(self, layer: int, state: Array) -> tuple[Array, Callable[[Array], tuple[Array, Gradients]]]:
        names = f"{layer}.widen", f"{layer}.narrow"
        normal, from_normal = _normalized(state)
        wide, from_wide = _product(normal, self.weights[names[0]])
        output, from_output = _product(np.maximum(wide, 0), self.weights[names[1]])

        def backward(slope: Array) -> tuple[Array, Gradients]:
            slope, last = from_output(slope)
            slope, first = from_wide(slope * (wide > 0))
            return from_normal(slope), {names[0]: first, names[1]: last}

        return output, backward


class Adam:
    """The optimizer, which climbs. rate: its step size."""

    def __init__(self, rate: float) -> None:
        self._rate, self._steps = rate, 0
        self._moments: dict[str, tuple[Array, Array]] = {}

    def climb(self, weights: dict[str, Array], gradients: Gradients) -> None:
        """Change the weights in the direction of their gradients."""
        self._steps += 1
        for name, gradient in gradients.items():
            mean, square = self._moments.get(name, (np.zeros_like(gradient), np.zeros_like(gradient)))
            mean, square = 0.9 * mean + 0.1 * gradient, 0.99 * square + 0.01 * gradient**2
            self._moments[name] = mean, square
            step = mean / (1 - 0.9**self._steps) / (np.sqrt(square / (1 - 0.99**self._steps)) + 1e-8)
            weights[name] = weights[name] + self._rate * step


def softmax(logits: Array) -> Array:
    """Return the probabilities; a logit of minus infinity has none."""
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True))


def _product(values: Array, weights: Array) -> tuple[Array, Callable[[Array], tuple[Array, Array]]]:
    def backward(slope: Array) -> tuple[Array, Array]:
        flat = values.reshape(-1, values.shape[-1]).T @ slope.reshape(-1, slope.shape[-1])
        return slope @ weights.T, flat

    return values @ weights, backward


def _normalized(values: Array) -> tuple[Array, Callable[[Array], Array]]:
    """Return vectors of length one per number (RMSNorm without weights)."""
    factor = 1 / np.sqrt((values**2).mean(axis=-1, keepdims=True) + 1e-6)
    result = values * factor

    def backward(slope: Array) -> Array:
        return np.asarray(factor * (slope - result * (slope * result).mean(axis=-1, keepdims=True)))

    return result, backward
