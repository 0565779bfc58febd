"""The vocabulary of dialects: a `Request` becomes its `Meaning`, a response takes the client's form (pure)."""

import json
import re
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson

from proxy.refusals import Problem, RefusalError
from proxy.tree.environments import EnvironmentRequest
from proxy.tree.keys import CallKey
from sandboxes.calls import ToolCall
from sandboxes.listener import Headers
from sandboxes.tool_clients.json_text import parse_json

AT_ONCE_BYTES = 1 << 18
"""Largest body that is read on the event loop. A larger one, such as files of one form, is read beside it: hits wait
for what runs on the loop."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request as its endpoint sees it.

    Attributes:
        method: The HTTP method; `WS` for a message on a WebSocket.
        target: Path and query below the endpoint, as sent; begins with a slash.
        headers: Headers, with names in lower case.
        body: The body.
        rollout: The rollout that the URL or a token names; empty if the protocol's own ID names it.
        base: The URL under which the client knows the endpoint.
        fresh: A name for a new rollout, if one begins; empty if the URL names the rollout.
        parsed: Where a dialect keeps what it has parsed, for its later looks at the same request.
    """

    method: str
    target: str
    headers: Headers
    body: bytes
    rollout: str = ""
    base: str = ""
    fresh: str = ""
    parsed: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def path(self) -> str:
        """The target without its query."""
        return self.target.partition("?")[0]

    @property
    def query(self) -> str:
        """The target's query; empty for none."""
        return self.target.partition("?")[2]

    def header(self, name: str) -> str:
        """Return the value of a header, named in lower case; empty if it was not sent."""
        return next((value for header, value in self.headers if header == name), "")


@dataclass(frozen=True, slots=True)
class Local:
    """A reply of the proxy's own, which changes no rollout; the one named `within`, if any, must run."""

    status: int
    body: bytes = b""
    headers: Headers = (("content-type", "application/json"),)
    within: str = ""


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call.

    Attributes:
        call: The call that the driver executes.
        key: The key under which the tree knows the call.
        rollout: The rollout that the request names; empty if the URL names it.
        request_id: Identifies a request that may be retried: the retry gets the first attempt's answer. Empty for none.
        commutes: Whether the call may change places with waiting calls of its rollout that commute too.
        bound: Whether the response names the rollout, so that each client needs its own form of it (`Dialect.answer`).
        streams: Whether the response may be relayed to the client while it arrives.
        events: Whether the client may get server-sent events while the call runs (`Eventful`).
        cancel: The name under which the client may cancel the call (`Cancel`); empty if it may not.
        hangup: Whether the client also cancels the call by disconnecting.
        existing: Whether the rollout must be running already, because only the proxy gives such names.
        constant: Whether the answer is the same in all states of the task.
        shared_at_root: Whether rollouts at the root share one answer, which is no step, such as a list of tools.
        aliases: Pairs of a name that the client chose and the name under which it is recorded.
        routed: Whether the request itself names its task.
    """

    call: ToolCall
    key: CallKey
    rollout: str = ""
    request_id: str = ""
    commutes: bool = False
    bound: bool = False
    streams: bool = False
    events: bool = False
    cancel: str = ""
    hangup: bool = False
    existing: bool = False
    constant: bool = False
    shared_at_root: bool = False
    aliases: tuple[tuple[str, str], ...] = ()
    routed: bool = False


@dataclass(frozen=True, slots=True)
class Open:
    """The begin of a rollout, and then a reply or a call.

    Attributes:
        rollout: The name of the new rollout.
        then: What else the request means.
        parent: The rollout at whose node the new one begins; empty for the root.
        headers: More headers for the response.
        spec: The environment that the request names (`environments.spec_for`); None for the task's own.
    """

    rollout: str
    then: "Local | Call"
    parent: str = ""
    headers: Headers = ()
    spec: EnvironmentRequest | None = None


@dataclass(frozen=True, slots=True)
class Close:
    """The end of a rollout."""

    rollout: str
    answer: Local


@dataclass(frozen=True, slots=True)
class Cancel:
    """The cancellation of a running call, by the name that the client gave the call (`Call.cancel`)."""

    rollout: str
    name: str
    answer: Local


Meaning = Local | Call | Open | Close | Cancel


@dataclass(frozen=True, slots=True)
class Response:
    """A response to one client."""

    status: int
    headers: Headers
    body: bytes


class Dialect(Protocol):
    """Translates the requests and responses of one endpoint's protocol.

    Attributes:
        headers_matter: Whether the meaning of a request depends on its headers. If not, a call is remembered by the
            other bytes of its request.
        deciding: Where headers matter: all those, in lower case, that decide what a request means and which form its
            answer has, for all rollouts of a tree alike, beside the one that names the rollout. None if others may.
    """

    headers_matter: bool
    deciding: tuple[bytes, ...] | None = None

    def read(self, request: Request) -> Meaning:
        """Return what a request means. Raises RefusalError: 400 to 422, with what to send instead."""
        ...

    def answer(self, response: Response, request: Request) -> Response:
        """Return a recorded response in the form of the client that sent the request: as it is, by default."""
        del request
        return response

    def problem(self, problem: Problem, request: Request) -> Local | None:
        """Return a problem in the protocol's own form; None, the default, if the protocol has none."""
        del problem, request
        return None


class Eventful(Dialect, Protocol):
    """A dialect whose clients may get events while a call runs."""

    def takes_events(self, request: Request) -> bool:
        """Return whether the client that sent the request accepts events."""
        ...

    def event(self, message: bytes, request: Request) -> bytes:
        """Return the event of a server's message for the client that sent the request; empty if it does not want it."""
        ...

    def last_event(self, response: Response, request: Request) -> bytes:
        """Return the event with the response to the request, which follows all other events."""
        ...


def json_object(body: bytes, hint: str = "", *, slug: str = "json", status: int = 422) -> dict[str, Any]:
    """Return the JSON object in a body. Raises RefusalError with the hint: 400 for no JSON, else `status`, `slug`."""
    example = f" Send {hint} as UTF-8." if hint else ""
    try:
        value = parse_json(body)
    except orjson.JSONDecodeError as error:
        if (replaced := _without_surrogates(body)) is not None:
            raise LoneSurrogateError(replaced) from None
        raise MalformedJsonError(400, "json", f"the body is not JSON: {error}.{example}") from None
    if not isinstance(value, dict):
        raise RefusalError(status, slug, f"the body must be a JSON object.{example}")
    return value


class MalformedJsonError(RefusalError):
    """A body is not JSON."""


class LoneSurrogateError(RefusalError):
    """A text in a JSON object has half of a surrogate pair, which is no character. `value` is the object without it."""

    def __init__(self, value: dict[str, Any]) -> None:
        super().__init__(
            400,
            "json",
            "a text has half of a surrogate pair (\\ud800 to \\udfff), which is no character: leave it out.",
        )
        self.value = value


_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def _without_surrogates(body: bytes) -> dict[str, Any] | None:
    """Return the object in a body whose only fault is half of a surrogate pair; None for any other body."""
    if _SURROGATE.search(body) is None:
        return None
    try:
        value = orjson.loads(json.dumps(json.loads(body), ensure_ascii=False).encode(errors="replace"))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
