"""What CRIU is started with: the names of its files, its descriptors, and those that restored processes inherit."""

from collections.abc import Mapping
from typing import Any

SOCKET_FD, IMAGES_FD, KERNEL_FD, INHERITED_FD = 3, 7, 9, 20
"""CRIU's own descriptors as `snapshots.criu` names them to CRIU; the inherited ones begin at INHERITED_FD."""

PROGRAM, FEATURES, LIBRARIES = "criu", "kernel", "dev/lib"
"""The program, its cache of kernel features and its libraries, in the directory that becomes CRIU's root at first. A
sandbox's /dev is read-only and has no `lib`. So a library that CRIU would load after its root has changed is not found
there, whatever the agent has made."""


def inherited(checkpoint: Mapping[str, Any]) -> list[str]:
    """Return CRIU's names of the pipes and files that restored processes inherit, from `INHERITED_FD` on (pure)."""
    # The anchor's pipes come first on both sides; the order is all that connects a name with its descriptor.
    names = list(checkpoint["anchor"]["pipes"])
    for shell in checkpoint["shells"]:
        # By number and not by text, where 10 would come before 9: both sides must agree.
        names += [shell["pipes"][number] for number in sorted(shell["pipes"], key=int)]
    for kind in ("servers", "left"):
        # A checkpoint without processes of a kind may lack the kind.
        names += [name for process in checkpoint.get(kind, ()) for name in process["pipes"]]
    # Sorted, because the order of an object's members must not matter.
    return names + sorted(checkpoint["mapped"])
