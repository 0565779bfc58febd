"""Which states are worth keeping, and which to give up first (pure).

A snapshot saves its replay each time a sandbox is wanted at its state; it costs the seconds of taking it and the bytes
that it holds. TVCACHE (arXiv 2602.10986) keeps a fork for every mutating call; what a replay costs is known here, so
the cheap ones need none. `bench/regret.py` measures these rules against the best choice in hindsight.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

FUTURE = 0.5
"""Rollouts that may come yet and have not begun, as a share of one: a task's next batch, which nobody has announced."""

_OWN_WEIGHT = 4.0
"""Passes after which what happened at a state itself counts as much as what happens at states in general."""

_MEMORY = 2000.0
"""Chances over which the rate of reuse is learnt; older ones fade."""


@dataclass(frozen=True, slots=True)
class Reuse:
    """How often a state is wanted again, learnt over all states that were made here.

    chances: rollouts that stood before a state when it was made, and so might have come to want a sandbox there; with
    `FUTURE` for each state. uses: how many did. The guess of 1 in 20 is that of the recorded API workloads (groups of
    2 to 5 rollouts), with the weight of 100 chances.
    """

    uses: float = 5.0
    chances: float = 100.0

    @property
    def rate(self) -> float:
        """The share of chances that became uses."""
        return self.uses / self.chances

    def made(self, behind: int) -> "Reuse":
        """Return what is known after a state was made with so many rollouts behind it."""
        fade = min(1.0, _MEMORY / self.chances)
        return Reuse(self.uses * fade, self.chances * fade + behind + FUTURE)

    def demanded(self) -> "Reuse":
        """Return what is known after a sandbox was wanted at a state and none stood there."""
        return replace(self, uses=self.uses + 1)


@dataclass(frozen=True, slots=True)
class Prospect:
    """What is known of a state that may be kept.

    saved_s: seconds that its snapshot saves at each use: the cheapest other way, with what is `at_stake_s` there, less
    the restore. uses: how often it
    will be used, roughly. reproducible: whether another way reaches this state at all. held: why it may not go
    ("pinned", "leased"); empty for most.
    """

    name: str
    saved_s: float
    uses: float
    size_bytes: int
    reproducible: bool = True
    held: str = ""


def expected_uses(reuse: Reuse, *, behind: int, visits: int, demand: int) -> float:
    """Return how often a sandbox will be wanted at a state where none stands.

    Each rollout that is behind the state, and those not begun yet, may come and leave the tree there. How likely that
    is follows from what states in general are wanted (`reuse`), and the more from this one the more rollouts went
    through it: visits, of which demand needed a sandbox.
    """
    rate = (reuse.rate * _OWN_WEIGHT + demand) / (_OWN_WEIGHT + visits)
    return rate * (behind + FUTURE)


def at_stake_s(*, replayed: int, diverged: int, doubtful: int = 0) -> float:
    """Return the seconds that a use loses on average where a replay must do: it may reach another state.

    Then the rollout is lost, some ten calls and thoughts: 60 s. How likely that is follows from the calls replayed here
    and those of them that diverged; the guess, with the weight of 300, is what running the recorded shell workload
    twice showed (0.3 % of the states differed).

    doubtful: calls on the way beside live processes which nobody has run twice, and which look as if they may differ
    (`tree.doubtful`). Nothing measured says how many do. One in two is taken for lost, and dearly (300 s), because what
    keeping costs is mostly paid while the model thinks, and a rollout that is lost may be one of a group that waits.
    """
    return 60.0 * (0.9 + diverged) / (300 + replayed) + 300.0 * (1 - 0.5**doubtful)


def worth_keeping(prospect: Prospect, *, cost_s: float) -> bool:
    """Say whether to take a snapshot: it must save more seconds than it costs, or be the only way back."""
    return not prospect.reproducible or prospect.uses * prospect.saved_s >= cost_s


def value(prospect: Prospect) -> float:
    """Return seconds saved per byte kept."""
    return prospect.uses * prospect.saved_s / max(prospect.size_bytes, 4096)


def why(prospect: Prospect) -> str:
    """Say in words why a snapshot is kept."""
    reasons = [prospect.held] if prospect.held else []
    if not prospect.reproducible:
        reasons.append("the only way back: no replay reaches this state")
    reasons.append(f"saves {prospect.saved_s:.3g} s at each use, {prospect.uses:.2g} uses expected")
    return "; ".join(reasons)


def victims(prospects: Iterable[Prospect], *, excess_bytes: int) -> list[str]:
    """Return the names to give up, least value first, until excess_bytes are freed.

    Those that are held (leased, pinned) or that no replay can rebuild are never among them, even where that frees
    less than asked.
    """
    chosen: list[str] = []
    for prospect in sorted(prospects, key=lambda p: (value(p), p.name)):
        if excess_bytes <= 0:
            break
        if prospect.held or not prospect.reproducible:
            continue
        chosen.append(prospect.name)
        excess_bytes -= prospect.size_bytes
    return chosen
