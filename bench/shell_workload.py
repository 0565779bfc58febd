"""Recorded agents' shell commands through a private proxy: `python -m bench.shell_workload WORKLOAD.jsonl`.

Prints the hit rate without annotations, the number of answers that differ from an uncached run, the number that differ
between two uncached runs, and whether the host is unchanged: the commands are destructive and must stay in the sandbox.
"""

import asyncio
from argparse import ArgumentParser
from pathlib import Path
from tempfile import TemporaryDirectory

import orjson
from rich.text import Text

from bench.host import Fingerprint, changed, fingerprint
from bench.machine import console, machine
from bench.workloads.recordings import convert
from proxy.cli.replay.report import as_json
from proxy.cli.replay.show import make_runs, proxy_at, show
from proxy.cli.replay.workload import Workload, read_workload
from proxy.cli.text import printable

PATHS_SHOWN = 20


def show_host(before: Fingerprint, after: Fingerprint, fixtures: set[str]) -> None:
    """Return the watched paths that changed, and names that only sandboxes should have."""
    paths = changed(before, after)
    escaped = sorted(fixtures & after.keys() - before.keys())
    console.print(
        f"host: {len(paths)} of {len(after):,} watched paths changed (other programs of this machine included)"
    )
    for path in paths[:PATHS_SHOWN]:
        console.print(Text(f"  {printable(path)}"))
    if len(paths) > PATHS_SHOWN:
        console.print(f"  and {len(paths) - PATHS_SHOWN} more")
    if escaped:
        console.print(Text(f"out of the sandboxes: {', '.join(escaped)}", style="bold red"))


def run(workload: Workload, skipped: int, *, at_once: int, json: Path | None) -> None:
    watched, mounts = fingerprint(), _mounts()
    with proxy_at(None) as proxy:
        report = asyncio.run(
            make_runs(workload, proxy, [True, False, False], at_once=at_once, keep_names=False, console=console)
        )
    console.print(machine())
    show(report, console)
    console.print(f"{skipped} recorded calls were skipped: they never reached a tool")
    show_host(watched, fingerprint(), {"/testbed", "/system", "/workspace", "/backup"})
    console.print(f"mounts: {mounts} before, {_mounts()} after")
    if json is not None:
        json.write_bytes(orjson.dumps(as_json(report.runs, report.comparisons)))


def _mounts() -> int:
    return len(Path("/proc/self/mountinfo").read_text().splitlines())


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workload", type=Path, help="JSONL file next to its fixtures")
    parser.add_argument("--rollouts", type=int, default=4, help="concurrent rollouts")
    parser.add_argument("--limit", type=int, help="maximum number of rollouts")
    parser.add_argument("--json", type=Path, help="file for figures, errors and differences")
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        path, skipped = convert([options.workload], Path(folder))
        workload = read_workload([path]).select(limit=options.limit)
        run(workload, skipped, at_once=options.rollouts, json=options.json)


if __name__ == "__main__":
    main()
