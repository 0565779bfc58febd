"""The effects of calls on the state of their sandbox, and the digests that name states (pure)."""

from dataclasses import dataclass
from enum import Flag


class Effect(Flag):
    """What a call changed. A call may have several effects; `NONE` alone makes it an observation.

    Attributes:
        NONE: The call changed nothing.
        FILES: Content, mode, owner, links or extended attributes of files, or the order of their modification.
        SESSION: A shell session: its directory, variables, functions or jobs.
        PROCESSES: Background processes started or ended.
        DATABASE: The content of a database.
        UNKNOWN: The driver cannot tell, as for a server outside the machine. It counts as a change.
    """

    NONE = 0
    FILES = 1
    SESSION = 2
    PROCESSES = 4
    DATABASE = 8
    UNKNOWN = 16

    @property
    def names(self) -> list[str]:
        """Return the names of the effects on the wire, `["none"]` for no effect."""
        return [str(member.name).lower() for member in self] or ["none"]


@dataclass(frozen=True, slots=True)
class StateDigest:
    """Two digests of one sandbox state, 32 bytes each, relative to the task's root state.

    Attributes:
        exact: Covers content, modes, owners, links, extended attributes, the order of modification times, and the
            sessions. States with equal `exact` digests are one node of the tree.
        content: Covers the same without the order of modification times. Two files that are written within one tick of
            the kernel's clock may swap their order from run to run. A replay puts the recorded order back.
    """

    exact: bytes
    content: bytes
