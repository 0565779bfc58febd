"""The errors of video tools that their agent can act on (pure)."""

from typing import Any, Literal

FaultKind = Literal[
    "no-such-video", "not-a-video", "codec", "truncated", "empty", "damaged", "limit", "timeout",
    "not-loaded", "not-preprocessed", "range", "too-large", "memory", "crashed",
]  # fmt: skip
TRANSIENT = frozenset({"memory", "crashed", "timeout"})
"""Errors that a second run may not meet. Only the rollout that made the call gets them."""


class VideoError(Exception):
    """A video tool cannot do what its agent wants. The error becomes the tool's result, as its member `error`."""

    def __init__(self, kind: FaultKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind

    def to_json(self) -> dict[str, Any]:
        """Return the error as JSON members."""
        return {"kind": self.kind, "message": str(self)}
