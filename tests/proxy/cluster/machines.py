"""Members on machines of their own, which share nothing but a network (`tests.network`), and clocks that can be set.

Agents reach a member of their machine by a socket that this process made, so no partition is between them.
"""

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from typing_extensions import override

from tests.network import Machine, Network, network
from tests.proxy.cluster.nodes import Node
from tests.sandboxes.postgres_cluster import Cluster, cluster

FAKE_CLOCK = next(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"), None)
"""Debian's `libfaketime`; None if it is not installed."""
DATABASE = "10.77.0.100"
"""The address of the database, which moves from one server to another."""


def require_clocks() -> None:
    """Skip the test if no clock can be set for a single process."""
    if FAKE_CLOCK is None:
        pytest.skip("no clock can be set for a process (Debian: apt-get install libfaketime)")


@dataclass
class MachineNode(Node):
    """A member on a machine. `clock`: the file that says how far its clock is off; None for the clock of all."""

    machine: Machine = field(kw_only=True)
    clock: Path | None = field(default=None, kw_only=True)
    listener: socket.socket = field(default_factory=lambda: socket.create_server(("127.0.0.1", 0)), kw_only=True)

    def __post_init__(self) -> None:
        self.port = self.listener.getsockname()[1]

    @property
    @override
    def command(self) -> list[str]:
        return [*self.machine.prefix, *super().command, "--fd", str(self.listener.fileno())]

    @property
    @override
    def descriptors(self) -> tuple[int, ...]:
        return (self.listener.fileno(),)

    @property
    @override
    def settings(self) -> dict[str, str]:
        if self.clock is None:
            return super().settings
        return super().settings | {
            "LD_PRELOAD": str(FAKE_CLOCK), "FAKETIME_TIMESTAMP_FILE": str(self.clock), "FAKETIME_CACHE_DURATION": "1",
            # How many seconds pass is the same everywhere; only the date differs.
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }  # fmt: skip

    def set_clock(self, offset_s: int) -> None:
        """Set the clock of this member a number of seconds ahead, or back."""
        assert self.clock is not None
        self.clock.write_text(f"{offset_s:+d}")


@dataclass
class Machines:
    """A cluster on a network of its own.

    Attributes:
        network: What carries its packets.
        server: The database server, on the first machine.
        database: That machine; it has the address `DATABASE`.
        members: The members by name, each on its machine.
    """

    network: Network
    server: Cluster
    database: Machine
    members: dict[str, MachineNode]

    @property
    def dsn(self) -> str:
        """Connection string of the database for this process."""
        return f"{self.server.socket_dsn} dbname=chaos"

    def others(self, node: MachineNode) -> list[Machine]:
        """Return the machines of the other members."""
        return [other.machine for other in self.members.values() if other is not node]


@contextmanager
def machines(
    folder: Path, names: str, *spare: str, clocks: bool = False, module: str = "forkpoint", **options: str
) -> Iterator[tuple[Machines, dict[str, Machine]]]:
    """Run a member for each character of names; yield them, and the machines without a member by name.

    Args:
        folder: Where their data is.
        names: Names of the members.
        spare: Names of further machines.
        clocks: Whether their clocks can be set.
        module: What a member runs; see `Node`.
        options: Environment variables of the members.
    """
    with ExitStack() as stack:
        if clocks:
            stack.callback(_remove_clocks)
        net, all_machines = stack.enter_context(network("database", *spare, *names))
        database = all_machines["database"]
        database.add(DATABASE)
        server = stack.enter_context(cluster(database.prefix, DATABASE))
        server.create("chaos", "SELECT 1")
        members = {}
        for name in names:
            clock = folder / f"{name}.clock" if clocks else None
            dsn = f"{server.dsn} dbname=chaos"
            members[name] = MachineNode(
                folder, name, dsn, options, module=module, machine=all_machines[name], clock=clock
            )
            stack.callback(_end, members[name])
            if clock is not None:
                members[name].set_clock(0)
        for node in members.values():
            node.launch()
        for node in members.values():
            node.await_ready()
        yield Machines(net, server, database, members), {name: all_machines[name] for name in spare}


def _remove_clocks() -> None:
    """Remove the shared memory and semaphores that `libfaketime` leaves of processes that were killed."""
    for left in Path("/dev/shm").glob("*faketime_s*_*"):
        if not Path("/proc", left.name.rpartition("_")[2]).exists():
            left.unlink(missing_ok=True)


def _end(node: MachineNode) -> None:
    if node.process is not None and node.process.poll() is None:
        node.kill()
    node.listener.close()
