"""The effects of calls on the state of their sandbox, and the digests that name states (pure)."""

from dataclasses import dataclass
from enum import Flag


class Effect(Flag):
    """What a call changed. A call may have several effects; `NONE` alone makes it an observation."""

    NONE = 0
    FILES = 1  # Content, mode, owner, links or extended attributes of files, or the order of their modification.
    SESSION = 2  # A shell session: its directory, variables, functions or jobs.
    PROCESSES = 4  # Background processes started or ended.
    DATABASE = 8
    UNKNOWN = 16  # The driver cannot tell, as for a server outside the machine. It counts as a change.

    @property
    def names(self) -> list[str]:
        """Return the names of the effects on the wire, `["none"]` for no effect."""
        return [str(member.name).lower() for member in self] or ["none"]


@dataclass(frozen=True, slots=True)
class StateDigest:
    """Two digests of one sandbox state, 32 bytes each, relative to the task's root state."""

    # Covers content, modes, owners, links, extended attributes, the order of modification times, and the sessions.
    # States with equal `exact` digests are one node of the tree.
    exact: bytes
    # The same without the order of modification times. Two files that are written within one tick of the kernel's clock
    # may swap their order from run to run. A replay puts the recorded order back.
    content: bytes
