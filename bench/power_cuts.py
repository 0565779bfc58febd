"""Power cuts after every write of a scenario, for both durabilities: `python -m bench.power_cuts`.

The operations of `tests.cut_scenario` are recorded with strace. After each of them power is cut, and three disks are
built: with all that was written, with only what was synced, and with random parts of the rest. A proxy is opened on
each disk. Exits with 1 if a tree was inconsistent, an answer false, or a rollout elsewhere than its agent saw it.
"""

import asyncio
import logging
import random
import sys
import tempfile
from argparse import ArgumentParser
from collections import Counter
from pathlib import Path

import structlog

from bench.machine import console, table
from tests import cut_scenario
from tests.power_cuts import VARIANTS, Disk, record


def main() -> None:
    """Cut, verify, and print what came of it."""
    options = ArgumentParser(description=__doc__)
    options.add_argument("--every", type=int, default=1, help="cut only after each so many operations")
    options.add_argument("--seed", type=int, default=0, help="draws the random disks")
    chosen = options.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    shared = Path("/dev/shm")  # noqa: S108 - a tmpfs
    shown = table("Power cuts", "durability", "operations", "disks", "continued", "refused", "unknown", "false")
    wrong = 0
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as folder:
        for durability in ("process", "power"):
            data = Path(folder) / durability
            arguments = ["-m", "tests.cut_scenario", str(data), durability]
            operations = record(arguments, data, Path(folder) / "trace")
            cut_scenario.after_reboot()
            seen: Counter[str] = Counter()
            disks = 0
            for cut in range(0, len(operations) + 1, chosen.every):
                disk = Disk(operations[:cut])
                for variant in VARIANTS:
                    disks += 1
                    with tempfile.TemporaryDirectory(dir=folder) as name:
                        target = Path(name) / "data"
                        disk.build(target, variant, random.Random(chosen.seed + cut))  # noqa: S311 - no secret
                        try:
                            seen += asyncio.run(cut_scenario.verify(target, durability, disk.answered))
                        except Exception as error:  # noqa: BLE001 - whatever it is, this disk was not read rightly
                            seen["false"] += 1
                            console.print(f"cut {cut} ({variant}): {error!r}")
            counts = [seen[name] for name in ("continued", "refused", "unknown", "false")]
            shown.add_row(durability, *(str(number) for number in (len(operations), disks, *counts)))
            wrong += seen["false"]
    console.print(shown)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
