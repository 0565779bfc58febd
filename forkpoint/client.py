"""The client of a proxy: `Client` blocks, `AsyncClient` is awaited. Both have the same operations.

Only sending and waiting is written twice; `forkpoint.operations` describes the operations.
"""

import asyncio
import os
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from uuid import uuid4

import httpx

from forkpoint.address import DEFAULT_URL, base_url, token_headers
from forkpoint.errors import ForkpointError, UnreachableError
from forkpoint.exchange import ApiRequest, Awaiting, Blocking, Reply, error_of, joined, path_of, retry_pause_s
from forkpoint.operations import Labels, ProxyOperations, RolloutOperations, TaskOperations
from forkpoint.trajectories import Format, ModelTurn, Trajectory, model_turn, split, target, trajectory, write

if TYPE_CHECKING:
    from typing import Self  # Python 3.11

T = TypeVar("T")
HttpT = TypeVar("HttpT", httpx.Client, httpx.AsyncClient)
TransportT = TypeVar("TransportT", httpx.BaseTransport, httpx.AsyncBaseTransport)

OVERHEAD_S = 300.0
"""Seconds that a response may take beyond the call's own time limit: the proxy may wait for a free sandbox, restore it
and replay calls in it."""
TOOL_S = 600.0
"""Seconds that a tool may run if the call names no time limit. A client that gives up earlier loses the answer, but not
the step: the proxy carries the call out."""
PATIENCE_S = 120.0
"""For how long a call to a busy proxy is retried, in seconds."""
_CONNECT_S = 10.0
"""Seconds that connecting may take."""
_STREAM = httpx.Timeout(OVERHEAD_S, connect=_CONNECT_S)
"""How long a streamed response may be silent."""


def _options(url: str | None, token: str | None, *, trust_env: bool) -> dict[str, Any]:
    url = base_url(url or os.environ.get("FORKPOINT_URL", DEFAULT_URL))
    return {
        "base_url": url, "headers": token_headers(token), "trust_env": trust_env,
        # Reading the certificates takes 20 ms, which plain HTTP does not need.
        "verify": url.startswith("https:"),
        # A group of rollouts waits for its tools, and not for a connection.
        "limits": httpx.Limits(max_connections=None, max_keepalive_connections=256),
    }  # fmt: skip


def _arguments(request: ApiRequest[Any]) -> dict[str, Any]:
    tool_s = TOOL_S if request.timeout_s is None else request.timeout_s
    return {
        "method": request.method, "url": request.path, "params": request.query or None, "content": request.body,
        "headers": dict(request.headers), "timeout": httpx.Timeout(tool_s + OVERHEAD_S, connect=_CONNECT_S),
    }  # fmt: skip


def reply_of(response: httpx.Response) -> Reply:
    """Return a response that was read in full."""
    headers = {name.lower(): value for name, value in response.headers.items()}
    return Reply(response.status_code, headers, response.content)


class _OfClient:
    _client: Any

    def _perform(self, request: ApiRequest[Any]) -> Any:
        return self._client._perform(request)  # noqa: SLF001 - its client


class _OfTask(_OfClient):
    def __init__(self, client: Any, task_name: str, name: str, labels: Labels) -> None:
        self._client, self.task_name, self.name, self.labels = client, task_name, name, labels
        self._url: str = client.url

    @property
    def base_url(self) -> str:
        """Base URL of the agent's tools."""
        return self._url + path_of("t", self.task_name, "r", self.name)

    @property
    def mcp_url(self) -> str:
        """URL of the rollout's tools over MCP."""
        return f"{self.base_url}/mcp"

    @property
    def docker_host(self) -> str:
        """Value of `DOCKER_HOST` for Docker clients whose container is this rollout."""
        return f"tcp://{self.base_url.partition('://')[2]}/docker"


class Rollout(_OfTask, RolloutOperations, Blocking):
    """A rollout. A `with` block begins it and finishes it at its end; without one, its first call begins it."""

    def fork(self, name: str | None = None, *, node: str | None = None, labels: Labels | None = None) -> "Rollout":
        """Begin a rollout at this rollout's node, or at another node of its task.

        Args:
            name: Name of the new rollout; None for a random one.
            node: Name of the node; None for this rollout's own.
            labels: Labels beyond this rollout's; a reward is not taken over.
        """
        name = name or uuid4().hex
        begun = self._perform(self._fork(name, node, labels))
        return Rollout(self._client, self.task_name, name, begun.labels)

    def __enter__(self) -> "Self":
        """Begin the rollout."""
        self.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Finish the rollout. An error of the block is not hidden by one of the end."""
        try:
            self.finish()
        except ForkpointError:
            if error is None:
                raise


class AsyncRollout(_OfTask, RolloutOperations, Awaiting):
    """A rollout. An `async with` block begins it and finishes it at its end; without one, its first call begins it."""

    async def fork(
        self, name: str | None = None, *, node: str | None = None, labels: Labels | None = None
    ) -> "AsyncRollout":
        """Begin a rollout at this rollout's node, or at another node of its task; see `Rollout.fork`."""
        name = name or uuid4().hex
        begun = await self._perform(self._fork(name, node, labels))
        return AsyncRollout(self._client, self.task_name, name, begun.labels)

    async def __aenter__(self) -> "Self":
        """Begin the rollout."""
        await self.begin()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Finish the rollout. An error of the block is not hidden by one of the end."""
        try:
            await self.finish()
        except ForkpointError:
            if error is None:
                raise


class Task(_OfClient, TaskOperations, Blocking):
    """A task: rollouts of a task share their calls. No request is made until an operation is called."""

    def __init__(self, client: "Client", name: str) -> None:
        self._client, self.name = client, name

    def rollout(self, name: str | None = None, *, labels: Labels | None = None) -> Rollout:
        """Return a rollout of the task.

        Args:
            name: Its name; None for a random one.
            labels: Labels that it begins with, beyond those of the client.
        """
        return Rollout(self._client, self.name, name or uuid4().hex, {**self._client.labels, **(labels or {})})


class AsyncTask(_OfClient, TaskOperations, Awaiting):
    """A task: rollouts of a task share their calls. No request is made until an operation is called."""

    def __init__(self, client: "AsyncClient", name: str) -> None:
        self._client, self.name = client, name

    def rollout(self, name: str | None = None, *, labels: Labels | None = None) -> AsyncRollout:
        """Return a rollout of the task; see `Task.rollout`."""
        return AsyncRollout(self._client, self.name, name or uuid4().hex, {**self._client.labels, **(labels or {})})


class _Connected(ProxyOperations, ABC, Generic[HttpT, TransportT]):
    def __init__(
        self,
        url: str | None = None,
        *,
        token: str | None = None,
        labels: Labels | None = None,
        patience_s: float = PATIENCE_S,
        transport: TransportT | None = None,
        trust_env: bool = True,
    ) -> None:
        """Create a client; it connects with its first request.

        Args:
            url: The proxy's URL; None for FORKPOINT_URL, or the proxy on this machine.
            token: A token of the proxy; None for FORKPOINT_TOKEN, if it is set.
            labels: Labels of all rollouts that this client begins, such as `run`.
            patience_s: For how many seconds a call to a busy proxy is retried; 0 for never.
            transport: Sends the requests instead of a socket, in tests; None for a socket.
            trust_env: Whether HTTP_PROXY and similar variables apply.
        """
        self._http: HttpT = self._open({**_options(url, token, trust_env=trust_env), "transport": transport})
        self.url, self._patience_s = str(self._http.base_url).rstrip("/"), patience_s
        self.labels: Labels = dict(labels or {})

    @abstractmethod
    def _open(self, options: dict[str, Any]) -> HttpT:
        """Return an HTTP client."""


class Client(_Connected[httpx.Client, httpx.BaseTransport], Blocking):
    """A client of a proxy whose operations block. Threads may share it.

    Attributes:
        url: The proxy's URL.
        labels: Labels of all rollouts that this client begins.
    """

    def task(self, name: str) -> Task:
        """Return a task of this proxy; it need not exist yet."""
        return Task(self, name)

    def trajectories(
        self,
        task: str | None = None,
        *,
        rollout: str | None = None,
        labels: Labels | None = None,
        answer_bytes: int | None = None,
    ) -> Iterator[Trajectory]:
        """Yield rollouts as training data, one by one as they arrive: messages, answers, timings and labels.

        Args:
            task: Only the rollouts of this task; None for all.
            rollout: Only the rollouts of this name, which needs a task; None for all.
            labels: Only the rollouts with all of these labels; None for all.
            answer_bytes: Longest answer in bytes; longer ones are cut. None for 1 MiB.
        """
        ended = split()
        for chunk in self._stream(*target(task, rollout, labels, answer_bytes)):
            yield from map(trajectory, ended(chunk))

    def turns(self, task: str, *, rollout: str | None = None, labels: Labels | None = None) -> Iterator[ModelTurn]:
        """Yield each response to agents inside their sandboxes, one by one: the nodes of a tree for training.

        Args:
            task: Name of the task.
            rollout: Only the rollouts of this name; None for all.
            labels: Only the rollouts with all of these labels; None for all.
        """
        ended = split()
        for chunk in self._stream(*target(task, rollout, labels, turns=True)):
            yield from map(model_turn, ended(chunk))

    def save_trajectories(
        self,
        path: str | Path,
        task: str | None = None,
        *,
        labels: Labels | None = None,
        format: Format | None = None,  # noqa: A002 - as in the command
        turns: bool = False,
    ) -> None:
        """Write rollouts as training data to a file, or to a directory that `datasets.load_dataset` reads.

        Args:
            path: The file or directory.
            task: Only the rollouts of this task; None for all.
            labels: Only the rollouts with all of these labels; None for all.
            format: `jsonl`, `parquet` or `hf`; None for what the name of the file says.
            turns: Whether to write a row for each turn (`turns`) instead; this needs a task.

        Raises:
            ValueError: The format is not known, pyarrow is missing, the directory exists, or turns have no task.
        """
        if turns and task is None:
            raise ValueError("turns are those of one task: name it.")
        write(self._stream(*target(task, None, labels, turns=turns or None)), Path(path), format, turns=turns)

    def close(self) -> None:
        """Close the connections. Rollouts stay as they are. A client that is garbage closes them too."""
        self._end()

    def __enter__(self) -> "Self":
        """Return the client."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the connections."""
        self.close()

    def _open(self, options: dict[str, Any]) -> httpx.Client:
        http = httpx.Client(**options)
        # Frameworks drop their environments without a word; their connections must not stay open.
        self._end = weakref.finalize(self, http.close)
        return http

    def _stream(self, path: str, query: dict[str, str | list[str]]) -> Iterator[bytes]:
        try:
            with self._http.stream("GET", path, params=query, timeout=_STREAM) as response:
                if not response.is_success:
                    response.read()
                    raise error_of(reply_of(response))
                yield from response.iter_bytes()
        except httpx.TransportError as error:
            raise UnreachableError(self.url, _reason(error)) from error

    def _perform(self, request: ApiRequest[T]) -> T:
        reply = self._send(request)
        result = request.result(reply)
        while (page := request.next_page(reply)) is not None:
            request, reply = page, self._send(page)
            result = joined(result, request.result(reply))
        return result

    def _send(self, request: ApiRequest[T]) -> Reply:
        arguments, began = _arguments(request), time.monotonic()
        while True:
            try:
                reply = reply_of(self._http.request(**arguments))
            except httpx.TransportError as error:
                raise UnreachableError(self.url, _reason(error)) from error
            pause_s = retry_pause_s(reply, spent_s=time.monotonic() - began, patience_s=self._patience_s)
            if pause_s is None:
                return reply
            time.sleep(pause_s)


class AsyncClient(_Connected[httpx.AsyncClient, httpx.AsyncBaseTransport], Awaiting):
    """A client of a proxy whose operations are awaited, in one event loop. Its attributes are those of `Client`."""

    def task(self, name: str) -> AsyncTask:
        """Return a task of this proxy; it need not exist yet."""
        return AsyncTask(self, name)

    async def trajectories(
        self,
        task: str | None = None,
        *,
        rollout: str | None = None,
        labels: Labels | None = None,
        answer_bytes: int | None = None,
    ) -> AsyncIterator[Trajectory]:
        """Yield rollouts as training data, one by one as they arrive; see `Client.trajectories`."""
        async for line in self._lines(*target(task, rollout, labels, answer_bytes)):
            yield trajectory(line)

    async def turns(
        self, task: str, *, rollout: str | None = None, labels: Labels | None = None
    ) -> AsyncIterator[ModelTurn]:
        """Yield each response to agents inside their sandboxes; see `Client.turns`."""
        async for line in self._lines(*target(task, rollout, labels, turns=True)):
            yield model_turn(line)

    async def close(self) -> None:
        """Close the connections. Rollouts stay as they are."""
        await self._http.aclose()

    async def __aenter__(self) -> "Self":
        """Return the client."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the connections."""
        await self.close()

    def _open(self, options: dict[str, Any]) -> httpx.AsyncClient:
        return httpx.AsyncClient(**options)

    async def _lines(self, path: str, query: dict[str, str | list[str]]) -> AsyncIterator[bytes]:
        ended = split()
        try:
            async with self._http.stream("GET", path, params=query, timeout=_STREAM) as response:
                if not response.is_success:
                    await response.aread()
                    raise error_of(reply_of(response))
                async for chunk in response.aiter_bytes():
                    for line in ended(chunk):
                        yield line
        except httpx.TransportError as error:
            raise UnreachableError(self.url, _reason(error)) from error

    async def _perform(self, request: ApiRequest[T]) -> T:
        reply = await self._send(request)
        result = request.result(reply)
        while (page := request.next_page(reply)) is not None:
            request, reply = page, await self._send(page)
            result = joined(result, request.result(reply))
        return result

    async def _send(self, request: ApiRequest[T]) -> Reply:
        arguments, began = _arguments(request), time.monotonic()
        while True:
            try:
                reply = reply_of(await self._http.request(**arguments))
            except httpx.TransportError as error:
                raise UnreachableError(self.url, _reason(error)) from error
            pause_s = retry_pause_s(reply, spent_s=time.monotonic() - began, patience_s=self._patience_s)
            if pause_s is None:
                return reply
            await asyncio.sleep(pause_s)


def _reason(error: httpx.TransportError) -> str:
    return str(error) or type(error).__name__
