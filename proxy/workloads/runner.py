"""Sends a recorded workload through a proxy: rollouts side by side, the calls of each in order."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import httpx
import orjson

from proxy.workloads.format import RecordedRollout, RecordedTask, Workload, WorkloadRequest, safe_name
from proxy.workloads.report import CallId, ReplayedCall, ReplayRun, ShellAnswer, read_source, read_timing, spent

# Over the call's own limit: what the proxy may need to find or rebuild a sandbox, and to wait for a free one.
OVERHEAD_S = 300.0
# How long a refused call comes again before the refusal counts as its error.
PATIENCE_S = 120.0
LONGEST_PAUSE_S = 10.0
OVERLOADED = "urn:forkpoint:overloaded"

OnCall = Callable[[ReplayedCall], None]


class ReplayError(RuntimeError):
    """The replay cannot go on: the proxy is not there, or refuses a task."""


@dataclass(frozen=True, slots=True)
class Names:
    """How the workload's names go over the wire: made safe, and with these suffixes."""

    task_suffix: str
    rollout_suffix: str

    def task(self, task: RecordedTask) -> str:
        return safe_name(task.name, self.task_suffix)

    def rollout(self, rollout: RecordedRollout) -> str:
        return safe_name(rollout.name, self.rollout_suffix)


async def replay(
    url: str, workload: Workload, *, cached: bool, names: Names, at_once: int, on_call: OnCall, trust_env: bool = True
) -> ReplayRun:
    """Replay workload through the proxy at url, at_once rollouts at a time, in the order of the workload.

    Uncached, each call is really run, each rollout has a sandbox of its own, and its tasks are deleted afterwards.
    An error answer is kept as the call's outcome, and its rollout goes on, as its agent would. A rollout whose proxy
    cannot be reached ends there: nobody knows whether the call ran. trust_env: take HTTP_PROXY and the like from the
    environment.

    Raises:
        ReplayError: the proxy cannot be reached at the start, or refuses a task's environment spec.
    """
    certificates = httpx.create_ssl_context(trust_env=trust_env)
    token = os.environ.get("FORKPOINT_TOKEN")
    connect = partial(
        httpx.AsyncClient, base_url=url, timeout=OVERHEAD_S, trust_env=trust_env, verify=certificates,
        headers={"x-forkpoint-token": token} if token else {},
    )  # fmt: skip
    async with connect() as client:
        under_way = _Replay(connect, names, on_call)
        async with under_way.tasks(client, workload, cached=cached):
            before, started = await totals(client), time.perf_counter()
            waiting = _pairs(workload)
            async with asyncio.TaskGroup() as group:
                for _ in range(at_once):
                    group.create_task(under_way.walk(waiting))
            wall_s = time.perf_counter() - started
            try:
                after = await totals(client)
            except ReplayError as error:
                # The proxy went away meanwhile: what was answered before is still worth showing.
                after = before
                under_way.troubles.append(f"the proxy's totals are unknown: {error}")
    # In the order of the workload, whichever rollout was quicker: two runs then list alike.
    order = {(task.name, rollout.name): place for place, (task, rollout) in enumerate(_pairs(workload))}
    ordered = dict(
        sorted(under_way.outcomes.items(), key=lambda item: (order[item[0].task, item[0].rollout], item[0].index))
    )
    return ReplayRun(
        cached=cached,
        wall_s=wall_s,
        outcomes=ordered,
        spent=spent(before, after),
        unsent=workload.calls - len(ordered),
        troubles=tuple(under_way.troubles),
    )


def _pairs(workload: Workload) -> Iterator[tuple[RecordedTask, RecordedRollout]]:
    return ((task, rollout) for task in workload.tasks for rollout in task.rollouts)


@dataclass(frozen=True, slots=True)
class _Replay:
    """One pass under way: what was answered so far, and what went wrong outside the calls.

    connect: makes a client. Each rollout at once has its own, with one connection: a client that many share spends
    milliseconds a call on finding a free one, and the call times would be its own.
    """

    connect: Callable[[], httpx.AsyncClient]
    names: Names
    on_call: OnCall
    outcomes: dict[CallId, ReplayedCall] = field(default_factory=dict)
    troubles: list[str] = field(default_factory=list)

    @asynccontextmanager
    async def tasks(self, client: httpx.AsyncClient, workload: Workload, *, cached: bool) -> AsyncIterator[None]:
        """Tell the proxy every task's environment; delete the uncached ones at the end: nobody else uses them."""
        try:
            for task in workload.tasks:
                spec = task.spec if cached else task.spec.model_copy(update={"cache": "never"})
                path = f"/api/v1/tasks/{self.names.task(task)}"
                await control(client, "PUT", path, spec.model_dump(mode="json"))
            yield
        finally:
            if not cached:
                for task in workload.tasks:
                    await self.finish(client, f"/api/v1/tasks/{self.names.task(task)}")

    async def walk(self, waiting: Iterator[tuple[RecordedTask, RecordedRollout]]) -> None:
        """Take rollouts from waiting, one after another, and run each to its end."""
        async with self.connect() as client:
            for task, rollout in waiting:
                await self.follow(client, task, rollout)

    async def follow(self, client: httpx.AsyncClient, task: RecordedTask, rollout: RecordedRollout) -> None:
        """Make the calls of rollout in their order, and finish it."""
        names = self.names.task(task), self.names.rollout(rollout)
        patience_s = OVERHEAD_S + task.spec.limits.timeout_s
        for request in rollout.requests:
            place = CallId(task.name, rollout.name, request.index)
            try:
                outcome = await call(client, "/t/{}/r/{}/".format(*names), request, patience_s=patience_s)
            except httpx.TransportError as error:
                lost = f"no answer from the proxy: {type(error).__name__} {error}"
                self.outcomes[place] = ReplayedCall(request.shown, 0.0, error=lost)
                break
            self.outcomes[place] = outcome
            self.on_call(outcome)
        # A finished rollout holds no sandbox, so the ones that follow find room.
        await self.finish(client, "/api/v1/tasks/{}/rollouts/{}".format(*names))

    async def finish(self, client: httpx.AsyncClient, path: str) -> None:
        """Delete what the replay made. A failure is a trouble to report: the figures are there already."""
        try:
            response = await client.delete(path)
        except httpx.TransportError as error:
            self.troubles.append(f"DELETE {path}: {type(error).__name__} {error}")
            return
        # A task or rollout that never made a call is not there; that is what was wanted.
        if not response.is_success and response.status_code != httpx.codes.NOT_FOUND:
            self.troubles.append(f"DELETE {path}: {problem(response)}")


async def call(client: httpx.AsyncClient, base: str, request: WorkloadRequest, *, patience_s: float) -> ReplayedCall:
    """Make one call below base. A proxy that is overloaded is asked again when it says, for two minutes.

    Raises:
        httpx.TransportError: no answer came.
    """
    named_s = request.arguments.get("timeout_s")
    timeout_s = patience_s + named_s if isinstance(named_s, int | float) else patience_s
    body = orjson.dumps(dict(request.arguments))
    started, refusals = time.perf_counter(), 0
    while True:
        response = await client.post(
            base + request.path, content=body, headers={"Content-Type": "application/json"}, timeout=timeout_s
        )
        seconds = time.perf_counter() - started
        if not _comes_later(response) or seconds > PATIENCE_S:
            return replace(read_outcome(response, request.shown), seconds=seconds, refusals=refusals)
        refusals += 1
        await asyncio.sleep(_pause_s(response))


def read_outcome(response: httpx.Response, shown: str) -> ReplayedCall:
    """Read one answer of the data plane; an answer that is not a shell result is an error, never dropped."""
    outcome = ReplayedCall(
        shown=shown,
        seconds=0.0,
        source=read_source(response.headers.get("Cache-Status", "")),
        timing=read_timing(response.headers.get("Server-Timing", "")),
        node=response.headers.get("X-Forkpoint-Node"),
    )
    if not response.is_success:
        return replace(outcome, error=problem(response), source=None)
    try:
        found = orjson.loads(response.content)
        return replace(outcome, answer=ShellAnswer(found["stdout"], found["stderr"], found["exit_code"]))
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return replace(outcome, error=f"not a shell result: {response.text[:200]!r}", source=None)


def problem(response: httpx.Response) -> str:
    """Return an error answer in one line: its status, and of RFC 9457 problem details the title and detail."""
    details = _details(response)
    said = ": ".join(str(details[name]) for name in ("title", "detail") if details.get(name)) or response.text[:200]
    return f"{response.status_code} {said or response.reason_phrase}"


def _comes_later(response: httpx.Response) -> bool:
    # Not every 503: a sandbox that this very call brings down would be brought down again and again.
    if response.status_code == httpx.codes.SERVICE_UNAVAILABLE:
        return _details(response).get("type") == OVERLOADED
    return response.status_code == httpx.codes.TOO_MANY_REQUESTS


def _details(response: httpx.Response) -> dict[str, Any]:
    try:
        details = orjson.loads(response.content)
    except orjson.JSONDecodeError:
        return {}
    return details if isinstance(details, dict) else {}


def _pause_s(response: httpx.Response) -> float:
    try:
        return min(float(response.headers.get("Retry-After", "1")), LONGEST_PAUSE_S)
    except ValueError:  # The header may also be a date; the proxy does not send one.
        return 1.0


async def totals(client: httpx.AsyncClient) -> dict[str, Any]:
    """Return the proxy's counts since its start, as `GET /api/v1/stats` gives them.

    Raises:
        ReplayError: as `control` does.
    """
    return await control(client, "GET", "/api/v1/stats")


async def control(client: httpx.AsyncClient, method: str, path: str, body: Any = None) -> dict[str, Any]:
    """Make one request of the control plane and return its JSON object.

    Raises:
        ReplayError: no proxy is there, or it refused.
    """
    try:
        response = await client.request(method, path, json=body)
    except httpx.TransportError as error:
        raise ReplayError(
            f"no proxy answers at {client.base_url} ({type(error).__name__} {error}). "
            "Start one with `forkpoint serve`, or leave --url out for a private one."
        ) from error
    if not response.is_success:
        raise ReplayError(f"{method} {path} was refused: {problem(response)}")
    found = response.json() if response.content else {}
    return found if isinstance(found, dict) else {}
