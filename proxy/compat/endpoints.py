"""Endpoints: whole APIs of other products, which have services of their own beside a dialect.

They are entry points of the group `forkpoint.endpoints`: an installation without one answers 404 there.
"""

from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from proxy.audit.auditor import Auditor
from proxy.dialects.base import Request
from proxy.execution.executor import Executor
from proxy.execution.gate import Gate
from proxy.execution.restore import Restorer
from proxy.execution.tasks import Tasks
from proxy.http.address import Address
from proxy.http.answer_cache import Answers
from proxy.http.exchange import Exchange
from proxy.lifecycle import Lifecycle
from proxy.refusals import Problem
from proxy.settings import Settings
from proxy.step import Stepper
from proxy.storage.journal import Journal
from proxy.storage.store import Store
from proxy.tree.rollout import Rollout
from sandboxes.driver import Driver
from sandboxes.plugins import ENDPOINTS, installed, load

RequestScope = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class EndpointContext:
    """What an endpoint's factory is given: the parts of a proxy that is not open yet, and functions.

    Attributes:
        gate: The cluster's; None without a cluster.
        pin: Keeps the snapshot of a node from being evicted, or lets it be evicted again.
        address_of: Returns the address of a request. Raises RefusalError.
        request_of: Returns a request in the form that dialects read, given its scope, address and body.
        count: Counts a problem that is reported within a response or a stream.
    """

    tasks: Tasks
    step: Stepper
    store: Store
    journal: Journal
    answers: Answers
    executor: Executor
    restorer: Restorer
    audit: Auditor
    drivers: Mapping[str, Driver]
    settings: Settings
    lifecycle: Lifecycle
    gate: Gate | None
    pin: Callable[..., None]
    address_of: Callable[[RequestScope], Address]
    request_of: Callable[[RequestScope, Address, bytes], Request]
    count: Callable[[Problem], None]


class Endpoint(Protocol):
    """Answers all requests to one endpoint, of every task."""

    async def serve(self, scope: RequestScope, address: Address, body: bytes, exchange: Exchange) -> None:
        """Answer a request. Errors that it raises are reported through the exchange."""
        ...

    async def refuse(self, scope: RequestScope, address: Address, problem: Problem, exchange: Exchange) -> None:
        """Answer a request with a problem that was noticed before the request was read."""
        ...


@runtime_checkable
class KnowingEndpoint(Endpoint, Protocol):
    """An endpoint that answers calls which the tree knows on the hit path."""

    def known_call(self, scope: RequestScope, address: Address, body: bytes, rollout: Rollout) -> bytes | None:
        """Return the whole HTTP response to a call and take its step; None if it is not known, or needs an await.

        `rollout` runs. The URL names it, or the session that the client got from the proxy.
        """
        ...


@runtime_checkable
class NamingEndpoint(Endpoint, Protocol):
    """An endpoint whose requests name their task themselves, whatever task the URL names."""

    def task_of(self, scope: RequestScope, address: Address, body: bytes) -> tuple[str, bool]:
        """Return the task of a request, and whether the request may create it. Raises RefusalError."""
        ...


class Stream(Protocol):
    """A connection that an endpoint has taken over: bytes in both directions, without HTTP."""

    def feed(self, data: bytes) -> None:
        """Take bytes that the client sent."""
        ...

    def end_input(self) -> None:
        """Note that the client sends nothing more."""
        ...

    def lose(self) -> None:
        """Note that the connection is lost."""
        ...


@runtime_checkable
class StreamingEndpoint(Endpoint, Protocol):
    """An endpoint that answers on the hit path, and turns connections into streams.

    The protocol class asks in this order: `may_stream` when it has the head of a request, `takes_connection` when it
    has the body, then `open_stream`.

    Attributes:
        path_part: Bytes that every URL of the endpoint contains. Only a request that has them is looked at here, so
            that all other hits pay one search in their path.
    """

    path_part: bytes

    def owns(self, scope: RequestScope) -> bool:
        """Return whether a request is for this endpoint."""
        ...

    def known(self, scope: RequestScope, body: bytes | bytearray) -> bytes | None:
        """Return the whole HTTP response to a request; None if it needs an await."""
        ...

    def may_stream(self, scope: RequestScope) -> bool:
        """Return whether the connection of a request may become a stream, given the request's head."""
        ...

    def takes_connection(self, scope: RequestScope, body: bytes) -> bool:
        """Return whether the connection of a request becomes a stream, given the whole request."""
        ...

    def open_stream(
        self, scope: RequestScope, body: bytes, transport: "StreamTransport", *, upgrade: bool, rest: bytes
    ) -> tuple[Stream, Coroutine[Any, Any, None] | None]:
        """Take a connection over.

        Args:
            scope: The request's scope.
            body: The request's body.
            transport: The connection.
            upgrade: Whether the request wanted an upgrade.
            rest: What the client has sent after the request already.

        Returns:
            The stream, and what remains to be awaited; None if the request is already answered.
        """
        ...


@dataclass(frozen=True, slots=True)
class StreamTransport:
    """A connection without HTTP.

    Attributes:
        write: Queues bytes for the client.
        drain: Returns once the client accepts more bytes.
        hold: Stops (True) or resumes (False) reading from the client.
        close: Closes the connection.
        abort: Closes it at once, so that the client gets an error.
    """

    write: Callable[[bytes], None]
    drain: Callable[[], Awaitable[None]]
    hold: Callable[[bool], None]
    close: Callable[[], None]
    abort: Callable[[], None]


def make_endpoints(context: EndpointContext) -> dict[str, Endpoint]:
    """Return every installed endpoint by name, unless its factory returns None. Raises PluginError for a broken one."""
    made = {name: load(ENDPOINTS, name)(context) for name in installed(ENDPOINTS)}
    return {name: endpoint for name, endpoint in made.items() if endpoint is not None}
