"""What a video tool cannot do for its agent (pure)."""

from typing import Any, Literal

FaultKind = Literal[
    "no-such-video", "not-a-video", "codec", "truncated", "empty", "damaged", "limit", "timeout",
    "not-loaded", "not-preprocessed", "range", "too-large", "memory", "crashed",
]  # fmt: skip
OF_THE_MOMENT = frozenset({"memory", "crashed", "timeout"})
"""What a second run might not meet: told to who asked, and recorded for nobody else."""


class VideoError(Exception):
    """Told to the agent as the tool's result, under `error`."""

    def __init__(self, kind: FaultKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "message": str(self)}

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> "VideoError":
        return cls(told["kind"], told["message"])
