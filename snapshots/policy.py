"""Snapshot policy: which states are worth a snapshot, and which snapshots to evict first.

A snapshot saves a replay each time a sandbox is needed in its state. It costs the seconds to take it and its bytes, so
states that are cheap to replay need none. `bench/regret.py` measures these rules against the best choice in hindsight.

A state without a snapshot and without a replay that surely reaches it answers nobody else's calls
(`restore_plan.has_way_back`): beside live processes, a snapshot that is not taken turns hits into misses.
"""

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

FUTURE = 0.5
"""Rollouts that have not begun yet but may come to a state: a task's next batch, which is not announced. An estimate.
"""

CHEAP_SHARE = 0.25
"""Share of a call's own time that a snapshot of its state may always cost. So misses cost at most a quarter more, and a
rollout that leaves the tree waits for no replay. With files, a freeze takes 0.6 to 2.5 ms beside 10 to 25 ms of a
call."""

RARE = 1e-4
"""Rate of reuse below which cheap snapshots are not taken: some ten thousand states in a row that no rollout needed."""

_OWN_WEIGHT = 4.0
"""Number of visits after which a state's own history counts as much as that of all states. An estimate."""

_MEMORY = 2000.0
"""Number of chances over which the rate of reuse is learnt; older ones fade. Some hundred rollouts of a task."""


@dataclass(frozen=True, slots=True)
class Reuse:
    """How often a state needs a sandbox again, learnt over all states."""

    # The first guess, 1 in 20 with the weight of 100 chances, comes from the recorded API workloads (groups of 2 to 5
    # rollouts).

    uses: float = 5.0  # How many rollouts needed a sandbox at a state.
    # How many rollouts might have come to need one: those above a state when it was made, and `FUTURE` for each
    # state.
    chances: float = 100.0

    @property
    def rate(self) -> float:
        """Share of chances that became uses."""
        return self.uses / self.chances

    def made(self, behind: int) -> "Reuse":
        """Return the statistics after a state was made with this many rollouts above it that may still come."""
        # Both counts fade alike, so the rate stays and only its weight against new chances falls.
        fade = min(1.0, _MEMORY / self.chances)
        return Reuse(self.uses * fade, self.chances * fade + behind + FUTURE)

    def demanded(self) -> "Reuse":
        """Return the statistics after a rollout needed a sandbox at a state and none was there."""
        # Demand is no chance of its own: the chance was counted when the state was made.
        return replace(self, uses=self.uses + 1)


@dataclass(frozen=True, slots=True)
class Prospect:
    """What is known of a snapshot, taken or not."""

    name: str  # Id of the snapshot; empty if it is not taken.
    # Seconds that it saves at each use: the cheapest other way and its risk (`at_stake_s`) less the restore.
    saved_s: float
    uses: float  # Expected number of uses.
    size_bytes: int  # Bytes that it added to the states it was built on.
    parts: tuple[str, ...] = ()  # The units of storage that hold it, those that it shares among them.
    reproducible: bool = True  # Whether another way may reach the state: none of its calls is known to diverge.
    proven: bool = True  # Whether another way is known to reach it: each of its calls has been replayed to its state.
    # Whether the snapshot is the nearest way to where a running rollout is, or to where it may be led.
    needed: bool = True
    held: str = ""  # Why the snapshot must not be evicted ("pinned", "leased"); empty if it may be.
    # Whether the other way replays a call that may well reach another state (`tree.doubtful`), for a state without
    # live processes.
    doubtful: bool = False
    risk_s: float = 0.0  # How many of the saved seconds are the risk; see `at_stake_s`.


def expected_uses(reuse: Reuse, *, behind: int, visits: int, demand: int) -> float:
    """Return how often a sandbox will be needed in a state, which rollouts `behind` may still come to and leave there.

    How likely that is follows from all states, and the more from this one the more rollouts have visited it. `demand`
    is how many of these needed a sandbox.
    """
    # A weighted mean: the rate of all states counts like `_OWN_WEIGHT` visits, the state's own demand like its
    # visits.
    rate = (reuse.rate * _OWN_WEIGHT + demand) / (_OWN_WEIGHT + visits)
    # `FUTURE` keeps the product above zero: a task's next batch may come after all rollouts have passed.
    return rate * (behind + FUTURE)


def at_stake_s(*, replayed: int, diverged: int, doubtful: int = 0) -> float:
    """Return the seconds that a use loses on average without a snapshot, because the replay may diverge.

    A replay that diverges loses the rollout: some ten calls and the thinking between them, 60 s. How likely that is
    follows from the calls replayed so far. The first guess, with the weight of 300 calls, is 0.3 %: so many states
    differed when the recorded shell workload was run twice. Of `doubtful` calls on the way, beside live processes
    (`tree.doubtful`), one in two is assumed to diverge, at 300 s, because a snapshot is mostly paid for while the model
    thinks, and a lost rollout may hold up its group.
    """
    # 0.9 of 300 are the 0.3 % of the first guess. Each doubtful call halves the chance that the replay succeeds.
    return 60.0 * (0.9 + diverged) / (300 + replayed) + 300.0 * (1 - 0.5**doubtful)


def worth_keeping(prospect: Prospect, *, cost_s: float) -> bool:
    """Return whether to take a snapshot: it must save more seconds than it costs, or may be the only way to its state.

    Behind a doubtful call each state without live processes is kept: a later rollout comes to it by hits, and its next
    miss would be lost. Behind doubtful calls beside live processes the seconds decide, because nearly all calls there
    are doubtful, and checkpoints are dear.
    """
    if prospect.doubtful or not prospect.reproducible:
        return True
    # The cost is mostly paid while the model thinks, the saving while it waits.
    return prospect.uses * prospect.saved_s >= cost_s


def is_cheap(reuse: Reuse, *, cost_s: float, made_s: float) -> bool:
    """Return whether a snapshot costs so little beside its state's last call (`made_s`) that it is taken unless unused.

    Otherwise states that no rollout has left yet are kept far apart, and the first rollout that leaves between two of
    them waits for the replay of all calls since the nearest. None is cheap where nearly no state is needed again
    (`reuse`).
    """
    return reuse.rate >= RARE and cost_s <= CHEAP_SHARE * made_s


def value(prospect: Prospect) -> float:
    """Return the seconds saved for each byte kept. Anything below a page counts as a page: files take whole blocks."""
    # Bytes are the budget, so the worth of each byte decides and not the worth of each snapshot.
    return prospect.uses * prospect.saved_s / max(prospect.size_bytes, 4096)


def why(prospect: Prospect) -> str:
    """Return a phrase that says why a snapshot is kept."""
    reasons = [prospect.held] if prospect.held else []
    if not prospect.reproducible:
        reasons.append("the only way back: no replay reaches this state")
    elif not prospect.proven:
        reasons.append("no replay has reached this state yet, so it is not evicted")
    tools_s = prospect.saved_s - prospect.risk_s
    risk = f", and {prospect.risk_s:.3g} s that a lost rollout costs on average" if prospect.risk_s >= 1 else ""
    reasons.append(f"saves {tools_s:.3g} s of replay at each use{risk}; {prospect.uses:.2g} uses expected")
    return "; ".join(reasons)


def victims(prospects: Iterable[Prospect], *, excess_bytes: float) -> list[str]:
    """Return the names of the snapshots to evict, least value first, until `excess_bytes` are freed, if possible.

    Snapshots that are held, or that may be the only way to their state, are never among them: an eviction costs time
    and never an answer, so the other way must have been proven.
    """
    return _least_valuable(list(prospects), lambda p: p.proven and not p.held, excess_bytes)


def unneeded(prospects: Iterable[Prospect], *, excess_bytes: float) -> list[str]:
    """Return the names of snapshots to give up although no replay has reached their states, least value first.

    No running rollout is where it needs them. A later one with the same calls is not led there: it runs them again,
    which proves the states or makes others.
    """
    return _least_valuable(list(prospects), lambda p: not (p.needed or p.held), excess_bytes)


def unproven(prospects: Iterable[Prospect]) -> list[str]:
    """Return the names of the snapshots that could be evicted if a replay reached their states, least value first."""
    candidates = (p for p in prospects if p.reproducible and not p.proven and not p.held)
    return [prospect.name for prospect in sorted(candidates, key=_order)]


def _order(prospect: Prospect) -> tuple[float, str]:
    # The name breaks ties, so that two runs over the same prospects choose the same snapshots.
    return value(prospect), prospect.name


def _least_valuable(prospects: list[Prospect], may_go: Callable[[Prospect], bool], excess_bytes: float) -> list[str]:
    """Return what frees the bytes at the least value. What frees nothing stays."""
    # A state shares the storage of the states that it was built on, so only the last of them frees a part.
    users, bytes_of = Counter(part for p in prospects for part in _parts(p)), dict[str, float]()
    # The state with the fewest parts of those that have one has brought it along.
    for prospect in sorted(prospects, key=lambda p: (len(p.parts), p.name)):
        own = [part for part in _parts(prospect) if part not in bytes_of]
        bytes_of.update((part, prospect.size_bytes / len(own)) for part in own)
    stay = {part for prospect in prospects if not may_go(prospect) for part in _parts(prospect)}
    # Those that can be freed, each with the parts that only states like it have.
    parts_of = {p.name: [x for x in _parts(p) if x not in stay and bytes_of[x]] for p in prospects if may_go(p)}
    waiting = [_order(prospect) for prospect in prospects if parts_of.get(prospect.name)]
    heapq.heapify(waiting)
    order, shared = {name: (worth, name) for worth, name in waiting}, list[tuple[float, str]]()
    sharing: defaultdict[str, list[str]] = defaultdict(list)
    chosen: dict[str, None] = {}
    while excess_bytes > 0 and (waiting or shared):
        # Where states share all that they have, one of them must go without freeing anything.
        is_forced = not waiting
        _, name = heapq.heappop(shared if is_forced else waiting)
        freed = sum(bytes_of[part] for part in parts_of[name] if users[part] == 1)
        if name in chosen:
            continue
        if not (freed or is_forced):
            sharing[min(parts_of[name], key=users.__getitem__)].append(name)
            heapq.heappush(shared, order[name])
            continue
        chosen[name] = None
        # An estimate all the same: live sandboxes use parts, too. `fit` counts again once the drivers have collected.
        excess_bytes -= freed
        for part in parts_of[name]:
            users[part] -= 1
            if users[part] == 1:
                for other in sharing.pop(part, ()):
                    heapq.heappush(waiting, order[other])
    return list(chosen)


def _parts(prospect: Prospect) -> tuple[str, ...]:
    return prospect.parts or (prospect.name,)
