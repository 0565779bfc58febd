"""Random programs through the proxy and in private, uncached sandboxes: `python -m bench.differential`.

Groups of interleaved rollouts run through a proxy, calmly, with tiny budgets, and under `kill -9` of the proxy, its
launcher, sandboxes and CRIU. With `--members` they run through a cluster: agents change their member, and
members and the cluster's database are killed and stopped too.
Each program also runs in private sandboxes of another proxy (`cache: never`).
`bench.comparison` says how answers are compared. Exits with 1 if an answer was wrong.
"""

import json
import random
import secrets
import shutil
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from difflib import unified_diff
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import httpx

from bench.comparison import Answer, Comparison, Difference, Tally
from bench.machine import console, table
from bench.one_packet import OnePacket
from bench.programs import Program, shell_group, shell_spec, sql_group
from bench.strikes import Strikes
from tests.machine import Served, data_directory, served
from tests.proxy import test_transparency_postgres as postgres_calls
from tests.proxy import test_transparency_sqlite as sqlite_calls
from tests.proxy.cluster.nodes import nodes
from tests.sandboxes.postgres_cluster import Cluster, cluster
from tests.sandboxes.sqlite_files import make

TINY = {"snapshot_bytes": "200000", "checkpoint_bytes": "2000000", "sandbox_idle_s": "1", "warm_sandboxes": "1"}
"""Budgets under which nearly every state is evicted, and reached by replay."""
MODES = ("calm", "tiny", "kills")
SANDBOXES = "8"
"""Fewer sandboxes than rollouts, so that states are given up and restored all the time."""
TIMEOUT_S = 120.0
"""How long a client waits for an answer."""
SHOWN = 10
"""Most differences of a kind that are printed."""


@dataclass(frozen=True)
class Plan:
    """What a run does.

    Attributes:
        programs: Least number of programs.
        rollouts: Rollouts in a group.
        length: Calls of a group's first program.
        every_s: Mean seconds between strikes in the mode `kills`.
        at_once: Groups that run at the same time.
        twice: Share of programs that run twice in private sandboxes, for the noise floor.
        logs: Directory to which the proxies' logs are copied; None for none.
        members: Members of the cluster that is compared; 1 for a proxy without a cluster.
    """

    programs: int
    rollouts: int = 6
    length: int = 10
    every_s: float = 1.0
    at_once: int = 3
    twice: float = 0.1
    logs: Path | None = None
    members: int = 1


def run(driver: str, mode: str, seed: int, plan: Plan) -> Tally:
    """Compare at least a number of programs in one mode, and print the table."""
    tally, dice = Tally(), random.Random(f"{seed}:{driver}:{mode}")  # noqa: S311 - dice of a test
    with ExitStack() as stack:
        spec, settings = stack.enter_context(environment(driver))
        folders = [stack.enter_context(data_directory()) for _ in range(2)]
        budgets = {} if mode == "calm" else TINY
        options = settings | budgets | {"max_sandboxes": SANDBOXES}
        subjects, database = stack.enter_context(compared(folders[0], options, plan.members))
        private = stack.enter_context(served(folders[1], **settings))
        limits = httpx.Limits(max_connections=None)
        make_group = sql_group if driver in ("sqlite", "postgres") else shell_group
        clients = [
            stack.enter_context(httpx.Client(timeout=TIMEOUT_S, trust_env=False, limits=limits, transport=transport))
            for transport in (None, OnePacket(TIMEOUT_S))
        ]
        comparison = Comparison(subjects, private, tally, clients, plan.twice)
        if mode == "kills":
            blows = random.Random(seed)  # noqa: S311 - dice of a test
            strikes = Strikes(subjects, database, blows, plan.every_s, tally.strikes)
            stack.enter_context(strikes.falling())
        groups = [make_group(dice, spec, plan.rollouts, plan.length) for _ in range(-(-plan.programs // plan.rollouts))]
        began = time.monotonic()
        try:
            with ThreadPoolExecutor(plan.at_once) as threads:
                list(threads.map(comparison.group, range(len(groups)), groups))
        finally:
            if plan.logs:
                plan.logs.mkdir(parents=True, exist_ok=True)
                for subject in subjects:
                    shutil.copy(subject.log_file, plan.logs / f"{driver}-{mode}-{seed}-{subject.log_file.name}")
        seconds = time.monotonic() - began
    report(driver, mode, seed, tally, seconds)
    return tally


@contextmanager
def compared(folder: Path, options: dict[str, str], members: int) -> Iterator[tuple[list[Served], Cluster | None]]:
    """Run the proxy that is compared, or the members of a cluster; yield them, and the cluster's database server."""
    if members == 1:
        with served(folder, **options) as proxy:
            yield [proxy], None
        return
    with cluster() as server:
        server.create("forkpoint_cluster", "SELECT 1")
        variables = {f"FORKPOINT_{name.upper()}": value for name, value in options.items()}
        with nodes(folder, f"{server.dsn} dbname=forkpoint_cluster", ascii_lowercase[:members], **variables) as running:
            yield list(running.values()), server


@contextmanager
def environment(driver: str) -> Iterator[tuple[dict[str, Any], dict[str, str]]]:
    """Yield the spec of a driver's tasks, and the settings of its proxies."""
    settings = {"drivers": json.dumps(["local" if driver == "image" else driver])}
    with ExitStack() as stack:
        if driver == "sqlite":
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            source = make(Path(folder) / "source.db", sqlite_calls.SCRIPT)
            yield {"driver": driver, "databases": {"shop": {"source": str(source)}}}, settings
        elif driver == "postgres":
            server = stack.enter_context(cluster())
            server.create("shop", postgres_calls.SOURCE)
            databases = {"shop": {"dsn": server.dsn, "source": "shop"}}
            yield {"driver": driver, "databases": databases}, settings
        else:
            yield shell_spec(driver), settings


def report(driver: str, mode: str, seed: int, tally: Tally, seconds: float) -> None:
    """Print the figures of one driver in one mode, and the programs whose answers differ."""
    shown = table(f"Differential run: {driver}, {mode}", "", "")
    hits = sum(count for how, count in tally.sources.items() if how.startswith("hit"))
    for name, value in {
        "seed": str(seed),
        "programs": f"{tally.programs}",
        "answers compared": f"{tally.compared}",
        "hits among all answers": f"{hits} of {tally.sources.total()}",
        "wrong": f"{len(tally.wrong)}",
        "like no private run, which differ too": f"{len(tally.unclear)}",
        "only a later private run gave the answer": f"{tally.timing}",
        "own random values read again": f"{tally.recalled}",
        "noise floor: two private runs differ": f"{tally.noise} of {tally.twice}",
        "answers lost with a killed proxy": f"{tally.hidden}",
        "lost rollouts": ", ".join(f"{kind}: {count}" for kind, count in tally.lost.most_common()) or "0",
        "strikes": ", ".join(f"{kind}: {count}" for kind, count in tally.strikes.most_common()) or "0",
        "seconds": f"{seconds:.0f}",
        "programs a minute": f"{tally.programs / seconds * 60:.0f}",
    }.items():
        shown.add_row(name, value)
    console.print(shown)
    for kind, differences in (("wrong", tally.wrong), ("unclear", tally.unclear)):
        for difference in differences[:SHOWN]:
            show(kind, difference)
    for name, program in tally.endings[:SHOWN]:
        console.print(f"lost: {name}", markup=False)
        list_calls(program)


def list_calls(program: Program) -> None:
    for number, call in enumerate(program):
        console.print(f"  {number:2} {call.text}", markup=False, highlight=False)


def show(kind: str, difference: Difference) -> None:
    """Print a difference with the program that led to it."""
    at = f"group {difference.group}, rollout {difference.rollout}, call {difference.position}"
    console.print(f"{kind}: {at}, {difference.how}", markup=False)
    list_calls(difference.program[: difference.position + 1])
    before, after = _lines(difference.expected), _lines(difference.actual)
    for line in unified_diff(before, after, "private", "proxy", lineterm="", n=1):
        console.print(f"  {line}", markup=False, highlight=False)


def _lines(answer: Answer) -> list[str]:
    return "\n".join(str(part) for part in answer).splitlines()


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", type=int, default=1000, help="programs, over all drivers and modes")
    parser.add_argument("--seed", type=int, default=secrets.randbits(31))
    parser.add_argument(
        "--drivers",
        default="local,sqlite",
        help="of local, image (an image of this machine's programs), sqlite, postgres",
    )
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--rollouts", type=int, default=Plan.rollouts, help="rollouts in a group")
    parser.add_argument("--length", type=int, default=Plan.length, help="calls of a group's first program")
    parser.add_argument("--every-s", type=float, default=Plan.every_s, help="mean seconds between strikes")
    parser.add_argument("--at-once", type=int, default=Plan.at_once, help="groups that run at the same time")
    parser.add_argument("--twice", type=float, default=Plan.twice, help="share of programs for the noise floor")
    parser.add_argument("--members", type=int, default=Plan.members, help="members of a cluster; 1: no cluster")
    parser.add_argument("--logs", type=Path, help="directory to which the proxy's logs are copied")
    options = parser.parse_args()
    drivers, modes = options.drivers.split(","), options.modes.split(",")
    share = -(-options.programs // (len(drivers) * len(modes)))
    plan = Plan(
        share, options.rollouts, options.length, options.every_s, options.at_once, options.twice, options.logs,
        options.members,
    )  # fmt: skip
    tallies = [run(driver, mode, options.seed, plan) for driver in drivers for mode in modes]
    wrong, lost = sum(len(tally.wrong) for tally in tallies), sum(tally.lost.total() for tally in tallies)
    if wrong or lost:
        sys.exit(f"{wrong} answers were wrong, and {lost} rollouts were lost.")


if __name__ == "__main__":
    main()
