"""Rollouts while sandboxes, the proxy and dockerd are killed at random: `python -m bench.kill_storm`.

Every answer is compared with a model of the trajectory. Afterwards the proxy is killed, restarted and stopped, and what
is left on the machine is listed. The Docker daemon is a separate one. Exits with 1 if an answer was wrong, a rollout
was not answered, or something is left.
"""

import os
import secrets
import sys
import time
from argparse import ArgumentParser
from collections import Counter
from contextlib import ExitStack

from bench.machine import console, table
from tests.dockerd import Dockerd, dockerd
from tests.machine import data_directory, served
from tests.sandboxes.docker import make_bash_image
from tests.storm import Storm


def shares(rollouts: int, drivers: list[str]) -> dict[str, int]:
    """Return the number of rollouts of each driver."""
    whole, rest = divmod(rollouts, len(drivers))
    return {driver: whole + (number < rest) for number, driver in enumerate(drivers)}


def counted(counter: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counter.most_common()) or "none"


def report(storm: Storm, storm_s: float, left: list[str]) -> None:
    shown = table("Rollouts under kill -9", "", "")
    for name, value in {
        "seed": str(storm.seed),
        "rollouts": ", ".join(f"{driver} {count}" for driver, count in storm.rollouts.items()),
        "calls compared": f"{storm.calls - storm.hidden}",
        "answers lost with a proxy": f"{storm.hidden}",
        "how answered": counted(storm.sources),
        "kills": f"{storm.kills.total()}",
        "errors returned to clients": counted(storm.errors),
        "rollouts not answered": f"{len(storm.given_up)}",
        "wrong answers": f"{len(storm.wrong)}",
        "storm, s": f"{storm_s:.0f}",
        "all of before gone after the restart, s": f"{storm.gone_s:.1f}",
        "left over": f"{len(left)}",
        "shims, empty groups that dockerd left, killed in a start": f"{len(storm.remains)}",
    }.items():
        shown.add_row(name, value)
    console.print(shown)
    console.print(f"killed: {counted(storm.kills)}", markup=False)
    for line in [*(str(wrong) for wrong in storm.wrong), *storm.given_up, *left][:40]:
        console.print(line, markup=False)


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rollouts", type=int, default=1000)
    parser.add_argument("--drivers", default="local,image")
    parser.add_argument("--every-s", type=float, default=2.0, help="mean seconds between kills")
    parser.add_argument(
        "--after-s", type=float, default=60.0, help="seconds in which all earlier processes must end after a restart"
    )
    parser.add_argument("--seed", type=int, default=secrets.randbits(31))
    options = parser.parse_args()
    drivers = options.drivers.split(",")
    with ExitStack() as stack:
        daemon: Dockerd | None = None
        if "image" in drivers:
            daemon = stack.enter_context(dockerd())
            os.environ["DOCKER_HOST"] = daemon.host
            make_bash_image()
        folder = stack.enter_context(data_directory())
        proxy = stack.enter_context(served(folder))
        storm = Storm(proxy, daemon, shares(options.rollouts, drivers), options.seed, every_s=options.every_s)
        began = time.monotonic()
        storm.run()
        storm_s = time.monotonic() - began
        left = storm.leftovers(options.after_s)
        report(storm, storm_s, left)
    if storm.wrong or storm.given_up or left:
        sys.exit("Some answer was wrong, some rollout was not answered, or something is left.")


if __name__ == "__main__":
    main()
