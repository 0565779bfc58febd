"""The model behind `bench.cluster_sim`: members, owners of trees, sandboxes and a log, event by event.

Theory of operation:

1. A rollout's agent sends its calls to one member, the ingress, and thinks between calls.
2. The first call of a task makes a member the owner of the task's tree. The ingress passes calls on to the owner.
3. The owner answers what the tree knows. Another call runs once for all rollouts that make it meanwhile. It runs in a
   sandbox of the owner, or of a member with room. Its line is in the log before the call is answered.
4. A member that dies takes its agents with it, its sandboxes and what they were running. Once its lease is over, its
   trees go to the members that get the next calls of their tasks.

What is a hit follows from the recorded states of the rollouts, and not from a rate that is put in. What the model
lacks is listed in docs/cluster.md.
"""

import heapq
import itertools
import math
import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import Literal

from bench.traces import Move

Placement = Literal["balanced", "touch", "hash"]
_CHOICES = 4
"""Members that are compared when a tree or a call needs a less loaded one: comparing a few is as good as comparing all
(M. Mitzenmacher, The Power of Two Choices in Randomized Load Balancing, 2001)."""


THINK_SIGMA = 0.6
"""Spread of the time between two calls of a rollout, of a log-normal distribution. The value is an estimate."""


@dataclass(frozen=True, slots=True)
class Costs:
    """What each part takes, measured on two cores.

    Attributes:
        hit_s: CPU of the owner's event loop for a hit: `bench.hotpath`.
        miss_s: CPU of the owner's event loop for a miss, with everything around the tool. The mean of 1.2 ms
            (read-only) and 3.4 ms (changes files): `bench.misspath`.
        forward_s: CPU of the ingress for a call that it passes on: a prototype of the links.
        loopback_s: Agent to ingress and back, with the agent's own work.
        hop_s: One way between two members: the same prototype, on one machine. A network adds its own time.
        commit_s: A line of the log, alone: PostgreSQL 15. In group commits it takes 20,000 lines of 2 kB a second.
        restore_s: A sandbox at the state: `bench.misspath`.
        remote_s: A call in another member's sandbox, beside the call.
        layer_bytes: Median size of the layers that a state adds.
        bytes_per_s: Between two members.
        ship_s: A state on its way to another member, beside its bytes.
        record_s: Reading a record back from the log at a takeover.
        lease_s: How long a dead member's trees stay its own.
    """

    hit_s: float = 35e-6
    miss_s: float = 2.3e-3
    forward_s: float = 20e-6
    loopback_s: float = 45e-6
    hop_s: float = 90e-6
    commit_s: float = 0.9e-3
    restore_s: float = 7e-3
    remote_s: float = 0.4e-3
    layer_bytes: float = 300e3
    bytes_per_s: float = 0.23e9
    ship_s: float = 4e-3
    record_s: float = 10e-6
    lease_s: float = 3.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What is simulated.

    Attributes:
        members: Machines, each with agents, an owner's event loop, and room for sandboxes.
        slots: Sandboxes that run at once on a member.
        placement: Where a new tree goes: to the ingress unless that is loaded, always to the ingress, or by a hash.
        pinned: Whether the agents of a group are on one member; otherwise they are spread over all.
        anywhere: Whether calls run on members with room; otherwise only at the owner.
        think_s: Median seconds of the model between two calls.
        start_s: Seconds in which all rollouts begin.
        killed: Members that die, at `kill_at_s`.
        kill_at_s: When they die.
        seed: Of the dice.
        costs: What each part takes.
    """

    members: int
    slots: int = 48
    placement: Placement = "balanced"
    pinned: bool = True
    anywhere: bool = True
    think_s: float = 4.0
    start_s: float = 5.0
    killed: int = 0
    kill_at_s: float = 20.0
    seed: int = 1
    costs: Costs = field(default_factory=Costs)


@dataclass(slots=True)
class Outcome:
    """What a simulation counted.

    Attributes:
        counts: Hits, joined executions, executions, calls passed on, and so on, by name.
        hits_s: Latencies of hits at their own member.
        far_hits_s: Latencies of hits that were passed on.
        misses_s: Latencies of misses.
        stalls_s: How long calls waited for the end of a lease after its member had died.
        appends: Lines of the log by second.
        loop_s: CPU of each member's event loop.
        tool_s: Seconds of sandboxes by member.
        owned: Trees by owner.
        ended_s: When the last rollout ended.
    """

    counts: Counter[str] = field(default_factory=Counter)
    hits_s: list[float] = field(default_factory=list)
    far_hits_s: list[float] = field(default_factory=list)
    misses_s: list[float] = field(default_factory=list)
    stalls_s: list[float] = field(default_factory=list)
    appends: Counter[int] = field(default_factory=Counter)
    loop_s: list[float] = field(default_factory=list)
    tool_s: list[float] = field(default_factory=list)
    owned: list[int] = field(default_factory=list)
    ended_s: float = 0.0

    @property
    def calls(self) -> int:
        """Calls that were answered."""
        return self.counts["hits"] + self.counts["joined"] + self.counts["misses"]


@dataclass(slots=True, eq=False)
class _Member:
    """One machine. `free_at` is when its event loop has done what it has to do."""

    number: int
    slots: int
    is_alive: bool = True
    died_at: float = 0.0
    free_at: float = 0.0
    loop_s: float = 0.0
    tool_s: float = 0.0
    owned: int = 0
    waiting: "deque[_Execution]" = field(default_factory=deque)

    def work(self, cpu_s: float, at: float) -> float:
        """Return when the event loop has done some work that comes up at a time."""
        self.free_at = max(self.free_at, at) + cpu_s
        self.loop_s += cpu_s
        return self.free_at


@dataclass(slots=True, eq=False)
class _Rollout:
    """One rollout; `position` is the number of its next call, and `sent_at` when its agent sent that call."""

    task: str
    moves: Sequence[Move]
    ingress: _Member
    position: int = 0
    sent_at: float = 0.0
    is_dead: bool = False

    @property
    def move(self) -> Move:
        return self.moves[self.position]


@dataclass(slots=True, eq=False)
class _Execution:
    """A call that runs, or waits for room, with the rollouts that wait for it."""

    task: str
    move: Move
    owner: _Member
    rollouts: list[_Rollout]


@dataclass(slots=True, eq=False)
class _Tree:
    """A task's tree: its owner, the recorded calls, the calls under way, and which members have a state's layers."""

    owner: _Member | None = None
    known: set[tuple[str, str]] = field(default_factory=set)
    under_way: dict[tuple[str, str], _Execution] = field(default_factory=dict)
    holders: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))


class Simulation:
    """Runs the rollouts of some groups on a cluster, in virtual time."""

    def __init__(self, plan: Plan, groups: Sequence[tuple[str, Sequence[Sequence[Move]]]]) -> None:
        """Prepare a run.

        Args:
            plan: The cluster.
            groups: Tasks with the calls of their rollouts.
        """
        self._plan, self._costs = plan, plan.costs
        self._dice = random.Random(plan.seed)  # noqa: S311 - dice of a benchmark
        self._members = [_Member(number, plan.slots) for number in range(plan.members)]
        self._trees: dict[str, _Tree] = defaultdict(_Tree)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._rollouts: list[_Rollout] = []
        self._now = 0.0
        self.outcome = Outcome()
        ingresses = itertools.cycle(self._members)
        for task, rollouts in groups:
            home = next(ingresses)
            for moves in rollouts:
                if moves:
                    rollout = _Rollout(task, moves, home if plan.pinned else next(ingresses))
                    self._rollouts.append(rollout)
                    self._later(self._dice.uniform(0, plan.start_s), partial(self._send, rollout))
        if plan.killed:
            self._later(plan.kill_at_s, self._kill)

    def run(self) -> Outcome:
        """Run until no event is left, and return what was counted."""
        while self._events:
            self._now, _, event = heapq.heappop(self._events)
            event()
        members = self._members
        self.outcome.loop_s = [member.loop_s for member in members]
        self.outcome.tool_s = [member.tool_s for member in members]
        self.outcome.owned = [member.owned for member in members if member.is_alive]
        self.outcome.counts["rollouts"] = len(self._rollouts)
        return self.outcome

    # -- a call ------------------------------------------------------------------------------------------------------

    def _send(self, rollout: _Rollout) -> None:
        rollout.sent_at = self._now
        self._route(rollout, self._now + self._costs.loopback_s)

    def _route(self, rollout: _Rollout, at: float) -> None:
        """Bring a call to the owner of its tree."""
        if rollout.is_dead:
            return
        tree = self._trees[rollout.task]
        owner = tree.owner
        if owner is not None and not owner.is_alive:
            lease_ends = owner.died_at + self._costs.lease_s
            if at < lease_ends:
                self.outcome.stalls_s.append(lease_ends - max(rollout.sent_at, owner.died_at))
                self._later(lease_ends, lambda: self._route(rollout, lease_ends))
                return
            self.outcome.counts["takeovers"] += 1
            for holders in tree.holders.values():
                holders.discard(owner.number)
            at += self._costs.record_s * len(tree.known)
        if owner is None or not owner.is_alive:
            owner = tree.owner = self._placed(rollout.task, rollout.ingress)
            owner.owned += 1
            at = self._append(at)
        if owner is not rollout.ingress:
            self.outcome.counts["passed_on"] += 1
            at = rollout.ingress.work(self._costs.forward_s, at) + self._costs.hop_s
        move = rollout.move
        key = (move.before, move.call)
        if key in tree.known:
            self.outcome.counts["hits"] += 1
            latencies = self.outcome.hits_s if owner is rollout.ingress else self.outcome.far_hits_s
            self._answer(rollout, owner, owner.work(self._costs.hit_s, at), latencies)
        elif key in tree.under_way:
            self.outcome.counts["joined"] += 1
            tree.under_way[key].rollouts.append(rollout)
        else:
            tree.under_way[key] = execution = _Execution(rollout.task, move, owner, [rollout])
            self._later(owner.work(self._costs.miss_s, at), lambda: self._begin(execution))

    def _answer(self, rollout: _Rollout, owner: _Member, at: float, latencies: list[float]) -> None:
        if rollout.is_dead:
            return
        if owner is not rollout.ingress:
            at += self._costs.hop_s
        latencies.append(at - rollout.sent_at)
        self.outcome.ended_s = max(self.outcome.ended_s, at)
        rollout.position += 1
        if rollout.position == len(rollout.moves):
            self.outcome.counts["finished"] += 1
        else:
            self._later(at + self._log_normal(self._plan.think_s, THINK_SIGMA), lambda: self._send(rollout))

    # -- an execution ------------------------------------------------------------------------------------------------

    def _begin(self, execution: _Execution) -> None:
        """Run a call on a member with room, or leave it waiting at its owner."""
        owner, tree = execution.owner, self._trees[execution.task]
        if not owner.is_alive:
            self._again(execution)
            return
        worker = owner
        if owner.slots <= 0 and self._plan.anywhere:
            holders = tree.holders[execution.move.before]
            worker = max(self._some(), key=lambda other: (other.slots > 0, other.number in holders, other.slots))
        if worker.slots <= 0:
            self.outcome.counts["queued"] += 1
            owner.waiting.append(execution)
            return
        self._run(execution, worker)

    def _run(self, execution: _Execution, worker: _Member) -> None:
        worker.slots -= 1
        holders = self._trees[execution.task].holders[execution.move.before]
        seconds = self._costs.restore_s + execution.move.seconds
        if worker is not execution.owner:
            self.outcome.counts["elsewhere"] += 1
            seconds += self._costs.remote_s + 2 * self._costs.hop_s
        if holders and worker.number not in holders:
            size = self._log_normal(self._costs.layer_bytes, 1.5)
            self.outcome.counts["shipped_bytes"] += int(size)
            seconds += self._costs.ship_s + size / self._costs.bytes_per_s
        holders.add(worker.number)
        worker.tool_s += seconds
        self._later(self._now + seconds, lambda: self._ran(execution, worker))

    def _ran(self, execution: _Execution, worker: _Member) -> None:
        worker.slots += 1
        self._let_in(worker)
        tree = self._trees[execution.task]
        if not worker.is_alive or not execution.owner.is_alive or tree.owner is not execution.owner:
            # Lost with its machine, or its owner is none any more: what is not in the log was never answered.
            self.outcome.counts["lost_runs"] += 1
            self._again(execution)
            return
        move = execution.move
        at = self._append(self._now)
        tree.known.add((move.before, move.call))
        tree.under_way.pop((move.before, move.call), None)
        tree.holders[move.after].add(worker.number)
        self.outcome.counts["misses"] += 1
        for rollout in execution.rollouts:
            self._answer(rollout, execution.owner, at, self.outcome.misses_s)

    def _let_in(self, worker: _Member) -> None:
        """Give a place that is free to a call that waits: here first, and else at another member."""
        queues = [worker, *self._some()] if self._plan.anywhere else [worker]
        for member in queues:
            if worker.is_alive and member.waiting and worker.slots > 0:
                self._run(member.waiting.popleft(), worker)
                return

    def _again(self, execution: _Execution) -> None:
        """Let the rollouts of an execution that came to nothing make their call again."""
        tree = self._trees[execution.task]
        if tree.under_way.get((execution.move.before, execution.move.call)) is execution:
            del tree.under_way[execution.move.before, execution.move.call]
        for rollout in execution.rollouts:
            self._route(rollout, self._now)

    # -- the cluster -------------------------------------------------------------------------------------------------

    def _placed(self, task: str, ingress: _Member) -> _Member:
        alive = [member for member in self._members if member.is_alive]
        if self._plan.placement == "hash":
            # The highest of all members' hashes (rendezvous hashing), so that a death moves only its own trees.
            return max(alive, key=lambda member: blake2b(f"{task} {member.number}".encode(), digest_size=8).digest())
        mean = sum(member.owned for member in alive) / len(alive)
        if self._plan.placement == "touch" or (ingress.owned <= 1.25 * mean + 2 and ingress.slots > 0):
            return ingress
        return min(self._some(), key=lambda member: member.owned)

    def _some(self) -> list[_Member]:
        """Return a few living members by chance."""
        drawn = self._dice.sample(self._members, min(_CHOICES, len(self._members)))
        return [member for member in drawn if member.is_alive] or [m for m in self._members if m.is_alive][:1]

    def _append(self, at: float) -> float:
        self.outcome.appends[int(at)] += 1
        return at + self._costs.commit_s

    def _kill(self) -> None:
        for member in self._dice.sample(self._members, self._plan.killed):
            member.is_alive, member.died_at = False, self._now
            self.outcome.counts["dead_members"] += 1
        for rollout in self._rollouts:
            if not rollout.ingress.is_alive and rollout.position < len(rollout.moves):
                rollout.is_dead = True
                self.outcome.counts["dead_agents"] += 1
        for member in self._members:
            if not member.is_alive:
                while member.waiting:
                    self._again(member.waiting.popleft())

    def _later(self, at: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at, next(self._numbers), event))

    def _log_normal(self, median: float, sigma: float) -> float:
        return median * math.exp(self._dice.gauss(0, sigma))
