"""`forkpoint replay`: which runs are made, and how what they found is shown."""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import islice

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from proxy.cli.text import printable, shortened
from proxy.workloads.ephemeral_proxy import PrivateProxy, private_proxy
from proxy.workloads.format import Workload
from proxy.workloads.report import (
    Comparison,
    Difference,
    Figures,
    ReplayedCall,
    ReplayRun,
    ShellAnswer,
    Source,
    compare,
    errors_of,
    figures,
)
from proxy.workloads.runner import Names, OnCall, replay

ERRORS_SHOWN = 50
LEAD = 20
ROWS: Mapping[str, tuple[str, str]] = {
    "calls": ("calls", "{:,}"),
    "hits": ("hits", "{:,}"),
    "waits": ("waits (shared a run)", "{:,}"),
    "misses": ("misses", "{:,}"),
    "bypasses": ("not cached", "{:,}"),
    "hit_rate": ("hit rate", "{:.1%}"),
    "replays": ("replayed calls", "{:,}"),
    "executed_s": ("executed, s", "{:,.2f}"),
    "saved_s": ("saved, s", "{:,.2f}"),
    "median_ms": ("median call, ms", "{:,.1f}"),
    "p95_ms": ("p95 call, ms", "{:,.1f}"),
    "wall_s": ("whole run, s", "{:,.1f}"),
    "refusals": ("asked to come later", "{:,}"),
    "errors": ("errors", "{:,}"),
}
"""What the table shows of `Figures`, in this order: its label and its form."""


@dataclass(frozen=True, slots=True)
class Passes:
    """Which runs a replay makes, in this order: one cached, then uncached ones."""

    cached: bool = True
    uncached: int = 1

    def __iter__(self) -> Iterator[bool]:
        """Yield for each run whether it is cached."""
        return iter([True] * self.cached + [False] * self.uncached)


@dataclass(frozen=True, slots=True)
class Report:
    """The runs, under the names that the table gives them, and the comparisons between them."""

    runs: Mapping[str, ReplayRun]
    comparisons: Mapping[str, Comparison]

    @property
    def failed(self) -> bool:
        return any(errors_of(run) for run in self.runs.values())


def reports(runs: Sequence[ReplayRun]) -> Report:
    """Name the runs and compare what can be: the first two, and the first two uncached ones (the noise floor)."""
    named: dict[str, ReplayRun] = {}
    for run in runs:
        name = "cached" if run.cached else "uncached"
        named[f"{name} again" if name in named else name] = run
    comparisons: dict[str, Comparison] = {}
    for one, other in (("cached", "uncached"), ("uncached", "uncached again")):
        if one in named and other in named:
            comparisons[f"{one} / {other}"] = compare(named[one], named[other])
    return Report(named, comparisons)


async def make_runs(
    workload: Workload, proxy: PrivateProxy | str, passes: Passes, *, at_once: int, keep_names: bool, console: Console
) -> Report:
    """Make the runs one after another through proxy, with a progress bar each.

    Raises:
        ReplayError: the proxy is not there or refuses a task.
    """
    url, trust_env = (proxy.url, False) if isinstance(proxy, PrivateProxy) else (proxy, True)
    run_id = secrets.token_hex(3)
    runs: list[ReplayRun] = []
    for number, cached in enumerate(passes):
        suffix = f"-{run_id}" if cached else f"-{run_id}-uncached{number}"
        names = Names("" if cached and keep_names else suffix, suffix)
        with _progress(workload, "cached" if cached else "uncached", console) as on_call:
            runs.append(
                await replay(
                    url, workload, cached=cached, names=names, at_once=at_once, on_call=on_call, trust_env=trust_env
                )
            )
    return reports(runs)


@contextmanager
def proxy_at(url: str | None) -> Iterator[PrivateProxy | str]:
    """Give url itself, or a private proxy where there is none."""
    with private_proxy() if url is None else nullcontext(url) as proxy:
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
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task(title, total=workload.calls, hits=hits, errors=errors)

        def on_call(outcome: ReplayedCall) -> None:
            nonlocal hits, errors
            hits += outcome.source in {Source.HIT, Source.WAIT}
            errors += outcome.error is not None
            progress.update(bar, advance=1, hits=hits, errors=errors)

        yield on_call


def show(report: Report, workload: Workload, console: Console) -> None:
    """Print the table, then each error, then each answer that differs."""
    console.print(figures_table({name: figures(run) for name, run in report.runs.items()}))
    if workload.skipped:
        console.print(f"{workload.skipped} recorded calls were skipped: they could not be parsed when they were made.")
    for name, run in report.runs.items():
        show_errors(name, errors_of(run), console)
    for name, comparison in report.comparisons.items():
        show_comparison(name, comparison, console)


def figures_table(columns: Mapping[str, Figures]) -> Table:
    """Return a table with a column for each run."""
    table = Table()
    table.add_column("")
    for name in columns:
        table.add_column(name, justify="right")
    for member, (label, form) in ROWS.items():
        table.add_row(label, *(form.format(getattr(column, member)) for column in columns.values()))
    return table


def show_errors(name: str, lines: Sequence[str], console: Console) -> None:
    if not lines:
        return
    console.print(Text(f"{len(lines)} errors, {name}:", style="bold red"))
    for line in islice(lines, ERRORS_SHOWN):
        console.print(Text(f"  {shortened(line, 4 * console.width)}"))
    if len(lines) > ERRORS_SHOWN:
        console.print(f"  and {len(lines) - ERRORS_SHOWN} more: --json FILE keeps them all")


def show_comparison(name: str, comparison: Comparison, console: Console) -> None:
    """Print every call of a comparison that differs, cut to where its two answers part."""
    one, other = name.split(" / ")
    for difference in comparison.differences:
        call = difference.call
        place = f"{printable(call.task)}  {printable(call.rollout)}  call {call.index}"
        console.print(Text(place, style="bold"))
        console.print(Text(f"  {shortened(difference.shown, console.width - 4)}", style="cyan"))
        width = max(len(one), len(other))
        for label, text in zip((one, other), parting(difference, console.width - width - 4), strict=True):
            console.print(Text(f"  {label:{width}}  {text}"))
    found = f"{len(comparison.differences)} of {comparison.compared} answers differ ({comparison.rate:.2%})"
    console.print(Text(f"{name}: {found}", style="bold"))


def parting(difference: Difference, width: int) -> tuple[str, str]:
    """Return both answers from a little before where they part, in at most width printable characters each."""
    member = next(
        name
        for name in ("exit_code", "stderr", "stdout")
        if _text(difference.one, name) != _text(difference.other, name)
    )
    one, other = _text(difference.one, member), _text(difference.other, member)
    common = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    start = max(0, common - LEAD)
    lead = f"{member} {'…' if start else ''}"
    return shortened(lead + one[start:], width), shortened(lead + other[start:], width)


def _text(answer: ShellAnswer, member: str) -> str:
    return str(getattr(answer, member))
