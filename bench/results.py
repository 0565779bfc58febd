"""Writes the tables and plots of docs/results.md from what benchmarks measured: `python -m bench.results`.

The measurements are JSON files in docs/results, each with its command and its machine. No number is written by hand.
"""

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "results.md"
BEGIN, END = "<!-- results -->\n", "<!-- /results -->"
_WIDTH, _HEIGHT, _LEFT, _TOP = 640, 240, 48, 34
_COLOURS = {"cached": "#2563eb", "uncached": "#d97706"}
_ENDPOINTS = {
    "shell": "shell, tools of 0 to 0.4 s",
    "sql": "SQL, slow and fast statements",
    "video": "video, no model",
}
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


def tables(result: Json, tokens: Json) -> str:
    """Return the tables of a training run, with the tokens of `bench.model_tokens`, as Markdown."""
    runs, last = result["runs"], result["settings"]["epochs"]
    kinds = list(runs[0]["arms"]["cached"]["calls"])
    equal, total = sum(run["equal_outputs"] for run in runs), sum(run["outputs"] for run in runs)

    def arm(name: str, value: Callable[[Json], float]) -> float:
        return mean(runs, lambda run: value(run["arms"][name]))

    def both(value: Callable[[Json], float], unit: str = "s", factor: float = 1) -> str:
        plain, cached = factor * arm("uncached", value), factor * arm("cached", value)
        return f"| {plain:.1f} {unit} | {cached:.1f} {unit} | {plain / max(cached, 1e-9):.1f}x |"

    group = result["settings"]["group"]
    first, final = (arm("cached", _of("epochs", n, "hit_rate")) for n in (0, -1))
    parity = (
        f"{equal:,} of {total:,} tool outputs equal; rewards of all epochs {_same(runs, 'equal_rewards')}, "
        f"divergences {_same(runs, 'equal_kl')}"
    )
    claims = [
        ("Reward parity: training with the cache learns the same", "curves coincide", parity),
        (f"Hit rate of the first epoch, groups of {group}", "14 to 57 % by workload", f"{first:.0%}"),
        (f"Hit rate of epoch {last}", "rises by epoch, up to 70 %", f"{final:.0%}"),
        ("Median seconds of a shell call", "6.9x lower (terminal-bench)", _ratio(arm, "median_call_s", "shell")),
        (
            "Median seconds of a SQL call, slow and fast ones",
            "8.7x lower (56.6 to 6.5 ms)",
            _ratio(arm, "median_call_s", "sql"),
        ),
    ]
    plain, cached = (statistics.mean(run[name] for run in tokens["runs"]) for name in ("uncached", "cached"))
    spent = f"{plain / cached:.1f}x fewer ({plain:,.0f} to {cached:,.0f}); `{tokens['command']}`"
    claims.append(("Tokens of the model behind video tools", "3x fewer", spent))
    lines = [
        f"Command: `{result['command']}`. Machine: {result['machine']}. Runs: {len(runs)}.",
        "",
        "| Claim | Paper | Here |",
        "|---|---|---|",
        *(f"| {claim} | {paper} | {here} |" for claim, paper, here in claims),
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
    lines += ["", "| Calls | Number | Hits |", "|---|---|---|"]
    for kind in kinds:
        number = sum(run["arms"]["cached"]["calls"][kind] for run in runs)
        lines.append(f"| {kind} | {number:,} | {arm('cached', _of('hit_rate', kind)):.0%} |")
    plots = [
        "![Mean reward by epoch: the curves of both arms are the same](results/reward.svg)",
        "![Hit rate by epoch](results/hit-rate.svg)",
        "![Seconds of all rollouts by epoch](results/wall.svg)",
    ]
    return "\n".join([*lines, "", *plots, ""])


def _same(runs: Sequence[Json], name: str) -> str:
    return "equal" if all(run[name] for run in runs) else "**not equal**"


def _ratio(arm: Callable[[str, Callable[[Json], float]], float], name: str, kind: str) -> str:
    plain, cached = (1000 * arm(each, _of(name, kind)) for each in ("uncached", "cached"))
    return f"{plain / cached:.1f}x lower ({plain:.0f} to {cached:.1f} ms)"


def plot(title: str, result: Json, name: str, top: float) -> str:
    """Return a figure of each epoch of all runs as SVG: one line for each arm and seed."""
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
    for number, (arm, colour) in enumerate(_COLOURS.items()):
        # The second line is dashed, so that equal curves are seen as two.
        dashes = ' stroke-dasharray="5 5"' if number else ""
        parts.append(f'<text x="{_LEFT + width + 12}" y="{_TOP + 16 * (number + 1)}" fill="{colour}">{arm}</text>')
        for run in result["runs"]:
            points = " ".join(f"{x(n):.1f},{y(e[name]):.1f}" for n, e in enumerate(run["arms"][arm]["epochs"]))
            parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>')
    return "\n".join([*parts, "</g></svg>", ""])


def written(page: str) -> dict[Path, str]:
    """Return the files that the measurements make, by path; page: the page as it is."""
    result = json.loads((DOCS / "results" / "training.json").read_text())
    tokens = json.loads((DOCS / "results" / "tokens.json").read_text())
    before, _, rest = page.partition(BEGIN)
    slowest = max(e["wall_s"] for run in result["runs"] for arm in run["arms"].values() for e in arm["epochs"])
    return {
        PAGE: f"{before}{BEGIN}{tables(result, tokens)}{END}{rest.partition(END)[2]}",
        DOCS / "results" / "reward.svg": plot("Mean reward by epoch", result, "reward", 1.0),
        DOCS / "results" / "hit-rate.svg": plot("Hit rate by epoch", result, "hit_rate", 1.0),
        DOCS / "results" / "wall.svg": plot("Seconds of all rollouts by epoch", result, "wall_s", -(-slowest // 4) * 4),
    }


if __name__ == "__main__":
    for path, text in written(PAGE.read_text()).items():
        path.write_text(text)
