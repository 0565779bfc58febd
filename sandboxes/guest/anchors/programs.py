"""Which program is the anchor of a sandbox."""

import os
from collections.abc import Mapping
from typing import Any

from sandboxes.guest.anchors.anchor import Anchor
from sandboxes.guest.anchors.bash_anchor import BashAnchor
from sandboxes.guest.anchors.native_anchor import NativeAnchor
from sandboxes.linux import spawn


def start_anchor(*, forks: bool = True) -> Anchor:
    """Start an anchor with the program that there is.

    Args:
        forks: Whether it may be one that forks shells.

    Raises:
        OSError: No process can be started.
    """
    if forks and (anchor := NativeAnchor.start_with_bash()) is not None:
        return anchor
    return NativeAnchor.start() if os.access(spawn.ANCHOR, os.X_OK) else BashAnchor.start()


def adopted_anchor(remembered: Mapping[str, Any], ends: tuple[int, int]) -> Anchor:
    """Return our end of an anchor that was restored.

    Args:
        remembered: What `Anchor.remember` returned before the checkpoint.
        ends: Our descriptors of its new pipes.
    """
    if "program" not in remembered:
        return BashAnchor.adopt(remembered, ends)
    anchor = NativeAnchor(remembered["pid"], ends)
    anchor.digest = remembered["program"]
    return anchor
