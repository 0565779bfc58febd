"""The values that cross between the proxy and a driver: calls, results, and what running one taught us (pure)."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sandboxes.effects import Effect, StateDigest

Arguments = Mapping[str, Any]
"""JSON members: str, int, float, bool, None, list and dict."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call as a driver runs it: `endpoint` and `tool` say what, `arguments` how, `body` carries uploaded bytes."""

    endpoint: str
    tool: str
    arguments: Arguments
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What the tool answered: an HTTP status, a media type and bytes. A tool's own failure is a result too.

    headers: all that a tool server sent, those of the connection aside, in its order and spelling; others send none.
    """

    status: int
    media_type: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()


def content_type(headers: Iterable[tuple[str, str]]) -> str:
    """Return the media type that headers tell; the one of bytes where they tell none."""
    told = (value for name, value in headers if name.lower() == "content-type")
    return next(told, "application/octet-stream")


@dataclass(frozen=True, slots=True)
class Execution:
    """One call that was really run.

    seconds: how long the tool itself took, without restoring and without finding out what it changed.
    state: the sandbox's state after the call; None where it has no digest (live processes, too much changed).
    witness: beside live processes, a digest of what else there is: files that none of them is writing, and sessions. A
        replay must reach it; it names no state.
    shareable: False where the answer holds for this rollout and moment alone: a timeout, the time of day. It is kept in
        the rollout's own history, no other rollout is answered from it, and a state that the call made is private.
    restless: beside live processes, whether files or the processes themselves changed lately: what lives may be writing
        by itself, and then this state is another one moments later.
    settling: processes came or went and may still be starting.
    replay: what a replay has to run to get there, where that is not the call itself.
    nothing: nothing has happened: there is nothing to record.
    """

    result: ToolResult
    effect: Effect
    seconds: float
    state: StateDigest | None = field(default=None)
    witness: bytes | None = field(default=None)
    shareable: bool = True
    restless: bool = False
    settling: bool = False
    replay: ToolCall | None = None
    nothing: bool = False
