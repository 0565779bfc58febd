"""Where the CPU time of a miss goes, by process: `python -m bench.miss_cpu`.

Sessions make calls that are all new to the tree, as in table 1 of `bench.misspath`. The kernel counts the CPU time of
each thread that lives on. What is left of the control group's time is that of processes that came and went: shells,
their anchors, and the tools. Needs a writable `cpuacct` control group (cgroup version 1).

The data directory is on the file system of `--data`. On ext4 without a journal, making files costs more CPU after many
were deleted, and other programs' deletions count too.
"""

import time
from argparse import ArgumentParser, Namespace
from collections import defaultdict
from pathlib import Path

from bench.client import Server
from bench.machine import console, median, table
from bench.misspath import KINDS, Client, at_once
from bench.shells import CpuGroup
from tests.machine import Proxy, data_directory

SETTLE_S = 0.5
"""Pause before and after a turn, in which the work that follows the last calls ends."""
OTHERS = "shells, anchors, tools"


def spent(proxy: Proxy) -> dict[str, float]:
    """Return the CPU seconds so far of the proxy's threads, of its launcher and of all pid 1s."""
    assert proxy.process is not None
    root, seconds = proxy.process.pid, defaultdict[str, float](float)
    for thread in Path(f"/proc/{root}/task").iterdir():
        name = "the proxy's event loop" if int(thread.name) == root else "the proxy's other threads"
        seconds[name] += _seconds(thread / "schedstat")
    for pid, _ in proxy.processes():
        try:
            command = Path(f"/proc/{pid}/comm").read_text().strip()
        except OSError:
            continue
        # Shells and tools that live at this moment are among those that come and go.
        if command == "init":
            seconds["pid 1 of the sandboxes"] += _seconds(Path(f"/proc/{pid}/schedstat"))
        elif command.startswith("python"):
            seconds["the launcher"] += _seconds(Path(f"/proc/{pid}/schedstat"))
    return seconds


def _seconds(schedstat: Path) -> float:
    try:
        return int(schedstat.read_text().split()[0]) / 1e9
    except OSError:
        return 0.0


def turn(kind: str, number: int, clients: list[Client], cpu: CpuGroup, proxy: Proxy, calls: int) -> dict[str, float]:
    """Make new calls in all sessions at once; return the CPU time of a call in ms, by process."""
    time.sleep(SETTLE_S)
    before, cpu_s = spent(proxy), cpu.seconds()
    command = KINDS[kind]
    at_once(
        lambda own: [
            clients[own].run(command.format(name=f"cpu-{own}", tag=f"{own} {number} {call}")).seconds
            for call in range(calls)
        ],
        len(clients),
    )
    time.sleep(SETTLE_S)
    after = spent(proxy)
    shares = {name: after[name] - before[name] for name in after}
    total = cpu.seconds() - cpu_s
    shares |= {OTHERS: total - sum(shares.values()), "in all": total}
    return {name: seconds / (calls * len(clients)) * 1e3 for name, seconds in shares.items()}


def measure(options: Namespace) -> None:
    """Run turns of both kinds of calls, and print the medians."""
    cpu = CpuGroup("miss-cpu")
    turns: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    with data_directory(options.data) as folder:
        folder.chmod(0o711)
        proxy = Proxy(folder, wrapper=cpu.wrapper)
        proxy.start()
        try:
            assert proxy.process is not None
            server = Server(proxy.url, proxy.process.pid)
            clients = [Client(server, f"cpu-{number}") for number in range(options.concurrency)]
            for client in clients:
                client.run("true")
            for number in range(options.rounds):
                for kind in KINDS:
                    turns[kind].append(turn(kind, number, clients, cpu, proxy, options.calls))
            for client in clients:
                client.close()
        finally:
            proxy.stop()
            exact = cpu.exact
            cpu.close()
    group = "" if exact else ", CPU of the whole machine"
    shown = table(f"ms of CPU for each call, {options.concurrency} sessions at once{group}", "", *KINDS)
    for name in sorted(turns["file call"][0], key=lambda name: -turns["file call"][0][name]):
        shown.add_row(name, *(f"{median([shares.get(name, 0.0) for shares in turns[kind]]):.2f}" for kind in KINDS))
    console.print(shown)


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="turns of each kind of call")
    parser.add_argument("--concurrency", type=int, default=4, help="sessions at once")
    parser.add_argument("--calls", type=int, default=40, help="calls of each session in each turn")
    # Not /tmp, which may be in memory: layers are on a disk.
    disk = Path("/var/tmp")  # noqa: S108 - a directory of its own is made in it
    parser.add_argument("--data", type=Path, default=disk, help="directory below which the data is")
    measure(parser.parse_args())


if __name__ == "__main__":
    main()
