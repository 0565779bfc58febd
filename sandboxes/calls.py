"""The values that cross between the proxy and a driver: calls, results, and what an execution taught us (pure)."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

from sandboxes.effects import Effect, StateDigest

Arguments = Mapping[str, Any]
"""JSON members: str, int, float, bool, None, list and dict."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call as a driver runs it."""

    endpoint: str
    tool: str
    arguments: Arguments
    body: bytes = b""


Mark = Literal["timeout", "memory", "disk", "pids", "output", "broken", "machine"]
MARKS: Mapping[Mark, str] = {
    "timeout": "The time limit ended the call.",
    "memory": "The kernel killed a process, because the sandbox had no more memory (`limits.memory_mb`).",
    "disk": "The sandbox held too many new files, or nested directories too deeply (`limits.disk_mb`).",
    "pids": "No further process or thread could be started (`limits.pids`).",
    "output": "Output was left out (`limits.output_bytes`, or the most rows of a result).",
    "broken": "No shell starts in the sandbox: earlier calls of the rollout have broken it.",
    "machine": "The machine, the proxy or a tool server failed for the moment, which says nothing about the agent.",
}
"""What trainers need to know of a call beside its answer: which limit it reached, and whose failure it is. Marks are
facts that drivers saw. No text that a tool prints makes one, so an agent cannot write its own."""
assert set(MARKS) == set(get_args(Mark))


def in_order(marks: Iterable[str]) -> tuple[Mark, ...]:
    """Return marks without repetitions, in the order of `MARKS`; other texts are left out."""
    given = set(marks)
    return tuple(mark for mark in MARKS if mark in given)


MODEL_TOKENS = "x-model-tokens"
"""The header of a result with the number of tokens that models counted while its call ran."""
_MAX_DIGITS = 15
"""The longest number of tokens that counts. A server may send any text; sums of these fit into 64 bits."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a tool answered. A tool's own failure is a result too."""

    status: int
    media_type: str
    body: bytes
    # The end-to-end headers of a tool server, in order and spelling; other tools have only `MODEL_TOKENS`.
    headers: tuple[tuple[str, str], ...] = ()
    marks: tuple[Mark, ...] = ()  # What trainers need to know of the call beside the answer (`MARKS`).

    def marked(self, *marks: Mark) -> "ToolResult":
        """Return the result with more marks."""
        return replace(self, marks=in_order((*self.marks, *marks))) if marks else self

    @property
    def model_tokens(self) -> int:
        """The tokens that models counted while the call ran; 0 without the header, or where it is no number."""
        value = next((value for name, value in self.headers if name == MODEL_TOKENS), "")
        return int(value) if value.isdecimal() and len(value) <= _MAX_DIGITS else 0


def content_type(headers: Iterable[tuple[str, str]]) -> str:
    """Return the media type that headers name; without one, the media type of arbitrary bytes."""
    values = (value for name, value in headers if name.lower() == "content-type")
    return next(values, "application/octet-stream")


EgressOutcome = Literal["recorded", "repeated", "live", "refused", "failed"]
"""What became of a request to a host outside: its response was received and recorded, or came from the recording; bytes
passed that are not recorded; the rules refused it; there was no response."""


@dataclass(slots=True)
class EgressExchange:
    """One request of a program in a sandbox to a host outside."""

    method: str  # `CONNECT` for a tunnel.
    url: str  # Its URL, or host and port of a tunnel. It may be any text that a program has sent.
    outcome: EgressOutcome
    status: int  # The HTTP status that the program received.
    size_bytes: int  # Size of the response's body, or what came through a tunnel; it grows while that is open.
    detail: str = ""  # Why it was refused or failed; empty otherwise.


def names_any(call: ToolCall, texts: Iterable[str]) -> bool:
    """Return whether a call has one of some texts in its tool's name or in its arguments, at any depth (pure)."""
    texts = tuple(texts)
    waiting: list[Any] = [call.tool, call.arguments] if texts else []
    while waiting:
        match waiting.pop():
            case str() as part:
                if any(text in part for text in texts):
                    return True
            case Mapping() as members:
                waiting += members.values()
            case list() | tuple() as parts:
                waiting += parts
    return False


class Course(NamedTuple):
    """What a replay of a call is given, so that it comes to the same state as the call."""

    # The order in which the call wrote files, as the driver encodes it; None if there is none.
    order: bytes | None = None
    last_pid: int = 0  # The pid that was assigned last before the call; 0 if it is not known.


UNKNOWN_COURSE = Course()


class ResourceUse(NamedTuple):
    """What a call used of the machine, with all that ran in its sandbox meanwhile; None is what is not known."""

    cpu_s: float | None = None
    peak_bytes: int | None = None  # With the pages of files that the kernel holds for the sandbox.
    read_bytes: int | None = None
    written_bytes: int | None = None  # Without what the kernel writes after the call.


@dataclass(frozen=True, slots=True)
class Execution:
    """The outcome of a call that really ran."""

    result: ToolResult
    effect: Effect
    seconds: float  # How long the tool took, without restoring the state before or detecting the effects after.
    # The state after the call. None if it has no digest: processes are running, or directories are nested too deeply.
    state: StateDigest | None = None
    # While processes are running: a digest of the files that none of them writes, and of the sessions. A replay must
    # reach it, but it does not name a state.
    witness: bytes | None = None
    # False if the result holds for this rollout and moment only, such as a timeout or the time of day. It stays in the
    # rollout's own history, and a state that the call made is private.
    shareable: bool = True
    short: bool = False  # The machine had none left of what all its sandboxes share, such as pipes.
    # While processes are running: files or processes changed lately without a call, so the state may differ soon.
    restless: bool = False
    replay: ToolCall | None = None  # The call that a replay must run to reach the state, if it is not this call.
    course: Course = UNKNOWN_COURSE  # What `driver.expect` needs before a replay.
    is_empty: bool = False  # Nothing happened since the last call: a poll without new output. It is not recorded.
    # Since the last call something came from outside the sandbox that was not recorded before. A replay that has it may
    # have put other bytes into a process.
    live: bool = False
    exchanges: tuple[EgressExchange, ...] = ()  # The requests to hosts outside since the last call.
    volatile: bool = False  # The call used the clock or random numbers, so a replay may well reach another state.
    resources: ResourceUse | None = None  # What the call used of the machine; None if the driver does not know.
    repeatable: bool = True  # False if no replay is to be tried, because none would reach the state.
