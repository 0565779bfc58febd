"""What a call did to the state of its sandbox (pure)."""

from dataclasses import dataclass
from enum import Flag


class Effect(Flag):
    """What a call changed. `NONE` alone makes a call an observation; a call may have several others at once."""

    NONE = 0
    FILES = 1
    SESSION = 2
    PROCESSES = 4
    DATABASE = 8
    UNKNOWN = 16

    @property
    def names(self) -> list[str]:
        """Return the words of the wire, `["none"]` for no effect."""
        return [str(member.name).lower() for member in self] or ["none"]


@dataclass(frozen=True, slots=True)
class StateDigest:
    """Two names of one sandbox state, 32 bytes each, relative to the task's root state.

    exact: content, modes, owners, links, xattrs, the *order* of modification times, and the sessions. States with equal
        `exact` digests are one node.
    content: the same without the order of modification times. A replay must reach it; the order of two files that were
        written within one tick of the kernel's clock differs from run to run, and is no divergence.
    """

    exact: bytes
    content: bytes
