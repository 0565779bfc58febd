"""Faults of machines and networks while agents use a cluster: `python -m bench.cluster_chaos`. About eight minutes.

Three members and a PostgreSQL server run on machines of their own (`tests.network`), and agents make calls through each
of them. Each answer is compared with a model, and the logs with all answers. Needs root, PostgreSQL and libfaketime.
`--storms N` lets several faults come at once instead.
Exits with 1 if an answer was wrong, is not in the log, or was recorded twice, or if an agent was not answered again.
"""

import asyncio
import contextlib
import shutil
import signal
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from bench.machine import console, table
from proxy.cluster.postgres.joining import LEASE_S
from tests.machine import data_directory, until
from tests.network import Impairment, Machine
from tests.proxy.cluster.machines import DATABASE, MachineNode, Machines, machines
from tests.proxy.cluster.nodes import SLOW_STORE, Agent, LogReading, Truth, put_task, read_logs
from tests.sandboxes.postgres_cluster import Cluster, cluster

PAUSE_S = 0.05
"""How long an agent thinks before each third call."""
AGAIN_S = 60.0
"""How long agents may take to be answered after a fault."""
PLAIN = str.maketrans(dict.fromkeys(" ,;|%>", "-"))
"""Makes the name of a fault a part of a task's name."""
SLOW = "store-is-slow"
"""The file whose presence makes the store slow."""
STORE_BYTES = 32_000_000
"""Size of the file system of the store for each fault: it fills with the states of those before."""


@dataclass(slots=True)
class Outcome:
    """What a fault led to.

    Attributes:
        truth: The answers, and what was wrong with them.
        logs: What is wrong with the logs.
        during: Answers while the fault lasted.
        refused: Calls that got 503 while it lasted.
        again_s: Seconds from its end until each agent was answered; None if not all were.
    """

    truth: Truth = field(default_factory=Truth)
    logs: LogReading = field(default_factory=LogReading)
    during: int = 0
    refused: int = 0
    again_s: float | None = None

    @property
    def is_right(self) -> bool:
        return not self.truth.wrong and self.logs == LogReading() and self.again_s is not None


@dataclass
class Run(Machines):
    """The cluster, and a server that follows the database, on a machine of its own."""

    spare: Machine
    standby: Cluster


Fault = Callable[[Run, float], AbstractAsyncContextManager[None]]
"""Begins with the block, and ends with it. The seconds say how long the block will last."""


@asynccontextmanager
async def owner_without_database(run: Run, _: float) -> AsyncIterator[None]:
    """The owner of a task and the database do not hear each other."""
    run.network.cut([run.members["a"].machine], [run.database])
    yield


@asynccontextmanager
async def owner_without_others(run: Run, _: float) -> AsyncIterator[None]:
    """The owner of a task and the other members do not hear each other; all reach the database."""
    run.network.cut([run.members["a"].machine], run.others(run.members["a"]))
    yield


@asynccontextmanager
async def ingress_without_owner(run: Run, _: float) -> AsyncIterator[None]:
    """An ingress and the owner of a task do not hear each other."""
    run.network.cut([run.members["b"].machine], [run.members["a"].machine])
    yield


@asynccontextmanager
async def one_way(run: Run, _: float) -> AsyncIterator[None]:
    """What an ingress sends does not reach the owner; what the owner sends arrives."""
    run.network.cut([run.members["b"].machine], [run.members["a"].machine], back=False)
    yield


@asynccontextmanager
async def member_alone(run: Run, _: float) -> AsyncIterator[None]:
    """A member hears nobody."""
    run.network.cut([run.members["a"].machine], [run.database, *run.others(run.members["a"])])
    yield


@asynccontextmanager
async def slow_network(run: Run, _: float) -> AsyncIterator[None]:
    """Packets take 50 ms, 20 ms more or less, so that they overtake each other, and one in a hundred is lost."""
    run.network.impairment = Impairment(loss=0.01, delay_s=0.05, jitter_s=0.02)
    yield


@asynccontextmanager
async def lossy_network(run: Run, _: float) -> AsyncIterator[None]:
    """The same, and one packet in twenty is lost."""
    run.network.impairment = Impairment(loss=0.05, delay_s=0.05, jitter_s=0.02)
    yield


@asynccontextmanager
async def clocks(run: Run, seconds: float) -> AsyncIterator[None]:
    """The clocks of two members are ten minutes apart, and an owner is cut off from the database meanwhile."""
    a, b, _ = run.members.values()
    a.set_clock(300)
    b.set_clock(-300)
    await asyncio.sleep(seconds / 3)
    run.network.cut([a.machine], [run.database])
    yield
    for node in run.members.values():
        node.set_clock(0)


@asynccontextmanager
async def database_restart(run: Run, seconds: float) -> AsyncIterator[None]:
    """The database server is killed, and is back after a third of the time."""
    run.server.kill()
    await asyncio.sleep(seconds / 3)
    await asyncio.to_thread(run.server.start)
    yield


def filled(run: Run) -> Path:
    """Fill the file system of the store; return the file that does so."""
    filler = run.members["a"].folder / "store" / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while file.write(b"x" * 4096):
            pass
    return filler


@asynccontextmanager
async def full_store(run: Run, _: float) -> AsyncIterator[None]:
    """The file system of the store is full. A new task is made meanwhile."""
    filler = filled(run)
    await asyncio.to_thread(put_task, run.members["a"], "made-without-room")
    yield
    filler.unlink()


@asynccontextmanager
async def slow_store(run: Run, seconds: float) -> AsyncIterator[None]:
    """A request to the store takes up to 45 s. Other members need the states of an owner meanwhile.

    After a third of the time the owner and the database are cut off from each other.
    """
    owner = run.members["a"]
    slow = owner.folder / SLOW
    slow.touch()
    await asyncio.sleep(seconds / 3)
    run.network.cut([owner.machine], [run.database])
    yield
    slow.unlink()


@asynccontextmanager
async def failover(run: Run, seconds: float) -> AsyncIterator[None]:
    """The database's server is cut off, its synchronous standby is promoted, and takes its address over."""
    with run.server.connect() as connection:
        connection.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
        connection.execute("SELECT pg_reload_conf()")
        waiting = "SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'sync'"
        await until(lambda: connection.execute(waiting).fetchone() == (1,))
    # What was written before is on both servers, and what comes from here on too.
    run.network.cut([run.database], [run.spare, *(node.machine for node in run.members.values())])
    await asyncio.sleep(seconds / 3)
    run.database.remove(DATABASE)
    run.spare.add(DATABASE)
    with run.standby.connect() as connection:
        connection.execute("SELECT pg_promote()")
    run.server = run.standby
    yield


@contextmanager
def stopped(node: MachineNode) -> Iterator[None]:
    """Stop a member's process, as a machine does that is suspended, and let it go on."""
    assert node.process is not None
    node.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        node.process.send_signal(signal.SIGCONT)


@asynccontextmanager
async def all_killed(run: Run, seconds: float) -> AsyncIterator[None]:
    """An owner, an ingress and the database are killed together while the store is full, and start when it is not."""
    filler = filled(run)
    killed = [run.members["a"], run.members["b"]]
    for node in killed:
        node.kill()
    run.server.kill()
    await asyncio.sleep(seconds / 4)
    await asyncio.to_thread(run.server.start)
    await asyncio.sleep(seconds / 4)
    filler.unlink()
    await asyncio.gather(*(asyncio.to_thread(node.start) for node in killed))
    yield


@asynccontextmanager
async def stopped_in_turn(run: Run, seconds: float) -> AsyncIterator[None]:
    """Each member is stopped until others have its tasks, and then goes on with its calls. The store is slow."""
    slow = run.members["a"].folder / SLOW
    slow.touch()
    for node in run.members.values():
        with stopped(node):
            await asyncio.sleep(max(LEASE_S + 2, seconds / 4))
        await asyncio.sleep(1)
    yield
    slow.unlink()


@asynccontextmanager
async def storm(run: Run, seconds: float) -> AsyncIterator[None]:
    """Packets are lost, all of one way in a circle; clocks are off; the store is slow and full; kills and a stop."""
    a, b, c = run.members.values()
    run.network.impairment = Impairment(loss=0.02, delay_s=0.02, jitter_s=0.01)
    a.set_clock(600)
    b.set_clock(-600)
    slow, filler = a.folder / SLOW, filled(run)
    slow.touch()
    for sender, receiver in ((a, b), (b, c), (c, a)):
        run.network.cut([sender.machine], [receiver.machine], back=False)
    await asyncio.sleep(seconds / 3)
    with stopped(c):
        a.kill()
        run.server.kill()
        await asyncio.sleep(seconds / 6)
        await asyncio.to_thread(run.server.start)
        await asyncio.sleep(LEASE_S + 1)
    a.set_clock(0)
    run.network.cut([b.machine], [run.database], back=False)
    slow.unlink()
    filler.unlink()
    await asyncio.to_thread(a.start)
    yield
    b.set_clock(0)


FAULTS: dict[str, Fault] = {
    "owner | database": owner_without_database,
    "owner | other members": owner_without_others,
    "ingress | owner": ingress_without_owner,
    "ingress > owner only": one_way,
    "a member alone": member_alone,
    "50 ms and 1 % lost": slow_network,
    "50 ms and 5 % lost": lossy_network,
    "clocks 10 min apart": clocks,
    "database killed": database_restart,
    "store full": full_store,
    "store slow; owner | database": slow_store,
    "database fail-over": failover,
}
STORMS: dict[str, Fault] = {
    "owner, ingress, database killed": all_killed,
    "each owner stopped; store slow": stopped_in_turn,
    "everything at once": storm,
}
"""Several faults at once."""


async def meet(run: Run, name: str, seconds: float, number: int = 0) -> Outcome:
    """Let agents make calls before a fault, while it lasts, and until each of them was answered after it."""
    outcome, members = Outcome(), list(run.members.values())
    truth, stop = outcome.truth, asyncio.Event()
    agents = []
    for place, owner in enumerate(members):
        task = f"{name}, of {owner.name} {number}"
        await asyncio.to_thread(put_task, owner, task.translate(PLAIN))
        # One at each member, and one that changes its member with each turn.
        homes = [[member] for member in members] + [members[1:]]
        agents += [
            Agent(f"{index}-{place}", task.translate(PLAIN), home, truth, index // 2, PAUSE_S)
            for index, home in enumerate(homes)
        ]
    async with httpx.AsyncClient(limits=httpx.Limits(max_connections=None)) as client:
        running = [asyncio.create_task(agent.run(client, stop)) for agent in agents]
        await until(lambda: all(agent.answers > 3 for agent in agents) or bool(truth.wrong))
        before, refused = truth.answers, truth.refused.copy()
        began = time.monotonic()
        async with {**FAULTS, **STORMS}[name](run, seconds):
            await asyncio.sleep(max(0.0, seconds - (time.monotonic() - began)))
            outcome.during, outcome.refused = truth.answers - before, (truth.refused - refused).total()
        run.network.heal()
        healed = time.monotonic()
        seen = {agent.name: agent.answers for agent in agents}
        with contextlib.suppress(TimeoutError):
            await until(lambda: all(agent.answers > seen[agent.name] for agent in agents), within_s=AGAIN_S)
            outcome.again_s = time.monotonic() - healed
        stop.set()
        await asyncio.gather(*running)
    outcome.logs = await asyncio.to_thread(read_logs, run.dsn, truth)
    return outcome


@contextmanager
def small_store(folder: Path, faults: int) -> Iterator[None]:
    """Give the store a small file system of its own."""
    store = folder / "store"
    store.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={STORE_BYTES * faults}", "tmpfs", store], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", store], check=True)


def main() -> None:
    parser = ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=30.0, help="how long a fault lasts")
    parser.add_argument("--faults", default=",".join(FAULTS), help="names, separated by commas")
    parser.add_argument(
        "--storms", type=int, default=0, help="rounds of several faults at once, in place of single ones"
    )
    parser.add_argument("--logs", type=Path, help="directory to which the members' logs are copied")
    options = parser.parse_args()
    names = [name for name in FAULTS if name in [each.strip() for each in options.faults.split(",")]]
    names = [*STORMS] * options.storms or names
    shown = table(
        "Faults of a cluster of three members", "", "answers", "meanwhile", "503", "wrong", "not in the log",
        "recorded twice", "all answered again, s",
    )  # fmt: skip
    outcomes = []
    with ExitStack() as stack:
        folder = stack.enter_context(data_directory())
        stack.enter_context(small_store(folder, len(names)))
        cluster_of, spares = stack.enter_context(
            machines(folder, "abc", "standby", clocks=True, module=SLOW_STORE, SLOW_STORE=str(folder / SLOW))
        )
        spare = spares["standby"]
        standby = stack.enter_context(cluster(spare.prefix, spare.address, cluster_of.server))
        run = Run(**vars(cluster_of), spare=spare, standby=standby)
        for number, name in enumerate(names):
            outcome = asyncio.run(meet(run, name, options.seconds, number))
            outcomes.append(outcome)
            again = "not all" if outcome.again_s is None else f"{outcome.again_s:.1f}"
            shown.add_row(
                name, str(outcome.truth.answers), str(outcome.during), str(outcome.refused),
                str(len(outcome.truth.wrong)), str(len(outcome.logs.lost)), str(len(outcome.logs.twice)), again,
            )  # fmt: skip
            # A run may end early.
            console.print(f"{number} {name}: {outcome.truth.answers} answers", markup=False)
            for line in [*outcome.truth.wrong, *outcome.logs.lost, *outcome.logs.twice][:10]:
                console.print(f"{name}: {line}", markup=False)
        if options.logs:
            for node in run.members.values():
                shutil.copy(node.log_file, options.logs)
    console.print(shown)
    if not all(outcome.is_right for outcome in outcomes):
        sys.exit("A fault led to a wrong answer, or an agent was not answered again.")


if __name__ == "__main__":
    main()
