"""Directed sequences of calls through the proxy and in private, uncached sandboxes: `python -m bench.directed`.

Each sequence of `directed.txt` is about one thing that is hard for a cache, and ends with a call that observes what
the calls before it built. Four rollouts play it in turn, and all stay open:

1. The first one records all calls but the last.
2. The second one repeats them, so it gets hits.
3. The third one repeats them too, and leaves the tree with the observing call.
4. The fourth one leaves it half-way with the same call. With `--everywhere`, one more leaves it after each call.

The same calls run in private sandboxes, each twice: what differs between those is noise. `bench.comparison` says how
answers are compared. Exits with 1 if an answer was wrong or a rollout was lost.
"""

import json
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from bench.comparison import Comparison, Tally
from bench.differential import TIMEOUT_S, compared, environment, list_calls, show
from bench.machine import console, table
from bench.programs import Group, Program, ProgramCall, commands, shell_call, sql_call
from tests.machine import data_directory, served

SEQUENCES = Path(__file__).with_name("directed.txt")
"""Sequences of calls, a section for each; a section's name begins with its kind."""
SQL = ("sqlite", "postgres")
"""Kinds whose calls are statements for the driver of the same name. All other calls are commands."""
DRIVERS = ("local", *SQL)


@dataclass(frozen=True, slots=True)
class Sequence:
    """Calls of one rollout.

    Attributes:
        name: Kind and name, such as `locks: a lock of a process`.
        calls: The calls; the last one observes what the others built.
    """

    name: str
    calls: Program

    @property
    def kind(self) -> str:
        return self.name.partition(":")[0]

    def rollouts(self, everywhere: bool) -> tuple[Program, ...]:
        """Return the programs of the rollouts that play the sequence, in their order."""
        *built, observing = self.calls
        cuts = range(len(built)) if everywhere else [len(built) // 2]
        left = [(*built[:cut], observing) for cut in cuts]
        return (tuple(built), tuple(built), self.calls, *left)


def sequences(driver: str, only: str = "") -> list[Sequence]:
    """Return the sequences for a driver whose names contain a text."""
    every = (Sequence(name, tuple(_call(text, name) for text in texts)) for name, texts in commands(SEQUENCES).items())
    return [one for one in every if only in one.name and (one.kind == driver or not {one.kind, driver} & {*SQL})]


def _call(text: str, name: str) -> ProgramCall:
    """Return a command or statement as a call; a text that is a JSON object has all arguments of the call."""
    if name.startswith(SQL):
        return sql_call(text)
    return ProgramCall("shell/exec", json.loads(text)) if text.startswith('{"') else shell_call(text)


def run(driver: str, chosen: list[Sequence], *, everywhere: bool = False, at_once: int = 2) -> dict[str, Tally]:
    """Compare sequences of one driver, and return the figures of each by its name."""
    with ExitStack() as stack:
        spec, settings = stack.enter_context(environment(driver))
        folders = [stack.enter_context(data_directory()) for _ in range(2)]
        subjects, _ = stack.enter_context(compared(folders[0], settings, 1))
        private = stack.enter_context(served(folders[1], **settings))
        limits = httpx.Limits(max_connections=None)
        client = stack.enter_context(httpx.Client(timeout=TIMEOUT_S, trust_env=False, limits=limits))

        def play(number: int, sequence: Sequence) -> Tally:
            tally = Tally()
            comparison = Comparison(subjects, private, tally, [client], 1.0, in_turn=True)
            comparison.group(number, Group(spec, sequence.rollouts(everywhere)))
            return tally

        with ThreadPoolExecutor(at_once) as threads:
            tallies = list(threads.map(play, range(len(chosen)), chosen))
    return {sequence.name: tally for sequence, tally in zip(chosen, tallies, strict=True)}


def report(driver: str, tallies: dict[str, Tally], seconds: float) -> None:
    """Print the figures of one driver: the sum, and each sequence that is not all right and free of noise."""
    shown = table(f"Directed sequences: {driver}, {seconds:.0f} s", "sequence", *_figures(Tally()))
    rows = {name: _figures(tally) for name, tally in tallies.items()}
    for name, figures in rows.items():
        if any(figures[column] for column in ("wrong", "lost", "noise", "unclear")):
            shown.add_row(name, *map(str, figures.values()))
    total: dict[str, Any] = {column: sum(figures[column] for figures in rows.values()) for column in _figures(Tally())}
    shown.add_row(f"all {len(rows)}", *map(str, total.values()))
    console.print(shown)
    for name, tally in tallies.items():
        for kind, differences in (("wrong", tally.wrong), ("unclear", tally.unclear)):
            for difference in differences:
                show(f"{kind}: {name}", difference)
        for ending, program in tally.endings:
            console.print(f"lost: {name}: {ending}", markup=False)
            list_calls(program)


def _figures(tally: Tally) -> dict[str, int]:
    hits = sum(count for how, count in tally.sources.items() if how.startswith("hit"))
    return {
        "answers": tally.compared,
        "hits": hits,
        "wrong": len(tally.wrong),
        "lost": tally.lost.total(),
        "unclear": len(tally.unclear),
        "noise": tally.noise,
    }


@contextmanager
def loaded(loops: int) -> Iterator[None]:
    """Keep a number of processes busy for the duration of the block."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(loops)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--driver", default=",".join(DRIVERS), help="of local, image, sqlite, postgres")
    parser.add_argument("--only", default="", help="a text of the names of the sequences to run")
    parser.add_argument("--load", type=int, default=0, help="processes that are busy meanwhile")
    parser.add_argument("--at-once", type=int, default=2, help="sequences that run at the same time")
    parser.add_argument("--everywhere", action="store_true", help="whether rollouts leave the tree after each call")
    options = parser.parse_args()
    wrong = lost = 0
    for driver in options.driver.split(","):
        if not (chosen := sequences(driver, options.only)):
            continue
        began = time.monotonic()
        with loaded(options.load):
            tallies = run(driver, chosen, everywhere=options.everywhere, at_once=options.at_once)
        report(driver, tallies, time.monotonic() - began)
        wrong += sum(len(tally.wrong) for tally in tallies.values())
        lost += sum(tally.lost.total() for tally in tallies.values())
    if wrong or lost:
        sys.exit(f"{wrong} answers were wrong, and {lost} rollouts were lost.")


if __name__ == "__main__":
    main()
