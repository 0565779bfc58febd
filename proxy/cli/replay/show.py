"""Makes the runs of a replay, and shows their figures, errors and differences."""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import islice

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from forkpoint.ephemeral_proxy import EphemeralProxy, ephemeral_proxy
from proxy.cli.replay.report import (
    Comparison,
    Difference,
    ReplayedCall,
    ReplayRun,
    ToolAnswer,
    compare,
    errors_of,
    figures,
)
from proxy.cli.replay.runner import OnCall, ReplayNames, replay
from proxy.cli.replay.workload import Workload
from proxy.cli.text import printable, shortened

ERRORS_SHOWN = 50
"""Errors of a run that are printed."""
LEAD = 20
"""Characters that are shown before the first difference of two answers."""
ROWS: Mapping[str, tuple[str, str]] = {
    "calls": ("calls", "{:,}"),
    "hits": ("hits", "{:,}"),
    "waits": ("waits (shared execution)", "{:,}"),
    "misses": ("misses", "{:,}"),
    "bypasses": ("bypasses", "{:,}"),
    "hit_rate": ("hit rate", "{:.1%}"),
    "replays": ("replayed calls", "{:,}"),
    "executed_s": ("executed, s", "{:,.2f}"),
    "saved_s": ("saved, s", "{:,.2f}"),
    "median_ms": ("median call, ms", "{:,.1f}"),
    "p95_ms": ("p95 call, ms", "{:,.1f}"),
    "wall_s": ("whole run, s", "{:,.1f}"),
    "refusals": ("refused, retried", "{:,}"),
    "errors": ("errors", "{:,}"),
}


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """The results of a replay: its runs by name, and the comparisons of two runs by the names of both."""

    runs: Mapping[str, ReplayRun]
    comparisons: Mapping[str, Comparison]

    @property
    def failed(self) -> bool:
        """Whether any run had an error."""
        return any(errors_of(run) for run in self.runs.values())


def reports(runs: Sequence[ReplayRun]) -> ReplayReport:
    """Name the runs, and compare the cached run and the second uncached run with the first uncached run."""
    named: dict[str, ReplayRun] = {}
    for run in runs:
        name = "cached" if run.cached else "uncached"
        named[f"{name} again" if name in named else name] = run
    comparisons: dict[str, Comparison] = {}
    for first, second in (("cached", "uncached"), ("uncached", "uncached again")):
        if first in named and second in named:
            comparisons[f"{first} / {second}"] = compare(named[first], named[second])
    return ReplayReport(named, comparisons)


async def make_runs(
    workload: Workload,
    proxy: EphemeralProxy | str,
    passes: Sequence[bool],
    *,
    at_once: int,
    keep_names: bool,
    console: Console,
) -> ReplayReport:
    """Make the runs one after another, each with a progress bar. Raises ReplayError if the proxy is of no use."""
    url, trust_env = (proxy.url, False) if isinstance(proxy, EphemeralProxy) else (proxy, True)
    run_id = secrets.token_hex(3)
    runs: list[ReplayRun] = []
    for number, cached in enumerate(passes):
        suffix = f"-{run_id}" if cached else f"-{run_id}-uncached{number}"
        names = ReplayNames("" if cached and keep_names else suffix, suffix)
        with _progress(workload, "cached" if cached else "uncached", console) as on_call:
            runs.append(
                await replay(
                    url, workload, cached=cached, names=names, at_once=at_once, on_call=on_call, trust_env=trust_env
                )
            )
    return reports(runs)


@contextmanager
def proxy_at(url: str | None) -> Iterator[EphemeralProxy | str]:
    """Yield the URL, or a temporary proxy if it is None."""
    with ephemeral_proxy() if url is None else nullcontext(url) as proxy:
        yield proxy


@contextmanager
def _progress(workload: Workload, title: str, console: Console) -> Iterator[OnCall]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[hits]} answered from the tree, {task.fields[errors]} errors"),
        TimeElapsedColumn(),
    )
    hits = errors = 0
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task(title, total=workload.calls, hits=hits, errors=errors)

        def on_call(outcome: ReplayedCall) -> None:
            nonlocal hits, errors
            hits += outcome.outcome in {"hit", "wait"}
            errors += outcome.error is not None
            progress.update(bar, advance=1, hits=hits, errors=errors)

        yield on_call


def show(report: ReplayReport, console: Console) -> None:
    """Print the table of figures, then the errors, then the differences."""
    console.print(figures_table({name: figures(run) for name, run in report.runs.items()}))
    for name, run in report.runs.items():
        show_errors(name, errors_of(run), console)
    for name, comparison in report.comparisons.items():
        show_comparison(name, comparison, console)


def figures_table(columns: Mapping[str, Mapping[str, float]]) -> Table:
    """Return a table of figures with a column for each run."""
    table = Table()
    table.add_column("")
    for name in columns:
        table.add_column(name, justify="right")
    for member, (label, form) in ROWS.items():
        table.add_row(label, *(form.format(column[member]) for column in columns.values()))
    return table


def show_errors(name: str, lines: Sequence[str], console: Console) -> None:
    """Print the errors of a run, if it has any."""
    if not lines:
        return
    console.print(Text(f"{len(lines)} errors, {name}:", style="bold red"))
    for line in islice(lines, ERRORS_SHOWN):
        console.print(Text(f"  {shortened(line, 4 * console.width)}"))
    if len(lines) > ERRORS_SHOWN:
        console.print(f"  and {len(lines) - ERRORS_SHOWN} more. --json prints all of them")


def show_comparison(name: str, comparison: Comparison, console: Console) -> None:
    """Print the calls with different answers, each answer from a little before the first difference."""
    first, second = name.split(" / ")
    for difference in comparison.differences:
        call = difference.call
        position = f"{printable(call.task)}  {printable(call.rollout)}  call {call.index}"
        console.print(Text(position, style="bold"))
        console.print(Text(f"  {shortened(difference.shown, console.width - 4)}", style="cyan"))
        width = max(len(first), len(second))
        for label, text in zip((first, second), first_difference(difference, console.width - width - 4), strict=True):
            console.print(Text(f"  {label:{width}}  {text}"))
    summary = f"{len(comparison.differences)} of {comparison.compared} answers differ ({comparison.rate:.2%})"
    console.print(Text(f"{name}: {summary}", style="bold"))


def first_difference(difference: Difference, width: int) -> tuple[str, str]:
    """Return both answers from shortly before their first difference, each cut to `width` characters."""
    member = next(
        name
        for name in ("status", "exit_code", "stderr", "stdout")
        if _text(difference.first, name) != _text(difference.second, name)
    )
    first, second = _text(difference.first, member), _text(difference.second, member)
    common = next(
        (at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
    start = max(0, common - LEAD)
    lead = f"{member} {'…' if start else ''}"
    return shortened(lead + first[start:], width), shortened(lead + second[start:], width)


def _text(answer: ToolAnswer, member: str) -> str:
    return str(getattr(answer, member))
