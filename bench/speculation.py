"""What speculation wins on recorded workloads: `python -m bench.speculation`.

A simulation in virtual time, because on a machine with other work nothing would be speculated. The rollouts of a task
run side by side, some tasks at once; each agent thinks before each call (exponential). The tree, the statistics, the
choice of calls and the budgets are the proxy's own code. Sandboxes are not: a call takes the seconds of its recording,
which count as CPU seconds, and a way to a sandbox takes no time. Calls of rollouts keep cores busy, and the others are
for speculation. A speculated call that no recorded rollout made in that state is spent in vain.

Rows: the recorded files; for shell once with the measured seconds and once as slow as builds and tests (0.5 to 5 s).
"""

import random
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from pathlib import Path

from bench.machine import console, median, table
from bench.traces import LONGEST_S, SHORTEST_S, WORKLOADS, Move, Traces, read_traces, share
from proxy.speculation.budgets import CpuBudget, Credit
from proxy.speculation.candidates import LEAST_CHANCE, Candidate, ranked, walk
from proxy.tree.keys import CallKey
from proxy.tree.next_calls import CallKind, History, NextCalls, PastCall
from proxy.tree.tree import Node, Record, Tree
from sandboxes.effects import Effect
from sandboxes.spec import EnvironmentSpec

TICK_S = 0.1
IDLE_TO_BEGIN, IDLE_TO_GO_ON = 1.1, 0.1


@dataclass(slots=True)
class Totals:
    """What a run was measured at: the seconds of each call as its agent sees them, and what speculation did."""

    seconds: list[float] = field(default_factory=list)
    uncached_s: float = 0.0
    misses: int = 0
    turned: int = 0
    spent_s: float = 0.0
    saved_s: float = 0.0


@dataclass(slots=True, eq=False)
class Flight:
    """A call that runs: when it ends, and whether a rollout has made it."""

    ends: float
    began: float
    record: Record | None
    speculated: bool
    wanted: bool = False


@dataclass(slots=True, eq=False)
class Walker:
    """A rollout: its calls, how far it is, and until when it thinks or waits."""

    task: str
    moves: Sequence[Move]
    thinks: Sequence[float]
    node: Node
    until: float
    at: int = 0
    running: bool = False
    history: History = ()

    @property
    def move(self) -> Move:
        return self.moves[self.at]


class Task:
    """A task's tree: nodes by recorded state, and what each recorded call does in each recorded state."""

    def __init__(self, name: str, rollouts: Sequence[Sequence[Move]], numbers: Iterator[int]) -> None:
        self.name, self.numbers = name, numbers
        self.truth = {(move.before, key_of(move)): move for moves in rollouts for move in moves}
        root = Node(next(numbers))
        self.tree = Tree(root.id, root, EnvironmentSpec())
        self.nodes = {rollouts[0][0].before: root}
        self.states = {root: rollouts[0][0].before}
        self.flights: dict[tuple[Node, CallKey], Flight] = {}

    def node(self, state: str) -> Node:
        if state not in self.nodes:
            self.nodes[state] = Node(next(self.numbers))
            self.states[self.nodes[state]] = state
        return self.nodes[state]

    def result(self, source: Node, key: CallKey, seconds: float) -> Record:
        """Return the record of a call; one that was never recorded in this state leads to a state of its own."""
        move = self.truth.get((self.states[source], key))
        target = Node(next(self.numbers)) if move is None else self.node(move.after)
        self.states.setdefault(target, f"unknown {target.id}")
        effect = Effect.NONE if target is source else Effect.FILES
        return Record(0, key, source, target, effect, seconds if move is None else move.seconds, 0.0)


def key_of(move: Move) -> CallKey:
    return CallKey(blake2b(move.call.encode(), digest_size=16).digest())


def kind_of(move: Move) -> CallKind:
    """Return the kind of a recorded call as the proxy would see it: the tool, and a command's program."""
    words = move.call.split('"command": "', 1)
    program = words[1].split(" ", 1)[0] if len(words) > 1 else ""
    return CallKind(f"{move.call.split(',', 1)[0]} {program}", not move.reads)


class Simulation:
    """Rollouts, cores and speculation in virtual time."""

    def __init__(self, *, cores: int, speculate: float, seed: int, think_s: float) -> None:
        self.cores, self.now, self.totals = cores, 0.0, Totals()
        self.budget = CpuBudget.begun(cores * speculate, 0.0)
        self.speculates = speculate > 0
        self.next_calls, self.names = NextCalls(), dict[CallKey, CallKind]()
        self.credits: dict[str, Credit] = {}
        self.dice, self.think_s = random.Random(seed), think_s  # noqa: S311 - dice of a benchmark
        self.unused: dict[Record, str] = {}

    def run(self, tasks: Mapping[str, Task], rollouts: Traces) -> None:
        """Run the rollouts of some tasks until all have ended."""
        walkers = []
        for name, task in tasks.items():
            for moves in (moves for moves in rollouts[name] if moves):
                thinks = [self.dice.expovariate(1 / self.think_s) for _ in moves]
                walkers.append(Walker(name, moves, thinks, task.tree.root, self.now + thinks[0]))
        while walkers:
            self.now += TICK_S
            for task in tasks.values():
                self._land(task)
            for walker in walkers:
                self._advance(tasks[walker.task], walker)
            walkers = [walker for walker in walkers if walker.at < len(walker.moves)]
            if self.speculates:
                self._speculate(tasks, walkers)

    def _land(self, task: Task) -> None:
        for place, flight in [(p, f) for p, f in task.flights.items() if f.ends <= self.now]:
            del task.flights[place]
            if flight.record is not None:
                record = flight.record
                place[0].records[place[1]] = record
                record.target.origin = record.target.origin or (None if record.observation else record)
                task.tree.size += 1
                if flight.speculated and not flight.wanted:
                    self.unused[record] = task.name

    def _advance(self, task: Task, walker: Walker) -> None:
        while walker.at < len(walker.moves) and walker.until <= self.now:
            if not walker.running:
                self._ask(task, walker)
                continue
            walker.running = False
            call = PastCall(key_of(walker.move), kind_of(walker.move), walker.move.seconds)
            self.names[call.key] = call.kind
            self.next_calls.note("", walker.task, walker.history, call)
            walker.history = (*walker.history[-1:], call)
            walker.node = task.node(walker.move.after)
            walker.at += 1
            if walker.at < len(walker.moves):
                walker.until += walker.thinks[walker.at]

    def _ask(self, task: Task, walker: Walker) -> None:
        move, totals, place = walker.move, self.totals, (walker.node, key_of(walker.move))
        record, flight, asked = walker.node.records.get(place[1]), task.flights.get(place), walker.until
        waits_s = 0.0
        if record is not None:
            if self.unused.pop(record, None) is not None:
                self._used(task, record.seconds)
        elif flight is not None:
            waits_s = max(0.0, flight.ends - asked)
            if flight.speculated and not flight.wanted:
                flight.wanted = True
                self._used(task, max(0.0, move.seconds - waits_s))
        else:
            totals.misses += 1
            waits_s = move.seconds
            made = task.result(walker.node, place[1], move.seconds)
            task.flights[place] = Flight(asked + waits_s, asked, made, speculated=False, wanted=True)
        totals.seconds.append(waits_s)
        totals.uncached_s += move.seconds
        walker.running, walker.until = True, asked + waits_s

    def _used(self, task: Task, saved_s: float) -> None:
        self.totals.turned += 1
        self.totals.saved_s += saved_s
        self._credit(task.name).used(saved_s, self.now)

    def _credit(self, task: str) -> Credit:
        return self.credits.setdefault(task, Credit.begun(self.now))

    def _speculate(self, tasks: Mapping[str, Task], walkers: Sequence[Walker]) -> None:
        flights = [(task, place, f) for task in tasks.values() for place, f in task.flights.items()]
        own = [entry for entry in flights if entry[2].speculated and not entry[2].wanted]
        idle = self.cores - len(flights)
        answer = self._candidates(tasks, walkers)
        likely = {(candidate.node, candidate.key) for candidate in answer}
        for task, place, flight in own:
            half = self.now - flight.began > (flight.ends - flight.began) / 2
            if idle < IDLE_TO_GO_ON or not self.budget.may_spend(self.now) or not (place in likely or half):
                del task.flights[place]
                idle += 1
                continue
            self.totals.spent_s += TICK_S
            self.budget.spend(TICK_S, self.now)
            self._credit(task.name).executed(TICK_S, self.now)
        by_tree = {task.tree: task for task in tasks.values()}
        for candidate in answer:
            task, place = by_tree[candidate.tree], (candidate.node, candidate.key)
            if idle < IDLE_TO_BEGIN or not self.budget.may_spend(self.now):
                break
            if place in task.flights:
                continue
            record = task.result(candidate.node, candidate.key, candidate.seconds)
            task.flights[place] = Flight(self.now + record.seconds, self.now, record, speculated=True)
            idle -= 1

    def _candidates(self, tasks: Mapping[str, Task], walkers: Sequence[Walker]) -> list[Candidate]:
        def past(record: Record) -> PastCall | None:
            kind = self.names.get(record.key)
            return None if kind is None else PastCall(record.key, replace(kind, changed=not record.observation), 0.0)

        results: list[Candidate] = []
        for walker in walkers:
            if not walker.running and self._credit(walker.task).pays(self.now):
                likely = partial(self.next_calls.likely, "", walker.task, least=LEAST_CHANCE)
                results += walk(tasks[walker.task].tree, walker.node, walker.history, likely, past)
        return ranked(results)


def simulate(traces: Traces, *, cores: int, speculate: float, think_s: float, at_once: int) -> Totals:
    """Run all tasks of a workload, some at once."""
    simulation = Simulation(cores=cores, speculate=speculate, seed=1, think_s=think_s)
    numbers = iter(range(1, 1 << 62))
    named = {name: rollouts for name, rollouts in traces.items() if rollouts and rollouts[0]}
    for start in range(0, len(named), at_once):
        names = list(named)[start : start + at_once]
        tasks = {name: Task(name, [moves for moves in named[name] if moves], numbers) for name in names}
        simulation.run(tasks, named)
    return simulation.totals


def slowed(traces: Traces) -> Traces:
    """Return the traces with tools as slow as builds and tests: 0.5 to 5 s, by a digest of the call."""
    span = LONGEST_S / SHORTEST_S
    return {
        task: [[replace(move, seconds=SHORTEST_S * span ** share(move.call)) for move in moves] for moves in rollouts]
        for task, rollouts in traces.items()
    }


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", type=Path, default=WORKLOADS, help="directory of recorded traces")
    parser.add_argument("--cores", type=int, default=16)
    parser.add_argument("--speculate", type=float, default=0.25, help="share of the cores")
    parser.add_argument("--think", type=float, default=3.0, help="mean seconds before each call")
    parser.add_argument("--at-once", type=int, default=1, help="concurrent tasks")
    options = parser.parse_args()
    shown = table(
        f"Speculation with {options.speculate:g} of {options.cores} cores, {options.think:g} s of thinking (simulated)",
        "workload", "calls", "misses", "to hits", "CPU s", "saved s", "CPU/saved", "median", "p95", "mean", "gain",
    )  # fmt: skip
    files = [*sorted(options.workloads.glob("api-*.jsonl")), *sorted(options.workloads.glob("shell-*.jsonl"))]
    rows = [(file.stem.removeprefix("api-tau-"), read_traces(file)) for file in files]
    rows += [(f"{name}, slow tools", slowed(traces)) for name, traces in rows if name.startswith("shell")]
    for name, traces in rows:
        for speculate in (0.0, options.speculate):
            result = simulate(
                traces, cores=options.cores, speculate=speculate, think_s=options.think, at_once=options.at_once
            )
            seconds, missed = sorted(result.seconds), result.misses + result.turned
            mean_s = sum(seconds) / len(seconds)
            shown.add_row(
                f"{name}{' +' if speculate else ''}", str(len(seconds)), str(missed),
                f"{result.turned / missed:.1%}", f"{result.spent_s:.0f}", f"{result.saved_s:.0f}",
                f"{result.spent_s / result.saved_s:.1f}" if result.saved_s else "-", f"{median(seconds):.3f}",
                f"{seconds[int(0.95 * (len(seconds) - 1))]:.2f}", f"{mean_s:.3f}",
                f"{result.uncached_s / len(seconds) / mean_s:.2f}" if mean_s else "-",
            )  # fmt: skip
    console.print(shown)
    console.print(
        "+: with speculation. to hits: share of the misses that found a hit, or joined an execution ahead. CPU/saved: "
        "CPU seconds for each tool second saved. median, p95, mean: tool seconds of a call. gain: uncached / mean."
    )


if __name__ == "__main__":
    main()
