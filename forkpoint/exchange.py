"""Requests to a proxy as values, which the blocking and the async client send alike. Pure: no socket and no clock.

An operation is described once, by a function that returns an `ApiRequest`. `Operation` makes a method of it: on a
`Blocking` object the method returns the result, on an `Awaiting` object it returns a coroutine of the result.
"""

import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from functools import wraps
from types import MethodType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast, overload
from urllib.parse import quote

from forkpoint.errors import ForkpointError

P = ParamSpec("P")
T = TypeVar("T")
E = TypeVar("E")

PAGE = 1000
"""Items of a page, the most that the proxy gives in one."""
MAX_PAUSE_S = 10.0
"""Longest pause between two attempts in seconds, whatever `Retry-After` says."""
_PROBLEM = "urn:forkpoint:"
"""Precedes the type of each error of the proxy. A tool server's own 503 lacks it and is not retried."""


@dataclass(frozen=True, slots=True)
class Reply:
    """An HTTP response that was read in full, with headers by their names in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def payload(self) -> Any:
        """The body as JSON; None for an empty body."""
        return json.loads(self.body) if self.body else None


@dataclass(frozen=True, slots=True)
class ApiRequest(Generic[T]):
    """An HTTP request, and how its response becomes a result.

    Attributes:
        query: The query parameters; a list is a parameter that is repeated.
        timeout_s: How long the tool may run, in seconds; None for the proxy's default. The client waits longer.
        accepts: Statuses beyond 2xx that `read` understands.
        most: Maximum number of items of a list, which may take several pages; None for a request of no list.
    """

    method: str
    path: str
    read: Callable[[Reply], T]
    query: Mapping[str, str | list[str]] = field(default_factory=dict)
    body: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float | None = None
    accepts: frozenset[int] = frozenset()
    most: int | None = None

    def result(self, reply: Reply) -> T:
        """Return the result of a response. Raises ForkpointError if it is an error."""
        if 200 <= reply.status < 300 or reply.status in self.accepts:
            return self.read(reply)
        raise error_of(reply)

    def next_page(self, reply: Reply) -> "ApiRequest[T] | None":
        """Return the request of the next page of a list; None after its last page, and for a request of no list."""
        if self.most is None or reply.payload["next"] is None:
            return None
        most = self.most - len(reply.payload["items"])
        query = {**self.query, "cursor": reply.payload["next"], "limit": str(min(PAGE, most))}
        return replace(self, query=query, most=most) if most > 0 else None


def listed(
    path: str, item: Callable[[Any], E], *, most: int | None = None, query: Mapping[str, str | list[str]] | None = None
) -> ApiRequest[list[E]]:
    """Return the request of a list of `item`s, from as many of its pages as `most` takes; None for all."""
    most = sys.maxsize if most is None else most
    return ApiRequest(
        "GET", path, lambda reply: [item(row) for row in reply.payload["items"]],
        query={**(query or {}), "limit": str(min(PAGE, most))}, most=most,
    )  # fmt: skip


def joined(first: T, second: T) -> T:
    """Return the items of two pages as one list."""
    return cast("T", [*cast("list[Any]", first), *cast("list[Any]", second)])


def with_json(value: object) -> dict[str, Any]:
    """Return the members of an `ApiRequest` whose body is a JSON value."""
    return {"body": json.dumps(value).encode(), "headers": {"content-type": "application/json"}}


def path_of(*segments: str) -> str:
    """Return a path of these segments, each quoted."""
    return "/" + "/".join(quote(segment, safe="~@:=+,") for segment in segments)


def given(**options: object) -> dict[str, str]:
    """Return the options that are not None, as query parameters."""
    shown = {True: "true", False: "false"}
    return {name: shown[v] if isinstance(v, bool) else str(v) for name, v in options.items() if v is not None}


def error_of(reply: Reply) -> ForkpointError:
    """Return the exception of an error response."""
    try:
        problem = reply.payload
    except ValueError:
        problem = None
    if not isinstance(problem, dict):
        problem = {}
    kind, detail = problem.get("type"), problem.get("detail")
    slug = kind.removeprefix(_PROBLEM) if isinstance(kind, str) and kind.startswith(_PROBLEM) else ""
    text = detail if isinstance(detail, str) else reply.body[:1000].decode(errors="replace")
    return ForkpointError(reply.status, slug, text)


def retry_pause_s(reply: Reply, *, spent_s: float, patience_s: float) -> float | None:
    """Return how long to wait before a request is sent again; None if it is not.

    Only the proxy's own refusals (429 and 503 with `Retry-After`) are sent again: nothing was recorded, and the rollout
    has not moved. No attempt begins after `patience_s`.
    """
    if reply.status not in (429, 503) or "retry-after" not in reply.headers or not error_of(reply).slug:
        return None
    try:
        pause_s = min(max(float(reply.headers["retry-after"]), 0.0), MAX_PAUSE_S)
    except ValueError:
        return None
    return pause_s if spent_s + pause_s <= patience_s else None


class Blocking(ABC):
    """An object whose operations block until their result is there."""

    @abstractmethod
    def _perform(self, request: ApiRequest[T]) -> T:
        """Send a request and return its result."""


class Awaiting(ABC):
    """An object whose operations are awaited."""

    @abstractmethod
    async def _perform(self, request: ApiRequest[T]) -> T:
        """Send a request and return its result."""


class Operation(Generic[P, T]):
    """A method whose request is described once, for blocking and async objects. A decorator."""

    def __init__(self, describe: Callable[Concatenate[Any, P], ApiRequest[T]]) -> None:
        @wraps(describe)
        def method(instance: Any, *args: P.args, **kwargs: P.kwargs) -> Any:
            return instance._perform(describe(instance, *args, **kwargs))  # noqa: SLF001 - its own contract

        self._method = method
        self.__doc__ = describe.__doc__

    @overload
    def __get__(self, instance: None, owner: type) -> Callable[..., Any]: ...
    @overload
    def __get__(self, instance: Blocking, owner: type) -> Callable[P, T]: ...
    @overload
    def __get__(self, instance: Awaiting, owner: type) -> Callable[P, Coroutine[Any, Any, T]]: ...
    def __get__(self, instance: object, owner: type) -> Callable[..., Any]:
        return self._method if instance is None else MethodType(self._method, instance)
