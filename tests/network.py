"""A network of small machines inside this one: network namespaces, whose packets a thread of this process carries.

Each machine has an address of both families and nothing else in common with the others. The thread loses, delays and
reorders packets as it is told, for each direction between two machines. So it needs neither a bridge nor the kernel's
`netem`, which few kernels of containers have. Everything ends with this process.
"""

import fcntl
import functools
import heapq
import itertools
import os
import random
import select
import shutil
import struct
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

import pytest

from tests.machine import wait_until

_TUNSETIFF, _TUN, _WITHOUT_HEADER = 0x400454CA, 0x0001, 0x1000
_names = itertools.count()


@dataclass(frozen=True, slots=True)
class Impairment:
    """What happens to packets: the share that is lost, the mean delay, and the largest deviation from it."""

    loss: float = 0.0
    delay_s: float = 0.0
    jitter_s: float = 0.0


@dataclass(eq=False)
class Machine:
    """A network namespace. `address` is its own, and `addresses` are all that the network brings to it."""

    name: str
    number: int
    holder: "subprocess.Popen[bytes]"
    tun: int
    addresses: set[IPv4Address | IPv6Address] = field(default_factory=set)

    @property
    def address(self) -> str:
        return f"10.77.0.{self.number}"

    @property
    def address6(self) -> str:
        return f"fd77::{self.number:x}"

    @property
    def prefix(self) -> tuple[str, ...]:
        """What runs a command on this machine. The command keeps the process that it is given."""
        return ("nsenter", f"--net=/proc/{self.holder.pid}/ns/net", "--")

    def run(self, *command: str) -> None:
        subprocess.run([*self.prefix, *command], check=True, capture_output=True)

    def add(self, address: str) -> None:
        """Give the machine an address. The same address of another machine must be removed before."""
        version6 = ":" in address
        extra = ("nodad",) if version6 else ()
        self.run("ip", "addr", "add", f"{address}/{64 if version6 else 24}", "dev", "net0", *extra)
        self.addresses.add(IPv6Address(address) if version6 else IPv4Address(address))

    def remove(self, address: str) -> None:
        """Take an address away."""
        self.run("ip", "addr", "del", f"{address}/{64 if ':' in address else 24}", "dev", "net0")
        self.addresses.discard(IPv6Address(address) if ":" in address else IPv4Address(address))


class Network:
    """Machines, and what happens to the packets between them.

    Attributes:
        impairment: What happens to all packets that are not cut off.
        carried: How many packets were carried.
        lost: How many were lost, those of a partition among them.
    """

    def __init__(self, seed: int = 1) -> None:
        self.impairment = Impairment()
        self.carried = self.lost = 0
        self._machines: dict[int, Machine] = {}
        self._cut: set[tuple[int, int]] = set()
        # The same losses for the same packets, and no secret.
        self._dice = random.Random(seed)  # noqa: S311
        self._poll = select.epoll()
        self._waiting: list[tuple[float, int, int, bytes]] = []
        self._numbers = itertools.count()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._carry, daemon=True)

    def machine(self, name: str) -> Machine:
        """Start a machine."""
        number = len(self._machines) + 1
        device, tun = f"fpn{os.getpid() % 100000}x{next(_names)}", os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH", device.encode(), _TUN | _WITHOUT_HEADER))
        # It is killed with this thread, so a machine must be made by a thread that stays.
        command = ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "sleep", "infinity"]
        holder = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
        own = Path("/proc/self/ns/net").stat().st_ino
        space = Path(f"/proc/{holder.pid}/ns/net")
        wait_until(lambda: space.stat().st_ino != own, "the namespace is not there")
        subprocess.run(["ip", "link", "set", device, "netns", str(holder.pid), "name", "net0"], check=True)
        machine = Machine(name, number, holder, tun)
        for link in ("lo", "net0"):
            machine.run("ip", "link", "set", link, "up")
        machine.add(machine.address)
        machine.add(machine.address6)
        self._machines[tun] = machine
        self._poll.register(tun, select.EPOLLIN)
        return machine

    def cut(self, some: Iterable[Machine], others: Iterable[Machine], *, back: bool = True) -> None:
        """Lose all packets from some machines to others, and those back."""
        for one, other in itertools.product(some, tuple(others)):
            self._cut.add((one.tun, other.tun))
            if back:
                self._cut.add((other.tun, one.tun))

    def heal(self) -> None:
        """Carry all packets again, at once."""
        self._cut.clear()
        self.impairment = Impairment()

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End all machines. What runs on them must have ended."""
        self._is_over.set()
        if self._thread.is_alive():
            self._thread.join()
        for machine in self._machines.values():
            machine.holder.kill()
            machine.holder.wait()
            os.close(machine.tun)
        self._poll.close()

    def _carry(self) -> None:
        while not self._is_over.is_set():
            waiting = self._waiting
            pause = max(0.0, waiting[0][0] - time.monotonic()) if waiting else 0.1
            for tun, _ in self._poll.poll(min(pause, 0.1)):
                with suppress(BlockingIOError):
                    for _ in range(64):
                        self._take(tun, os.read(tun, 65536))
            now = time.monotonic()
            while waiting and waiting[0][0] <= now:
                _, _, receiver, packet = heapq.heappop(waiting)
                self._give(receiver, packet)

    def _take(self, sender: int, packet: bytes) -> None:
        """Take a packet that a machine has sent."""
        receiver = self._receiver(packet)
        if receiver is None:
            return
        how = self.impairment
        if (sender, receiver) in self._cut or (how.loss and self._dice.random() < how.loss):
            self.lost += 1
        elif how.delay_s:
            due = time.monotonic() + how.delay_s + self._dice.uniform(-how.jitter_s, how.jitter_s)
            heapq.heappush(self._waiting, (due, next(self._numbers), receiver, packet))
        else:
            self._give(receiver, packet)

    def _give(self, receiver: int, packet: bytes) -> None:
        # A full queue loses packets, as the network's own queues do.
        with suppress(BlockingIOError, OSError):
            os.write(receiver, packet)
            self.carried += 1

    def _receiver(self, packet: bytes) -> int | None:
        if packet[0] >> 4 == 4:
            to: IPv4Address | IPv6Address = IPv4Address(packet[16:20])
        else:
            to = IPv6Address(packet[24:40])
        return next((tun for tun, machine in tuple(self._machines.items()) if to in machine.addresses), None)


@contextmanager
def network(*names: str, seed: int = 1) -> Iterator[tuple[Network, dict[str, Machine]]]:
    """Run a network of machines with these names for the duration of the block."""
    net = Network(seed)
    try:
        machines = {name: net.machine(name) for name in names}
        net.start()
        yield net, machines
    finally:
        net.close()


def require_network() -> None:
    """Skip the test if this process cannot make namespaces."""
    if missing := _missing():
        pytest.skip(f"no network of namespaces can be made here: {missing}")


@functools.cache
def _missing() -> str:
    if os.geteuid() != 0:
        return "it needs root"
    programs = [name for name in ("unshare", "nsenter", "ip", "setpriv") if shutil.which(name) is None]
    if programs:
        return f"{', '.join(programs)} is not installed"
    try:
        with network("probe"):
            return ""
    except (OSError, subprocess.CalledProcessError) as error:
        return str(error)
