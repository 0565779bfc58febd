"""Writes the tables and plots of docs/comparison.md from what benchmarks measured: `python -m bench.results`.

The measurements are JSON files in docs/results, each with its command and its machine. No number is written by hand.
"""

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.paired import interval, p_value

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "comparison.md"
BEGIN, END = "<!-- results -->\n", "<!-- /results -->"
_WIDTH, _HEIGHT, _LEFT, _TOP = 640, 240, 48, 34
_COLOURS = {"cached": "#2563eb", "uncached": "#d97706", "repeated": "#6b7280", "once": "#9333ea"}
_ENDPOINTS = {
    "shell": "shell, tools of 0 to 0.4 s",
    "sql": "SQL, slow and fast statements",
    "video": "video, no model",
}
_SLOW = "tools of 50 ms or longer without the cache"
Json = Mapping[str, Any]


def mean(runs: Sequence[Json], value: Callable[[Json], float]) -> float:
    """Return the mean over the seeds."""
    return float(statistics.mean(value(run) for run in runs))


def _of(*path: str | int) -> Callable[[Json], float]:
    """Return a function that takes a number out of a run's JSON."""

    def number(value: Any) -> float:
        for name in path:
            value = value[name]
        return float(value)

    return number


def tables(steady: Json, noisy: Json, tokens: Json) -> str:
    """Return the tables as Markdown.

    Args:
        steady: What `bench.training` measured with tools that are deterministic.
        noisy: What it measured with tools that are not.
        tokens: What `bench.model_tokens` measured.
    """
    runs, last = steady["runs"], steady["settings"]["epochs"]
    kinds = list(runs[0]["arms"]["cached"]["calls"])

    def arm(name: str, value: Callable[[Json], float]) -> float:
        return mean(runs, lambda run: value(run["arms"][name]))

    def both(value: Callable[[Json], float], unit: str = "s", factor: float = 1) -> str:
        return _cells(factor * arm("uncached", value), factor * arm("cached", value), unit)

    machine = runs[0]["machine"].partition(", load ")[0]
    loads = ", ".join(run["machine"].rpartition("load ")[2] for run in runs)
    group = steady["settings"]["group"]
    first, final = (arm("cached", _of("epochs", n, "hit_rate")) for n in (0, -1))
    learned = (arm("cached", _of("epochs", n, "reward")) for n in (0, -1))
    plain, cached = (statistics.mean(run[name] for run in tokens["runs"]) for name in ("uncached", "cached"))
    claims = [
        ("Reward parity, tools that are deterministic", "curves coincide", _parity(runs)),
        (
            "Reward parity, a tool that is not (95 % interval)",
            "curves coincide",
            _noise(noisy["runs"], "cached", "last"),
        ),
        (f"Mean reward, epochs 1 and {last}", "rises", " to ".join(f"{value:.2f}" for value in learned)),
        (f"Hit rate of the first epoch, groups of {group}", "14 to 57 % by workload", f"{first:.0%}"),
        (f"Hit rate of epoch {last}", "rises by epoch, up to 70 %", f"{final:.0%}"),
        ("Median seconds of a shell call", "6.9x lower (terminal-bench)", _ratio(arm, "shell")),
        ("Median seconds of a SQL call", "8.7x lower (56.6 to 6.5 ms)", _ratio(arm, "sql")),
        (
            "Tokens of the model behind video tools",
            "3x fewer",
            f"{plain / cached:.1f}x fewer ({plain:,.0f} to {cached:,.0f}); `{tokens['command']}`",
        ),
    ]
    lines = [
        f"Commands: `{steady['command']}` and `{noisy['command']}`.",
        f"Machine: {machine}. Other work ran on it: load {loads} as the seeds began. Compare ratios, not seconds.",
        "",
        "| Claim | Paper | Here |",
        "|---|---|---|",
        *(f"| {claim} | {paper} | {here} |" for claim, paper, here in claims),
        "",
        "\n\n".join(_PLOTS),
        "",
        f"Tools that are deterministic, mean of {len(runs)} seeds:",
        "",
        "| Measured | Without the cache | With it | Ratio |",
        "|---|---|---|---|",
        f"| Time of all rollouts {both(_of('wall_s'))}",
        f"| Seconds of executed tools {both(_of('tool_s'))}",
    ]
    for kind in kinds:
        for title, name in (("Median", "median_call_s"), ("Mean", "mean_call_s")):
            cells = both(_of(name, kind), "ms", 1000)
            lines.append(f"| {title} of a call: {_ENDPOINTS[kind]} {cells}")
        plain, cached = (1000 * mean(runs, _of("slow", kind, name)) for name in ("uncached_s", "cached_s"))
        lines.append(f"| Median of a call: {kind}, {_SLOW} {_cells(plain, cached, 'ms')}")
    lines += ["", "| Calls | Number | Hits |", "|---|---|---|"]
    for kind in kinds:
        number = sum(run["arms"]["cached"]["calls"][kind] for run in runs)
        lines.append(f"| {kind} | {number:,} | {arm('cached', _of('hit_rate', kind)):.0%} |")
    return "\n".join([*lines, "", *_noise_table(noisy), ""])


_PLOTS = [
    "![Mean reward by epoch, deterministic tools: the curves of both arms are the same](results/reward.svg)",
    "![Divergence from the first policy by epoch, deterministic tools](results/kl.svg)",
    "![Mean reward by epoch, a tool that is not deterministic](results/reward-noisy.svg)",
    "![Hit rate by epoch, deterministic tools](results/hit-rate.svg)",
    "![Seconds of all rollouts by epoch, deterministic tools](results/wall.svg)",
]


def _parity(runs: Sequence[Json]) -> str:
    """Return what is equal in both arms of all seeds."""
    equal, total = sum(run["equal_outputs"] for run in runs), sum(run["outputs"] for run in runs)
    names = {"equal_rewards": "rewards", "equal_kl": "divergences", "equal_weights": "final weights"}
    others = ", ".join(f"{text} {_same(runs, name)}" for name, text in names.items())
    return f"{equal:,} of {total:,} tool outputs equal; {others} ({len(runs)} seeds)"


def _same(runs: Sequence[Json], name: str) -> str:
    return "equal" if all(run[name] for run in runs) else "**not equal**"


_MEASURES: Mapping[str, tuple[str, Callable[[Sequence[Json]], float]]] = {
    "all": ("Mean reward of all epochs", lambda epochs: statistics.mean(each["reward"] for each in epochs)),
    "last": (
        "Mean reward of the last quarter of the epochs",
        lambda epochs: statistics.mean(each["reward"] for each in epochs[-(len(epochs) // 4 or 1) :]),
    ),
    "kl": ("Divergence after the last epoch", lambda epochs: epochs[-1]["kl"]),
}
"""Figures of a run that are compared where tools are not deterministic, by name: title, and how they are computed."""


def _differences(runs: Sequence[Json], arm: str, measure: str) -> list[float]:
    """Return by how much an arm differs from the arm without the cache, for each seed."""
    value = _MEASURES[measure][1]
    return [value(run["arms"][arm]["epochs"]) - value(run["arms"]["uncached"]["epochs"]) for run in runs]


def _noise(runs: Sequence[Json], arm: str, measure: str) -> str:
    found = _differences(runs, arm, measure)
    low, high = interval(found)
    return f"{statistics.mean(found):+.3f} ({low:+.3f} to {high:+.3f}), p = {p_value(found):.3f}"


def _noise_table(noisy: Json) -> list[str]:
    """Return the table of the tasks whose tools are not deterministic."""
    runs = noisy["runs"]
    arms = {
        "cached": "With the cache",
        "once": 'With the cache and `"volatile": "once"`',
        "repeated": "Without it a second time",
    }
    lines = [
        f"A tool that is not deterministic, {len(runs)} seeds. Differences to the first arm, with 95 % intervals:",
        "",
        f"| Measured | Without the cache | {' | '.join(arms.values())} |",
        f"|{'---|' * (len(arms) + 2)}",
    ]
    for name, (title, value) in _MEASURES.items():
        plain = statistics.mean(value(run["arms"]["uncached"]["epochs"]) for run in runs)
        lines.append(f"| {title} | {plain:.3f} | {' | '.join(_noise(runs, arm, name) for arm in arms)} |")
    rates = [[mean(runs, _of("arms", arm, "epochs", n, "hit_rate")) for n in (0, -1)] for arm in arms]
    lines.append(f"| Hit rate, first and last epoch | 0% | {' | '.join(f'{a:.0%} to {b:.0%}' for a, b in rates)} |")
    lost = [sum(each["lost"] for run in runs for each in run["arms"][arm]["epochs"]) for arm in arms]
    number = len(runs) * noisy["settings"]["epochs"] * noisy["settings"]["group"]
    lines.append(f"| Rollouts that began again (409), of {number:,} | 0 | {' | '.join(map(str, lost))} |")
    return lines


def _cells(plain: float, cached: float, unit: str) -> str:
    return f"| {plain:.1f} {unit} | {cached:.1f} {unit} | {plain / max(cached, 1e-9):.1f}x |"


def _ratio(arm: Callable[[str, Callable[[Json], float]], float], kind: str) -> str:
    plain, cached = (1000 * arm(each, _of("median_call_s", kind)) for each in ("uncached", "cached"))
    return f"{plain / cached:.1f}x lower ({plain:.0f} to {cached:.1f} ms)"


def plot(title: str, result: Json, name: str, top: float) -> str:
    """Return a figure of each epoch as SVG: a thin line for each arm and seed, and a thick one for each arm's mean."""
    epochs = int(result["settings"]["epochs"])
    width, height = _WIDTH - _LEFT - 110, _HEIGHT - _TOP - 30

    def x(epoch: int) -> float:
        return _LEFT + width * epoch / max(epochs - 1, 1)

    def y(value: float) -> float:
        return _TOP + height * (1 - value / top)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>',
        f'<text x="{_LEFT}" y="18" font-size="14">{title}</text><g font-size="12">',
    ]
    for step in range(5):
        value = top * step / 4
        parts.append(f'<path d="M{_LEFT} {y(value):.1f}H{_LEFT + width}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:g}</text>')
    parts += [f'<text x="{x(n):.1f}" y="{_HEIGHT - 10}" text-anchor="middle">{n + 1}</text>' for n in range(epochs)]
    for number, arm in enumerate(result["runs"][0]["arms"]):
        colour = _COLOURS[arm]
        # Later lines are dashed, so that equal curves are seen as two.
        dashes = ' stroke-dasharray="5 5"' if number else ""
        parts.append(f'<text x="{_LEFT + width + 12}" y="{_TOP + 16 * (number + 1)}" fill="{colour}">{arm}</text>')
        seeds = [[float(each[name]) for each in run["arms"][arm]["epochs"]] for run in result["runs"]]
        means = [statistics.mean(values) for values in zip(*seeds, strict=True)]
        for values, style in ((means, 'stroke-width="3"'), *((seed, 'stroke-opacity="0.35"') for seed in seeds)):
            points = " ".join(f"{x(n):.1f},{y(value):.1f}" for n, value in enumerate(values))
            parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" {style}{dashes}/>')
    return "\n".join([*parts, "</g></svg>", ""])


def written(page: str) -> dict[Path, str]:
    """Return the files that the measurements make, by path; page: the page as it is."""
    folder = DOCS / "results"
    steady, noisy, tokens = (
        json.loads((folder / f"{name}.json").read_text()) for name in ("training", "training-noisy", "tokens")
    )
    before, _, rest = page.partition(BEGIN)
    return {
        PAGE: f"{before}{BEGIN}{tables(steady, noisy, tokens)}{END}{rest.partition(END)[2]}",
        folder / "reward.svg": plot("Mean reward by epoch, deterministic tools", steady, "reward", 1.0),
        folder / "reward-noisy.svg": plot(
            "Mean reward by epoch, a tool that is not deterministic", noisy, "reward", 1.0
        ),
        folder / "kl.svg": plot(
            "Divergence from the first policy (nats per word)", steady, "kl", _top(steady, "kl", 1)
        ),
        folder / "hit-rate.svg": plot("Hit rate by epoch", steady, "hit_rate", 1.0),
        folder / "wall.svg": plot("Seconds of all rollouts by epoch", steady, "wall_s", _top(steady, "wall_s", 4)),
    }


def _top(result: Json, name: str, step: int) -> float:
    """Return the largest value of a figure, rounded up to a multiple of a step."""
    values = [each[name] for run in result["runs"] for arm in run["arms"].values() for each in arm["epochs"]]
    return float(-(-max(values) // step) * step)


if __name__ == "__main__":
    for path, text in written(PAGE.read_text()).items():
        path.write_text(text)
