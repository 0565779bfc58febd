"""Which states are worth keeping, and which to give up first (pure).

A snapshot saves its replay each time a sandbox is wanted at its state; it costs the seconds of taking it and the bytes
that it holds. TVCACHE (arXiv 2602.10986) keeps a fork for every mutating call; what a replay costs is known here, so
the cheap ones need none.
"""

from collections.abc import Iterable
from dataclasses import dataclass

FREEZE_S = 0.004
"""Seconds to freeze files and go on, until one was measured here."""


@dataclass(frozen=True, slots=True)
class Prospect:
    """What is known of a state that may be kept.

    replay_s: seconds from the nearest other snapshot to here. passes: rollouts that stood here. live: those that stand
    here now, or before it on their way. reproducible: whether a replay reaches this state at all.
    """

    name: str
    replay_s: float
    passes: int
    live: int
    size_bytes: int
    reproducible: bool = True
    protected: bool = False


def expected_uses(prospect: Prospect) -> float:
    """Return how often a sandbox will be wanted here, roughly.

    Rollouts that stand here may each lose their sandbox or leave the tree here; of those that went through, one in four
    comes back in this project's recorded workloads (groups of 8, shared prefixes).
    """
    return prospect.live + 0.25 * prospect.passes


def worth_keeping(prospect: Prospect, *, cost_s: float) -> bool:
    """Say whether to take a snapshot: it must save more seconds than it costs, or be the only way back."""
    return not prospect.reproducible or expected_uses(prospect) * prospect.replay_s >= cost_s


def value(prospect: Prospect) -> float:
    """Return replay seconds saved per byte kept."""
    return expected_uses(prospect) * prospect.replay_s / max(prospect.size_bytes, 4096)


def victims(prospects: Iterable[Prospect], *, excess_bytes: int) -> list[str]:
    """Return the names to give up, least value first, until excess_bytes are freed.

    Those that are protected (leased, pinned) or that no replay can rebuild are never among them, even where that frees
    less than asked.
    """
    chosen: list[str] = []
    for prospect in sorted(prospects, key=lambda p: (value(p), p.name)):
        if excess_bytes <= 0:
            break
        if prospect.protected or not prospect.reproducible:
            continue
        chosen.append(prospect.name)
        excess_bytes -= prospect.size_bytes
    return chosen
