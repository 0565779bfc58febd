"""Speculation: calls that rollouts are likely to make next are executed while their agents think.

Theory of operation:

1. *Learn.* `note` queues each step; `work` learns from it which call follows which (`Learned`).
2. *Choose.* In each round, the calls that thinking rollouts may make next and that the tree does not know are ranked by
   the seconds that they would save (`candidates`).
3. *Execute.* The best ones run, each in a sandbox of its own that was made from snapshots and replays, never in a
   rollout's sandbox. All other sandboxes go first where they compete for the CPU. The result is recorded if any rollout
   at the node could have recorded it for the others (`Executor.execute_ahead`). A rollout that makes the call hits.
4. *Yield.* A rollout that makes the call while it runs waits for it, and it runs like any other from then on. Every
   `_TICK_S` the others are cancelled if no rollout is likely to make them any more, if the machine has no idle core or
   a caller waits for room, and if the budget or the time of a call is used up (`_why_end`).
5. *Pay.* CPU time is a share of the machine (`CpuBudget`). Tasks in which it saves less than it costs pause (`Credit`).
"""

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import structlog

from proxy.execution.errors import NotRecordedError, StateLostError
from proxy.execution.executor import Executor
from proxy.http.lru_cache import LruCache
from proxy.speculation.budgets import CpuBudget, Credit
from proxy.speculation.candidates import LEAST_CHANCE, Candidate, ranked, walk
from proxy.speculation.learned import Learned
from proxy.storage.errors import StoreError
from proxy.telemetry.counters import Counters
from proxy.tree.keys import CallKey
from proxy.tree.restore_plan import plan_restore
from proxy.tree.rollout import Outcome, Rollout
from proxy.tree.task import Walkers
from proxy.tree.tree import Node, Record, Tree
from sandboxes.calls import Execution, ToolCall
from sandboxes.driver import Metered, Sandbox
from sandboxes.errors import SandboxError, SpecError
from sandboxes.pool.pool import OverloadedError, Pool
from sandboxes.task_owner import TaskOwner
from snapshots.costs import Costs

log = structlog.get_logger()

_TICK_S = 0.1
"""Interval at which running calls are checked and new ones begin. Halved, rounds take twice the CPU time of the proxy.

Doubled, calls of rollouts compete with speculated ones for 0.2 s, though these have the least weight.
"""
_THINKING_S = 0.005
"""A rollout without a call for this long is thinking; see `warm_forks`."""
_MAX_CALL_S = 60.0
"""Longest time of a speculated call. Agents seldom think longer, so a longer call would be waited for anyway."""
_IDLE_TO_BEGIN, _IDLE_TO_GO_ON = 1.1, 0.1
"""Idle cores that the machine must have for a call to begin, and for the running ones to go on.

A call that keeps a core busy must leave enough to go on. Below that it may starve: a command that limits its own time
would then fail, and the failure would answer others.
"""
_COOLDOWN_S = 30.0
"""How long a call that could not be executed or recorded at a node is not tried there again."""
_MAX_COOLING = 4096
_PAUSE_SHARE = 20
"""A round is followed by a pause this many times as long, so that rounds take at most 5 % of a core."""
_MAX_CHARGED = 4096
_UNLIKELY = "no rollout is likely to make it any more"
_MAX_NOTED = 10000
"""Steps that wait to be learnt from; beyond it the oldest are dropped."""
_MAX_MADE = 10000
"""Speculated records whose first use is waited for."""
_REPLAY_SHARE = 0.5
"""A call is executed if reaching its node takes at most this share of its own time: replays cost CPU time, too."""


@dataclass(slots=True, eq=False)
class Speculation:
    """A call that is being executed ahead.

    Attributes:
        candidate: What is executed.
        task: Name of the task of the rollout that it is for.
        running: The task that executes it; None before it begins.
        sandbox: Its sandbox; None until the call begins in it.
        meter: The same sandbox, which tells its CPU time.
        used_cpu_s: CPU seconds that were charged so far.
        began: When it began, in seconds of the monotonic clock.
        wanted: Whether a rollout waits for it by now.
    """

    candidate: Candidate
    task: str
    running: "asyncio.Task[None] | None" = None
    sandbox: Sandbox | None = None
    meter: Metered | None = None
    used_cpu_s: float = 0.0
    began: float = field(default_factory=time.monotonic)
    wanted: bool = False


@dataclass(frozen=True, slots=True)
class _Plan:
    """What a rollout may do next, as long as it has made `calls` calls and its tree has the size `size`."""

    calls: int
    size: int
    candidates: list[Candidate]


class Speculator:
    """Executes likely calls ahead of their rollouts."""

    def __init__(
        self,
        executor: Executor,
        learned: Learned,
        pool: Pool,
        costs: Mapping[str, Costs],
        counts: Counters,
        walkers: Walkers,
        idle_cores: Callable[[], float],
        has_headroom: Callable[[], bool],
        *,
        cores: float,
        most: int,
    ) -> None:
        """Prepare to speculate; `work` does it.

        Args:
            executor: Executes and records calls.
            learned: Predicts them.
            pool: Says whether callers wait for room.
            costs: By driver, what ways to a sandbox cost.
            counts: Where speculated calls are counted.
            walkers: The running rollouts by tree.
            idle_cores: Returns how many cores have been idle on average since it was last called.
            has_headroom: Returns whether the memory and the budgets of snapshots and records have room to spare.
            cores: CPU seconds that may be spent each second; 0 turns speculation off.
            most: Calls that may be executed ahead at once.
        """
        self._executor, self._learned, self._pool, self._costs = executor, learned, pool, costs
        self._counts, self._walkers, self._most = counts, walkers, most
        self._idle_cores, self._has_headroom = idle_cores, has_headroom
        self._budget = CpuBudget.begun(cores, time.monotonic())
        self._credits: dict[str, Credit] = {}
        self._noted: deque[tuple[Rollout, Record, Outcome]] = deque(maxlen=_MAX_NOTED)
        self._made: OrderedDict[int, str] = OrderedDict()
        # By the numbers of nodes, not by the nodes: what is forgotten must not stay in memory for this.
        self._cooling: OrderedDict[tuple[int, CallKey], float] = OrderedDict()
        self._plans: dict[Rollout, _Plan] = {}
        self._charged: LruCache[str, float] = LruCache(_MAX_CHARGED)
        self._unmetered: set[str] = set()
        self._active: set[Speculation] = set()
        self._tasks = TaskOwner()
        self._wake = asyncio.Event()
        self.enabled = cores > 0

    def __len__(self) -> int:
        """Return the number of calls that are being executed ahead."""
        return len(self._active)

    def note(self, rollout: Rollout, record: Record, outcome: Outcome) -> None:
        """Note that a rollout took a step. Part of every hit: 0.2 µs."""
        if self.enabled:
            self._noted.append((rollout, record, outcome))
            self._wake.set()

    async def work(self) -> None:
        """Learn from the steps since the last round, check what runs, and begin what is worth it. One round."""
        if not self._active:
            await self._wake.wait()
        self._wake.clear()
        began = time.perf_counter()
        self.round()
        await asyncio.sleep(max(_TICK_S, _PAUSE_SHARE * (time.perf_counter() - began)))

    def round(self) -> None:
        """Make one round; see `work`."""
        while self._noted:
            self._learn(*self._noted.popleft())
        idle, now = self._idle_cores(), time.monotonic()
        thinking = self._thinking(now)
        self._plans = {rollout: self._plan(rollout) for rollout in thinking}
        candidates = ranked(candidate for plan in self._plans.values() for candidate in plan.candidates)
        self._cool(now)
        self._end(candidates, idle, now)
        self._begin(candidates, thinking, idle, now)
        if thinking:
            # A rollout that still thinks may be worth another call when this one has ended.
            self._wake.set()

    async def forget(self, task: str) -> None:
        """End what is executed for a task that is being deleted, and drop what was learnt from it."""
        self._learned.forget(task)
        self._credits.pop(task, None)
        self._noted = deque((noted for noted in self._noted if noted[0].task != task), maxlen=_MAX_NOTED)
        await self._cancel([active for active in self._active if active.task == task])

    async def aclose(self) -> None:
        """End what is executed, and begin nothing more."""
        self.enabled = False
        self._tasks.cancel()
        await self._tasks.wait()

    # 1. Learn

    def _learn(self, rollout: Rollout, record: Record, outcome: Outcome) -> None:
        self._learned.step(rollout, record)
        task = self._made.pop(record.id, None)
        if task is not None and outcome in (Outcome.HIT, Outcome.WAIT):
            self._counts.speculated_used += 1
            self._counts.speculated_saved_s += record.seconds
            self._credit(task).used(record.seconds, time.monotonic())

    def _credit(self, task: str) -> Credit:
        return self._credits.setdefault(task, Credit.begun(time.monotonic()))

    # 2. Choose

    def _thinking(self, now: float) -> list[Rollout]:
        """Return the rollouts whose agents think, and whose next calls may be executed ahead."""
        rollouts = self._walkers.all()
        return [
            rollout
            for rollout in rollouts
            if rollout.cached
            and not rollout.finished
            and not rollout.waiting
            and _THINKING_S < now - rollout.used_at < _MAX_CALL_S
            and may_speculate(rollout.tree)
            and rollout.tree.spec.driver not in self._unmetered
            and self._credit(rollout.task).pays(now)
        ]

    def _plan(self, rollout: Rollout) -> "_Plan":
        """Return what a rollout may do next; what is known of a rollout that did not move is kept."""
        plan = self._plans.get(rollout)
        if plan is None or plan.calls != rollout.calls or plan.size != rollout.tree.size:
            candidates = walk(
                rollout.tree,
                rollout.node,
                self._learned.history(rollout),
                partial(self._learned.likely, rollout.task, least=LEAST_CHANCE),
                self._learned.past,
            )
            plan = _Plan(rollout.calls, rollout.tree.size, list(candidates))
        return plan

    def _is_reachable(self, candidate: Candidate) -> bool:
        """Return whether a sandbox at the candidate's node can be had for a fraction of the call's time."""
        node = candidate.node
        # Without a digest processes run, and what they answer depends on how long they have run.
        if node.state is None or node.diverged or node.detached or candidate.key in node.quarantined:
            return False
        plan = plan_restore(node, idle_at=self._is_ahead_at, costs=self._costs[candidate.tree.spec.driver])
        if plan is None or any(record.doubtful for record in plan.suffix):
            return False
        return plan.cost_s <= max(0.1, _REPLAY_SHARE * candidate.seconds)

    def _is_ahead_at(self, node: Node) -> bool:
        return self._pool.roster.find_ahead(node) is not None

    def _cool(self, now: float) -> None:
        while self._cooling and (len(self._cooling) > _MAX_COOLING or next(iter(self._cooling.values())) < now):
            self._cooling.popitem(last=False)

    # 3. Execute

    def _begin(self, candidates: list[Candidate], thinking: list[Rollout], idle: float, now: float) -> None:
        active = {(speculation.candidate.node, speculation.candidate.key) for speculation in self._active}
        tasks = {rollout.tree: rollout.task for rollout in thinking}
        for candidate in candidates if self.enabled else ():
            if len(self._active) >= self._most or idle < _IDLE_TO_BEGIN or not self._pool.has_spare_room:
                return
            if not self._budget.may_spend(now) or not self._has_headroom():
                return
            place = candidate.node, candidate.key
            if place in active or candidate.place in self._cooling or self._executor.flights.has(*place):
                continue
            call = self._learned.call(candidate.key) if self._is_reachable(candidate) else None
            if call is None:
                continue
            # It may keep a core busy.
            idle -= 1.0
            speculation = Speculation(candidate, tasks[candidate.tree])
            self._active.add(speculation)
            speculation.running = self._tasks.spawn("speculate", self._execute(speculation, call))

    async def _execute(self, speculation: Speculation, call: ToolCall) -> None:
        candidate = speculation.candidate
        try:
            record = await self._executor.execute_ahead(
                candidate.tree, candidate.node, call, candidate.key, partial(self._run, speculation, call),
                partial(self._joined, speculation),
            )  # fmt: skip
        except (NotRecordedError, StateLostError, SandboxError, SpecError, OverloadedError, StoreError) as error:
            # Nothing depends on a speculated call; a rollout that makes it runs it.
            self._avoid(candidate)
            log.debug("call not executed ahead", node=candidate.node.id, error=repr(error))
        else:
            self._made[record.id] = speculation.task
            while len(self._made) > _MAX_MADE:
                self._made.popitem(last=False)
            self._counts.speculated += 1
        finally:
            self._active.discard(speculation)
            self._credit(speculation.task).executed(speculation.used_cpu_s, time.monotonic())
            self._wake.set()

    async def _run(self, speculation: Speculation, call: ToolCall, sandbox: Sandbox) -> Execution:
        """Run a call in a sandbox that goes after all others, and like the others once a rollout waits for it.

        Raises:
            NotRecordedError: The sandbox cannot be made to go after the others.
        """
        if not isinstance(sandbox, Metered) or sandbox.cpu_s is None or not sandbox.set_background(background=True):
            self._unmetered.add(speculation.candidate.tree.spec.driver)
            raise NotRecordedError
        # From here on a rollout that makes the call waits for it (`_joined`).
        speculation.sandbox, speculation.meter = sandbox, sandbox
        execution = await sandbox.execute(call)
        self._charge(speculation, time.monotonic())
        # Whatever leases it next is a rollout's call.
        if not sandbox.set_background(background=False):
            raise NotRecordedError
        return execution

    # 4. Yield

    def _joined(self, speculation: Speculation) -> None:
        """A rollout makes the call: it runs like any other from now on; if it has not begun, the rollout runs it."""
        speculation.wanted = True
        if speculation.meter is not None:
            speculation.meter.set_background(background=False)
        elif speculation.running is not None:
            speculation.running.cancel()

    def _end(self, candidates: list[Candidate], idle: float, now: float) -> None:
        likely = {candidate.place for candidate in candidates}
        for speculation in self._active:
            self._charge(speculation, now)
            if speculation.wanted or speculation.running is None:
                continue
            reason = self._why_end(speculation, likely, idle, now)
            if reason:
                log.debug("speculated call cancelled", node=speculation.candidate.node.id, reason=reason)
                self._counts.speculated_cancelled += 1
                speculation.running.cancel()
                if reason != _UNLIKELY:
                    self._avoid(speculation.candidate)

    def _avoid(self, candidate: Candidate) -> None:
        self._cooling[candidate.place] = time.monotonic() + _COOLDOWN_S

    def _why_end(self, speculation: Speculation, likely: set[tuple[int, CallKey]], idle: float, now: float) -> str:
        """Return why a running call is cancelled; empty if it goes on."""
        elapsed_s = now - speculation.began
        if speculation.candidate.node.detached:
            return "its node was forgotten"
        if self._pool.waiting:
            return "a call waits for room"
        if not self._budget.may_spend(now):
            return "the share of the cores is used up"
        if elapsed_s > _MAX_CALL_S:
            return "it takes too long"
        if idle < _IDLE_TO_GO_ON:
            return "no core is idle"
        # A call that is nearly done is worth its end: another rollout may come to its node.
        if speculation.candidate.place not in likely and elapsed_s < speculation.candidate.seconds / 2:
            return _UNLIKELY
        return ""

    def _charge(self, speculation: Speculation, now: float) -> None:
        """Take the CPU time that a sandbox has used since the last look from the budget."""
        cpu_s = None if speculation.meter is None else speculation.meter.cpu_s
        if speculation.sandbox is None or cpu_s is None:
            return
        # A sandbox that is new has been made for this call, so its start and what it replayed count too.
        used_s = cpu_s - self._charged.get(speculation.sandbox.id, 0.0)
        self._charged[speculation.sandbox.id] = cpu_s
        speculation.used_cpu_s += used_s
        self._counts.speculated_cpu_s += used_s
        self._budget.spend(used_s, now)

    async def _cancel(self, speculations: list[Speculation]) -> None:
        running = [speculation.running for speculation in speculations if speculation.running is not None]
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)


def may_speculate(tree: Tree) -> bool:
    """Return whether calls may be executed ahead in a tree: nothing that they do may leave their sandbox."""
    spec = tree.spec
    return spec.cache == "always" and not (spec.servers or spec.mcp_servers or spec.egress)
