"""Which program is the anchor of a sandbox."""

from collections.abc import Mapping
from typing import Any

from sandboxes.guest.anchors.anchor import Anchor
from sandboxes.guest.anchors.bash_anchor import BashAnchor
from sandboxes.guest.anchors.native_anchor import NativeAnchor
from sandboxes.guest.users import User


def start_anchor(user: User) -> Anchor:
    """Start an anchor with the program that there is.

    Args:
        user: The user of its shells.

    Raises:
        OSError: No process can be started.
    """
    anchor: Anchor = NativeAnchor.start() or BashAnchor.start()
    anchor.user = user
    return anchor


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
