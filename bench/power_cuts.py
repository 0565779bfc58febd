"""Power cuts after every write of a scenario: `python -m bench.power_cuts`.

The operations of `tests.cut_scenario` (a proxy, with both durabilities) and of `tests.layer_cuts` (the commits of file
layers) are recorded with strace. After each of them power is cut, and three disks are built: with all that was written,
with only what was synced, and with random parts of the rest. A proxy, or the layers, are opened on each disk. Exits
with 1 if a tree was inconsistent, an answer or a layer false, or a rollout elsewhere than its agent saw it.
"""

import asyncio
import logging
import random
import sys
import tempfile
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import structlog

from bench.machine import console, table
from tests import cut_scenario, layer_cuts
from tests.power_cuts import VARIANTS, Disk, Operation, record

Verify = Callable[[Path, Mapping[str, int]], Counter[str]]
"""Opens a disk after a cut, with the answers that each rollout had received; returns how often each outcome came."""
OUTCOMES = ("continued", "refused", "unknown", "built", "intact", "damaged", "false")
"""Outcomes of rollouts, of root states (`continued`, `built`) and of layers (`intact`, `damaged`)."""


def main() -> None:
    """Cut, verify, and print what came of it."""
    options = ArgumentParser(description=__doc__)
    options.add_argument("--every", type=int, default=1, help="cut only after each so many operations")
    options.add_argument("--seed", type=int, default=0, help="draws the random disks")
    chosen = options.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    shared = Path("/dev/shm")  # noqa: S108 - a tmpfs
    scenarios: dict[str, tuple[list[str], Verify]] = {
        durability: (["-m", "tests.cut_scenario", "{data}", durability], _of_proxy(durability))
        for durability in ("process", "power")
    }
    scenarios["layers"] = (["-m", "tests.layer_cuts", "{data}"], layer_cuts.verify)
    shown = table("Power cuts", "scenario", "operations", "disks", *OUTCOMES)
    wrong = 0
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as folder:
        for name, (arguments, verify) in scenarios.items():
            data = Path(folder) / name
            operations = record([part.format(data=data) for part in arguments], data, Path(folder) / "trace")
            cut_scenario.after_reboot()
            cuts = range(0, len(operations) + 1, chosen.every)
            seen = _cut(operations, cuts, verify, Path(folder), chosen.seed)
            disks = len(cuts) * len(VARIANTS)
            shown.add_row(name, *map(str, (len(operations), disks, *(seen[outcome] for outcome in OUTCOMES))))
            wrong += seen["false"]
    console.print(shown)
    sys.exit(1 if wrong else 0)


def _of_proxy(durability: str) -> Verify:
    return lambda data, answered: asyncio.run(cut_scenario.verify(data, durability, answered))


def _cut(operations: Sequence[Operation], cuts: Iterable[int], verify: Verify, folder: Path, seed: int) -> Counter[str]:
    """Cut the power after so many operations each time; return how often each outcome came."""
    seen: Counter[str] = Counter()
    for cut in cuts:
        disk = Disk(operations[:cut])
        for variant in VARIANTS:
            with tempfile.TemporaryDirectory(dir=folder) as name:
                target = Path(name) / "data"
                disk.build(target, variant, random.Random(seed + cut))  # noqa: S311 - no secret
                try:
                    seen += verify(target, disk.answered)
                except Exception as error:  # noqa: BLE001 - whatever it is, this disk was not read rightly
                    seen["false"] += 1
                    console.print(f"cut {cut} ({variant}): {error!r}")
    return seen


if __name__ == "__main__":
    main()
