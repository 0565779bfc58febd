"""What the proxy stores about an E2B sandbox beside its rollout (pure)."""

from dataclasses import dataclass, field, fields, replace
from typing import Any

import orjson

DEFAULT_TEMPLATE = "base"
"""The template that SDKs name when their user names none. It stands for the task's own environment."""
DEFAULT_TIMEOUT_S = 300.0
"""E2B's own default timeout of a sandbox."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxNote:
    """What E2B's clients have set for a sandbox: the defaults for rollouts of another protocol."""

    template: str = DEFAULT_TEMPLATE  # The one that the sandbox was created from.
    metadata: dict[str, str] = field(default_factory=dict)  # The client's labels.
    envs: dict[str, str] = field(default_factory=dict)  # Variables that every process of the sandbox gets.
    started_at: float  # When the sandbox was created, in seconds since 1970.
    ends_at: float  # When its timeout passes, in seconds since 1970.
    paused: bool = False  # Requests to envd are refused until the sandbox is resumed.
    snapshots: list[dict[str, Any]] = field(default_factory=list)  # As the API describes them.
    mortal: bool = False  # Created through E2B's API, so its timeout applies.
    pauses: bool = False  # On timeout, pause the sandbox instead of ending it.
    resumes: bool = False  # Resume a paused sandbox on the next request to envd.
    timeout_s: float = DEFAULT_TIMEOUT_S  # The timeout that the sandbox was created with.

    @classmethod
    def new(cls, now: float) -> "SandboxNote":
        """Return a note with the defaults for a sandbox that starts now."""
        return cls(started_at=now, ends_at=now + DEFAULT_TIMEOUT_S)

    @classmethod
    def decode(cls, text: str, now: float) -> "SandboxNote":
        """Read a stored note. Members that an older version did not store have their defaults."""
        stored = orjson.loads(text)
        known = {name: stored[key] for name, key in _STORED_NAMES.items() if key in stored}
        return replace(cls.new(now), **known)

    def encode(self) -> str:
        """Return the note as it is stored."""
        return orjson.dumps({key: getattr(self, name) for name, key in _STORED_NAMES.items()}).decode()

    def is_over(self, now: float) -> bool:
        """Return whether the timeout has passed. A paused sandbox and one that is not mortal have no end."""
        return self.mortal and not self.paused and now >= self.ends_at


_RENAMED = {"started_at": "started", "ends_at": "ends", "timeout_s": "seconds"}
"""Attributes whose stored name is another one, because it is older."""
_STORED_NAMES = {attribute.name: _RENAMED.get(attribute.name, attribute.name) for attribute in fields(SandboxNote)}
