"""What a request to an endpoint can mean, and what a dialect has to say about it (pure)."""

from dataclasses import dataclass
from typing import Protocol

from proxy.refusals import Problem
from proxy.tree.environments import EnvironmentRequest
from proxy.tree.keys import CallKey
from sandboxes.calls import ToolCall
from sandboxes.listener import Headers


@dataclass(frozen=True, slots=True)
class Request:
    """A request as its endpoint sees it.

    target: path and query below the endpoint, as sent; it begins with a slash. headers: names in lower case. rollout:
    as the URL or a token names it, empty where the protocol's own id must. base: the URL that the client knows the
    endpoint under. fresh: a name for a new rollout, should one begin.
    """

    method: str
    target: str
    headers: Headers
    body: bytes
    rollout: str = ""
    base: str = ""
    fresh: str = ""

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]

    @property
    def query(self) -> str:
        return self.target.partition("?")[2]

    def header(self, name: str) -> str:
        """Return the value of a header, given in lower case; empty where there is none."""
        return next((value for header, value in self.headers if header == name), "")


@dataclass(frozen=True, slots=True)
class Local:
    """An answer of the proxy's own: no rollout is touched."""

    status: int
    body: bytes = b""
    headers: Headers = (("content-type", "application/json"),)


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call. rollout: as the request names it, empty where the URL did.

    request_id: of a request that may be sent again: the second joins the first. commutes: whether it may change places
    with others of its kind that are waiting. bound: whether its answer names the rollout, so that each client has its
    own form of it (`Dialect.answer`). streams: whether it may reach its client while it comes.
    events: whether its client may be sent server-sent events meanwhile (`Eventful`). cancel: the name under which its
    client may cancel it (`Cancel`), if it may; hangup: whether it does so by leaving.
    existing: whether rollout must run already: its name is one that we gave. constant: whether the answer is the same
    for all states of the task, as a list of tools. aliases: what its client calls something, and how we record it.
    routed: whether the request itself says of which task it is.
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
    aliases: tuple[tuple[str, str], ...] = ()
    routed: bool = False


@dataclass(frozen=True, slots=True)
class Open:
    """A new rollout, at the root or where its parent stands; then what the request asks for beside.

    headers: what its client is told beside the answer. spec: the environment that the request names, see
    `environments.spec_for`; None for the task's own.
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
    """A rollout's client wants no answer any more to the call that it gave this name."""

    rollout: str
    name: str
    answer: Local


Meaning = Local | Call | Open | Close | Cancel


@dataclass(frozen=True, slots=True)
class Response:
    """An answer on its way to one client."""

    status: int
    headers: Headers
    body: bytes


class Dialect(Protocol):
    """How the clients of one endpoint say what they want.

    headers_matter: whether a request's headers have a say in what it means.
    """

    headers_matter: bool

    def read(self, request: Request) -> Meaning:
        """Say what request means.

        Raises:
            Refused: 400 to 422, with what to send instead.
        """
        ...

    def answer(self, told: Response, request: Request) -> Response:
        """Return a recorded answer in the form for who sent request."""
        ...

    def problem(self, problem: Problem, request: Request) -> Local | None:
        """Return what went wrong in this protocol's own form; None where it has none."""
        ...


class Eventful(Dialect, Protocol):
    """One whose clients may be sent events while a call is run."""

    def takes_events(self, request: Request) -> bool:
        """Whether who sent request does."""
        ...

    def event(self, said: bytes, request: Request) -> bytes:
        """Return what a server said meanwhile as an event for who sent request; empty where it wants none of it."""
        ...

    def last_event(self, told: Response, request: Request) -> bytes:
        """Return the event that answers request, all others having been sent."""
        ...
