"""A cluster of 10 to 1,000 members, simulated with measured costs and recorded rollouts: `python -m bench.cluster_sim`.

`bench.cluster_model` has the model, and docs/cluster.md the arithmetic that it confirms.
"""

import math
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from bench.cluster_model import THINK_SIGMA, Outcome, Placement, Plan, Simulation
from bench.machine import console, table
from bench.traces import WORKLOADS, Move, Traces, read_traces, resampled, share

Group = tuple[str, Sequence[Sequence[Move]]]
_DEPTH, _TASKS = 12, 40
"""Calls of a rollout, and tasks, where no recording is at hand."""
_LARGE = (100, 1_000, 3_000, 10_000)
DATABASE_LINES = 20_000
"""Lines of 2 kB that PostgreSQL 15 took in a second, in group commits, on the two cores that the clients used too."""
LINE_BYTES = 2_000
"""Bytes of a line: the call, its answer and its target, compressed."""
LEASES_A_S = 5 / 3
"""Renewals of a lease in a second: five in the three seconds that it holds."""
PLACEMENTS: tuple[Placement, ...] = ("balanced", "touch", "hash")


def made_up(seed: int) -> Traces:
    """Return tasks of eight rollouts that part from each other at random, for machines without a recording."""

    def rollout(task: str, name: str) -> Iterator[Move]:
        here = "start"
        for depth in range(_DEPTH):
            drawn = share(str(seed), task, name, str(depth))
            call = f"{depth}" if drawn < 0.7 else f"{depth} {name}"
            after = here if drawn < 0.3 else f"{here}/{call}"
            seconds = 0.03 * 300 ** share(here, call)
            yield Move(here, call, after, seconds)
            here = after

    return {f"t{task}": [list(rollout(f"t{task}", f"r{n}")) for n in range(8)] for task in range(_TASKS)}


def recorded(folder: Path) -> Traces:
    """Return the recorded rollouts of a directory by task; made-up ones if it has none."""
    traces: dict[str, Sequence[Sequence[Move]]] = {}
    for file in sorted(folder.glob("*.jsonl")):
        traces |= {f"{file.stem}/{task}": rollouts for task, rollouts in read_traces(file).items() if any(rollouts)}
    return traces or made_up(seed=1)


def groups_of(traces: Traces, count: int, size: int) -> list[Group]:
    """Return so many groups in the shape of the recording; each has a tree of its own."""
    groups: list[Group] = []
    for copy in range(-(-count // len(traces))):
        groups += [(f"{task}#{copy}", rollouts) for task, rollouts in resampled(traces, size=size, seed=copy).items()]
    # Tasks of all recordings, as far as there are groups.
    return sorted(groups, key=lambda group: share(group[0]))[:count]


def alone(groups: Sequence[Group]) -> float:
    """Return the share of calls that one member would answer without an execution: all but the first of each kind."""
    calls = sum(len(rollout) for _, rollouts in groups for rollout in rollouts)
    kinds = sum(len({(move.before, move.call) for rollout in rollouts for move in rollout}) for _, rollouts in groups)
    return 1 - kinds / max(1, calls)


def quantile(values: Sequence[float], share_of: float) -> float:
    """Return a quantile; 0 without values."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share_of))] if values else 0.0


def figures(groups: Sequence[Group], outcome: Outcome, took_s: float) -> dict[str, str]:
    """Return the figures of one simulation by their names."""
    counts, calls, span = outcome.counts, max(1, outcome.calls), max(1.0, outcome.ended_s)
    hits = [*outcome.hits_s, *outcome.far_hits_s]
    return {
        "rollouts": f"{counts['rollouts']:,}",
        "hits and joined calls": f"{(counts['hits'] + counts['joined']) / calls:.1%}",
        "the same on one member": f"{alone(groups):.1%}",
        "calls passed on": f"{counts['passed_on'] / calls:.1%}",
        "hit at home, p50": f"{quantile(outcome.hits_s, 0.5) * 1e6:.0f} us",
        "hit passed on, p50": f"{quantile(outcome.far_hits_s, 0.5) * 1e6:.0f} us",
        "hits, p99": f"{quantile(hits, 0.99) * 1e3:.1f} ms",
        "misses, p50": f"{quantile(outcome.misses_s, 0.5):.2f} s",
        "trees of a member, max / mean": f"{max(outcome.owned) * len(outcome.owned) / max(1, sum(outcome.owned)):.2f}",
        "busiest event loop": f"{max(outcome.loop_s) / span:.1%}",
        "log lines a second, mean": f"{sum(outcome.appends.values()) / span:,.0f}",
        "log lines a second, peak": f"{max(outcome.appends.values()):,}",
        "layers shipped": f"{counts['shipped_bytes'] / 1e6:,.0f} MB",
        "simulated in": f"{took_s:.1f} s",
    }


def simulate(plan: Plan, groups: Sequence[Group]) -> tuple[Outcome, float]:
    """Return what a simulation counted, and the seconds that it took."""
    began = time.perf_counter()
    return Simulation(plan, groups).run(), time.perf_counter() - began


def show_placements(plan: Plan, groups: Sequence[Group]) -> None:
    """Print a column for each way of placing trees and agents."""
    variants = [
        (f"{where}: {placement}", replace(plan, placement=placement, pinned=pinned))
        for pinned, where in ((True, "one"), (False, "all"))
        for placement in PLACEMENTS
    ]
    columns = [figures(groups, *simulate(chosen, groups)) for _, chosen in variants]
    title = f"{plan.members:,} members: a group's agents on one or on all, and how trees are placed"
    shown = table(title, "", *(name for name, _ in variants))
    for name in columns[0]:
        shown.add_row(name, *(column[name] for column in columns))
    console.print(shown)


def show_kills(plan: Plan, groups: Sequence[Group]) -> None:
    """Print what members that die cost the others."""
    shown = table(
        f"Members of {plan.members} that die", "dead", "takeovers", "calls waited", "longest", "runs lost",
        "rollouts ended", "with a living agent",
    )  # fmt: skip
    for killed in sorted({1, max(1, plan.members // 20), max(1, plan.members // 5)}):
        outcome, _ = simulate(replace(plan, killed=killed), groups)
        counts = outcome.counts
        shown.add_row(
            str(killed), str(counts["takeovers"]), str(len(outcome.stalls_s)),
            f"{max(outcome.stalls_s, default=0.0):.1f} s", str(counts["lost_runs"]), f"{counts['finished']:,}",
            f"{counts['rollouts'] - counts['dead_agents']:,}",
        )  # fmt: skip
    console.print(shown)


def show_hot_task(plan: Plan, traces: Traces, rollouts: int) -> None:
    """Print how long one task with very many rollouts takes, with sandboxes at its owner and anywhere."""
    largest = max(traces, key=lambda task: sum(map(len, traces[task])))
    groups: list[Group] = [("hot", resampled({largest: traces[largest]}, size=rollouts, seed=1)[largest])]
    shown = table(
        f"One task with {rollouts:,} rollouts on {plan.members} members", "sandboxes", "takes", "miss p50", "miss p99",
        "elsewhere", "shipped", "busiest loop",
    )  # fmt: skip
    for anywhere in (False, True):
        outcome, _ = simulate(replace(plan, anywhere=anywhere, pinned=False), groups)
        shown.add_row(
            "anywhere" if anywhere else "at the owner", f"{outcome.ended_s:.0f} s",
            f"{quantile(outcome.misses_s, 0.5):.2f} s", f"{quantile(outcome.misses_s, 0.99):.1f} s",
            f"{outcome.counts['elsewhere']:,}", f"{outcome.counts['shipped_bytes'] / 1e6:,.0f} MB",
            f"{max(outcome.loop_s) / max(1.0, outcome.ended_s):.1%}",
        )  # fmt: skip
    console.print(shown)


def show_arithmetic(plan: Plan, traces: Traces, rollouts: int) -> None:
    """Print what clusters take of each shared part, by multiplication: 10,000 members are too many to simulate."""
    groups, costs = groups_of(traces, 200, 8), plan.costs
    calls = [move for _, group in groups for rollout in group for move in rollout]
    misses = 1 - alone(groups)
    tool_s = sum(move.seconds for move in calls) / len(calls)
    # The mean of a log-normal distribution is exp(sigma^2 / 2) times its median.
    between_s = plan.think_s * math.exp(THINK_SIGMA**2 / 2) + misses * (tool_s + costs.restore_s)
    shown = table(
        f"By multiplication: {rollouts} rollouts a member, a call each {between_s:.1f} s, {misses:.0%} of them misses",
        "members", *(f"{members:,}" for members in _LARGE),
    )  # fmt: skip
    per_member = rollouts / between_s
    rows: list[tuple[str, Callable[[int], str]]] = [
        ("calls a second", lambda members: f"{members * per_member:,.0f}"),
        ("log lines a second", lambda members: f"{members * per_member * misses:,.0f}"),
        (
            "of what one database takes",
            lambda members: f"{members * per_member * misses / DATABASE_LINES:.0%}",
        ),
        ("log written", lambda members: f"{members * per_member * misses * LINE_BYTES / 1e6:,.0f} MB/s"),
        ("leases renewed a second", lambda members: f"{members * LEASES_A_S:,.0f}"),
        ("event loop of a member", lambda _: f"{per_member * (misses * costs.miss_s + costs.hit_s):.1%}"),
        ("sandboxes in use on a member", lambda _: f"{per_member * misses * (tool_s + costs.restore_s):.1f}"),
        ("links of a member, at most", lambda members: f"{members - 1:,}"),
    ]
    for name, value in rows:
        shown.add_row(name, *(value(members) for members in _LARGE))
    console.print(shown)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the tables."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--workloads", type=Path, default=WORKLOADS, help="directory of recorded rollouts")
    parser.add_argument("--members", default="10,100,1000", help="sizes of clusters")
    parser.add_argument("--groups", type=int, default=6, help="groups for each member")
    parser.add_argument("--size", type=int, default=8, help="rollouts of a group")
    parser.add_argument("--hot", type=int, default=2000, help="rollouts of the one task that all members serve")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(argv)
    sizes = [int(size) for size in options.members.split(",")]
    traces = recorded(options.workloads)
    plan = Plan(members=sizes[0], seed=options.seed)
    show_arithmetic(plan, traces, options.groups * options.size)
    for members in sizes:
        show_placements(replace(plan, members=members), groups_of(traces, members * options.groups, options.size))
    middle = sizes[len(sizes) // 2]
    show_kills(replace(plan, members=middle, pinned=False), groups_of(traces, middle * options.groups, options.size))
    show_hot_task(replace(plan, members=min(50, sizes[-1])), traces, options.hot)


if __name__ == "__main__":
    main()
