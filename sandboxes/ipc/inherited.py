"""Descriptors that a restored process inherits from CRIU, and their numbers."""

from collections.abc import Mapping
from typing import Any


def inherited(checkpoint: Mapping[str, Any]) -> list[str]:
    """Return the kernel's names of the pipes that led to the processes when they were dumped, in a fixed order (pure).

    CRIU restores each from a descriptor that it is given in its place: `operate.INHERITED_FD` and following. So it
    does mapped files that it cannot open by itself.
    """
    names = list(checkpoint["anchor"]["pipes"])
    for shell in checkpoint["shells"]:
        names += [shell["pipes"][place] for place in sorted(shell["pipes"], key=int)]
    for kind in ("servers", "left"):
        names += [name for one in checkpoint.get(kind, ()) for name in one["pipes"]]
    return names + sorted(checkpoint["mapped"])


SOCKET_FD, IMAGES_FD, KERNEL_FD, INHERITED_FD = 3, 7, 9, 20
"""As `sandboxes.criu` tells CRIU; from INHERITED_FD on stands what restored processes inherit."""
