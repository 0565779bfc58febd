"""The snapshot policy against the best choice in hindsight, on recorded traces: `python -m bench.regret`.

A simulation of the pure parts: each recorded task is a group of rollouts that run concurrently, with agents that think
5 s between calls (exponential). A hit is answered at once. A miss needs a sandbox at its node: an idle one, or else it
is a *demand*, which costs a restore from the nearest snapshot at or above the node and the replay from there. After
each call the policy decides whether to take a snapshot. The demands do not depend on the policy, so the best choice in
hindsight is exact: a dynamic programme over each task's tree finds the set of snapshots with the least

    total = seconds of freezing + seconds of restoring + seconds of replaying.

The seconds of the calls themselves are left out, because they are the same for every policy. Sandboxes further up are
left out too; they would make all policies look better. The root state is always kept. The seconds of a call are the
recorded `executed_seconds` (shell, SQL), or for API calls 0.5 to 5 s, log-uniform by a digest of the call. The cost of
freezing and restoring files is measured at the start with the local driver. For live processes it is what CRIU took for
a shell and some jobs on two cores, or the value of `--processes`. No policy can avoid most of the restores.
"""

import asyncio
import heapq
import random
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.machine import console, median, table
from bench.sandboxes import execute
from bench.traces import WORKLOADS, Move, Traces, read_traces, resampled
from sandboxes.local.driver import LocalDriver
from sandboxes.spec import EnvironmentSpec
from snapshots.costs import Costs, KindCosts, Mean
from snapshots.criu.checkpoints import CriuCheckpointer
from snapshots.policy import Prospect, Reuse, at_stake_s, expected_uses, is_cheap, worth_keeping
from snapshots.store import SnapshotStore

THINK_S = 5.0
SEALED_S = 0.02


@dataclass(slots=True, eq=False)
class Position:
    """A state in the simulated tree.

    Attributes:
        seconds: Seconds of the call that first reached it.
        behind: Number of rollouts above it at that time.
    """

    parent: "Position | None"
    seconds: float
    known: "dict[str, Position]" = field(default_factory=dict)
    children: "list[Position]" = field(default_factory=list)
    kept: bool = False
    passes: int = 0
    demands: int = 0
    behind: int = 0


@dataclass(slots=True)
class Total:
    """Seconds by part, summed over tasks. best_s: the cost of the best choice of snapshots."""

    freeze_s: float = 0.0
    restore_s: float = 0.0
    replay_s: float = 0.0
    best_s: float = 0.0
    kept: int = 0
    states: int = 0
    demands: int = 0

    @property
    def cost_s(self) -> float:
        return self.freeze_s + self.restore_s + self.replay_s

    @property
    def regret(self) -> float:
        """The share by which the policy costs more than the best choice."""
        return self.cost_s / self.best_s - 1 if self.best_s else 0.0


@dataclass(frozen=True, slots=True)
class Question:
    """The input of a decision: whether to take a snapshot of a state. made_s: what the call to it took; see `ours`."""

    position: Position
    saved_s: float
    costs: KindCosts
    reuse: Reuse
    made_s: float


Policy = Callable[[Question], bool]


def ours(question: Question) -> bool:
    """Decide as the proxy does. Insurance against diverging replays counts as regret, because none diverges here."""
    uses = expected_uses(
        question.reuse,
        behind=question.position.behind,
        visits=question.position.passes,
        demand=question.position.demands,
    )
    saved_s = question.saved_s + at_stake_s(replayed=0, diverged=0)
    cost_s = question.costs.freeze.seconds
    cheap = is_cheap(question.reuse, cost_s=cost_s, made_s=question.made_s)
    return cheap or worth_keeping(Prospect("", saved_s, uses, 0), cost_s=cost_s)


POLICIES: dict[str, Policy] = {
    "ours": ours,
    "all": lambda _: True,
    "none": lambda _: False,
}


class Simulation:
    """Simulates groups of rollouts under a policy."""

    def __init__(self, policy: Policy, costs: KindCosts, overhead_s: float, seed: int, *, files: bool) -> None:
        self._policy, self._costs, self._overhead_s, self._files = policy, costs, overhead_s, files
        self._dice = random.Random(seed)  # noqa: S311 - dice of a benchmark
        self._reuse = Reuse()
        self.total = Total()

    def group(self, rollouts: Sequence[Sequence[Move]]) -> None:
        """Run a task's rollouts concurrently."""
        root = Position(None, 0.0, kept=True)
        places = {rollout[0].before: root for rollout in rollouts if rollout}
        at, done, idle = [root] * len(rollouts), [0] * len(rollouts), Counter[Position]()
        events = [(self._think(), number) for number, rollout in enumerate(rollouts) if rollout]
        heapq.heapify(events)
        while events:
            now, number = heapq.heappop(events)
            move = rollouts[number][done[number]]
            done[number] += 1
            here = at[number]
            there = here.known.get(move.call)
            busy_s = 0.0
            if there is None:
                busy_s = move.seconds
                self._come(here, idle)
                there = here if move.after == move.before else self._state(places, here, move, at)
                here.known[move.call] = there
                idle[there] += 1
                self._keep(there)
            if there is not here:
                there.passes += 1
            at[number] = there
            if done[number] < len(rollouts[number]):
                heapq.heappush(events, (now + busy_s + self._think(), number))
            else:
                at[number] = Position(None, 0.0)  # it has ended: behind nothing
        best = Best(self._costs, self._overhead_s)
        self.total.best_s += best.of(root)

    def _think(self) -> float:
        return self._dice.expovariate(1 / THINK_S)

    def _come(self, here: Position, idle: "Counter[Position]") -> None:
        """Bring a sandbox to a position for a miss."""
        if idle[here]:
            idle[here] -= 1
            return
        here.demands += 1
        self.total.demands += 1
        self.total.restore_s += self._costs.restore.seconds
        self.total.replay_s += self._replay_s(here)
        if here.parent is not None:
            self._reuse = self._reuse.demanded()

    def _state(self, places: dict[str, Position], here: Position, move: Move, at: Sequence[Position]) -> Position:
        known = places.get(move.after)
        if known is not None:
            return known
        made = places[move.after] = Position(here, move.seconds)
        here.children.append(made)
        above: Position | None = here
        path = set()
        while above is not None:
            path.add(above)
            above = above.parent
        # The sandbox that made the state is at this position too.
        made.behind = sum(position in path for position in at) - 1
        self._reuse = self._reuse.made(made.behind)
        self.total.states += 1
        return made

    def _replay_s(self, position: Position) -> float:
        seconds = 0.0
        while not position.kept:
            seconds += position.seconds + self._overhead_s
            assert position.parent is not None
            position = position.parent
        return seconds

    def _keep(self, position: Position) -> None:
        if position.kept:
            return
        # As `SnapshotValue` does: a checkpoint of live processes is never cheap.
        made_s = position.seconds + self._overhead_s if self._files else 0.0
        if self._policy(Question(position, self._replay_s(position), self._costs, self._reuse, made_s)):
            position.kept = True
            self.total.kept += 1
            self.total.freeze_s += self._costs.freeze.seconds


class Best:
    """The least cost of a tree with known demands."""

    def __init__(self, costs: KindCosts, overhead_s: float) -> None:
        self._freeze_s, self._restore_s, self._overhead_s = costs.freeze.seconds, costs.restore.seconds, overhead_s

    def of(self, root: Position) -> float:
        """Return the least seconds of freezing, restoring and replaying."""
        wanted: set[Position] = set()
        self._mark(root, wanted)
        return self._below(root, 0.0, wanted)

    def _mark(self, position: Position, wanted: set[Position]) -> bool:
        below = [self._mark(child, wanted) for child in position.children]
        if position.demands or any(below):
            wanted.add(position)
            return True
        return False

    def _below(self, position: Position, replay_s: float, wanted: set[Position]) -> float:
        """Return the cost of a subtree if the nearest snapshot above is `replay_s` away."""

        def children(from_s: float) -> float:
            return sum(
                self._below(child, from_s + child.seconds + self._overhead_s, wanted)
                for child in position.children
                if child in wanted
            )

        dropped = position.demands * (self._restore_s + replay_s) + children(replay_s)
        if position.parent is None:
            return dropped
        return min(dropped, self._freeze_s + position.demands * self._restore_s + children(0.0))


def simulate(
    traces: Traces, policy: Policy, costs: KindCosts, *, overhead_s: float, files: bool, seeds: int = 5
) -> Total:
    """Run every task several times with different thinking times, and return the sums."""
    sums = Total()
    for seed in range(seeds):
        simulation = Simulation(policy, costs, overhead_s, seed, files=files)
        for rollouts in traces.values():
            simulation.group(rollouts)
        for name in Total.__slots__:
            setattr(sums, name, getattr(sums, name) + getattr(simulation.total, name) / seeds)
    return sums


async def measured(count: int = 30) -> KindCosts:
    """Measure the cost of a snapshot of files: the seconds that taking it adds to a call, and a restore."""
    freezes, restores = [], []
    with tempfile.TemporaryDirectory(prefix="forkpoint-bench-") as folder:
        data_dir = Path(folder) / "local"
        driver = LocalDriver(data_dir, CriuCheckpointer(data_dir))
        store = SnapshotStore(Path(folder) / "snapshots")
        await driver.open()
        store.open()
        try:
            for number in range(count):
                sandbox = await driver.start(EnvironmentSpec())
                await execute(sandbox, f"echo {number} > /tmp/written")
                await asyncio.sleep(SEALED_S)
                started = time.perf_counter()
                frozen = await sandbox.freeze()
                await asyncio.to_thread(store.save, frozen, tree=1, node=number, cost_s=0.0)
                freezes.append(time.perf_counter() - started)
                await sandbox.close()
                started = time.perf_counter()
                restored = await driver.restore(EnvironmentSpec(), frozen)
                restores.append(time.perf_counter() - started)
                await restored.close()
        finally:
            await driver.aclose()
    return KindCosts(Mean(median(freezes)), Mean(median(restores)))


def show(kind: str, costs: KindCosts, workloads: Sequence[tuple[str, Traces]]) -> None:
    """Print a table of each workload with each policy."""
    overhead_s, files = Costs().replay_overhead.seconds, kind.startswith("files")
    shown = table(
        f"Snapshot policy, {kind}: freeze {costs.freeze.seconds * 1e3:.2f} ms, "
        f"restore {costs.restore.seconds * 1e3:.2f} ms. Dearer than the best choice in hindsight by",
        "", "kept", "demands", "best s", "ours s", *POLICIES,
    )  # fmt: skip
    best_s, ours_s = 0.0, 0.0
    for name, traces in workloads:
        totals = [simulate(traces, one, costs, overhead_s=overhead_s, files=files) for one in POLICIES.values()]
        mine = totals[0]
        shown.add_row(
            name, f"{mine.kept:.0f}/{mine.states:.0f}", f"{mine.demands:.0f}", f"{mine.best_s:.2f}",
            f"{mine.cost_s:.2f}", *(f"{total.regret:.0%}" for total in totals),
        )  # fmt: skip
        best_s, ours_s = best_s + mine.best_s, ours_s + mine.cost_s
    console.print(shown)
    console.print(f"together: ours {ours_s:.2f} s, best {best_s:.2f} s: dearer by {ours_s / best_s - 1:.1%}")


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", type=Path, default=WORKLOADS, help="directory of recorded traces")
    parser.add_argument("--processes", type=float, nargs=2, metavar=("FREEZE_S", "RESTORE_S"), default=(0.05, 0.04))
    options = parser.parse_args()
    sys.setrecursionlimit(20_000)
    workloads = [(file.stem, read_traces(file)) for file in sorted(options.workloads.glob("*.jsonl"))]
    if not workloads:
        parser.error(f"no *.jsonl in {options.workloads}: name a directory of recorded traces")
    groups = [(name, resampled(traces, size=8, seed=1)) for name, traces in workloads if "api" in name]
    files = asyncio.run(measured())
    processes = KindCosts(*map(Mean, options.processes))
    for kind, costs in (("files", files), ("processes", processes)):
        show(f"{kind}, recorded", costs, workloads)
        show(f"{kind}, groups of 8 resampled", costs, groups)


if __name__ == "__main__":
    main()
