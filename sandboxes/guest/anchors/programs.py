"""Which program is the anchor of a sandbox."""

from collections.abc import Mapping
from typing import Any

from sandboxes.guest.anchors.anchor import Anchor
from sandboxes.guest.anchors.bash_anchor import BashAnchor
from sandboxes.guest.anchors.native_anchor import NativeAnchor
from sandboxes.guest.users import User


def start_anchor(user: User) -> Anchor:
    """Start an anchor for a user's shells, with the program that there is."""
    anchor: Anchor = NativeAnchor.start() or BashAnchor.start()
    anchor.user = user
    return anchor


def adopted_anchor(remembered: Mapping[str, Any], ends: tuple[int, int]) -> Anchor:
    """Return our end of a restored anchor, by what `Anchor.remember` returned and our ends of its new pipes."""
    if "program" not in remembered:
        return BashAnchor.adopt(remembered, ends)
    anchor = NativeAnchor(remembered["pid"], ends)
    anchor.digest = remembered["program"]
    return anchor
