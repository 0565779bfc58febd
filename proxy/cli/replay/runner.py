"""Replays a recorded workload through a proxy: rollouts concurrently, the calls of each rollout in order."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import httpx
import orjson

from forkpoint.address import token_headers
from forkpoint.client import OVERHEAD_S, PATIENCE_S, reply_of
from forkpoint.exchange import Reply, error_of, retry_pause_s
from forkpoint.results import outcome_of
from proxy.cli.client import problem
from proxy.cli.replay.report import CallId, ReplayedCall, ReplayRun, ToolAnswer, spent
from proxy.cli.replay.workload import RecordedRollout, RecordedTask, Workload, WorkloadRequest, safe_name

OnCall = Callable[[ReplayedCall], None]


class ReplayError(RuntimeError):
    """The replay cannot start: the proxy cannot be reached, or it refuses a task."""


@dataclass(frozen=True, slots=True)
class ReplayNames:
    """Maps the workload's names to names that the proxy accepts, by what is appended to them."""

    task_suffix: str
    rollout_suffix: str

    def task(self, task: RecordedTask) -> str:
        """Return the name of a task."""
        return safe_name(task.name, self.task_suffix)

    def rollout(self, rollout: RecordedRollout) -> str:
        """Return the name of a rollout."""
        return safe_name(rollout.name, self.rollout_suffix)


async def replay(
    url: str,
    workload: Workload,
    *,
    cached: bool,
    names: ReplayNames,
    at_once: int,
    on_call: OnCall,
    trust_env: bool = True,
) -> ReplayRun:
    """Replay a workload through a proxy, in the order of the workload.

    A call that fails is an error, and its rollout continues as its agent would. If the proxy cannot be reached any
    more, the rollout ends, because it is unknown whether the call ran. If not `cached`, each call is executed, and the
    tasks are deleted afterwards. Raises ReplayError if the proxy cannot be reached, or refuses a task's environment.
    """
    connect = connector(url, trust_env=trust_env)
    async with connect() as client:
        run = _Replay(connect, names, on_call)
        async with run.tasks(client, workload, cached=cached):
            before, started = await totals(client), time.perf_counter()
            remaining = _pairs(workload)
            async with asyncio.TaskGroup() as group:
                for _ in range(at_once):
                    group.create_task(run.walk(remaining))
            wall_s = time.perf_counter() - started
            try:
                after = await totals(client)
            except ReplayError as error:
                # The proxy stopped meanwhile. The answers so far are still worth showing.
                after = before
                run.troubles.append(f"the proxy's totals are unknown: {error}")
    # The order of the workload does not depend on timing, so two runs can be compared line by line.
    order = {(task.name, rollout.name): position for position, (task, rollout) in enumerate(_pairs(workload))}
    ordered = dict(sorted(run.outcomes.items(), key=lambda item: (order[item[0].task, item[0].rollout], item[0].index)))
    return ReplayRun(
        cached=cached,
        wall_s=wall_s,
        outcomes=ordered,
        spent=spent(before, after),
        unsent=workload.calls - len(ordered),
        troubles=tuple(run.troubles),
    )


def connector(url: str, *, trust_env: bool) -> Callable[[], httpx.AsyncClient]:
    """Return a function that makes clients of the proxy at a URL, with the token in FORKPOINT_TOKEN."""
    return partial(
        httpx.AsyncClient, base_url=url, timeout=OVERHEAD_S, trust_env=trust_env,
        verify=httpx.create_ssl_context(trust_env=trust_env), headers=token_headers(),
    )  # fmt: skip


def _pairs(workload: Workload) -> Iterator[tuple[RecordedTask, RecordedRollout]]:
    return ((task, rollout) for task in workload.tasks for rollout in task.rollouts)


@dataclass(frozen=True, slots=True)
class _Replay:
    """A pass over a workload that is in progress, with a client for each rollout: a shared one would distort times."""

    connect: Callable[[], httpx.AsyncClient]
    names: ReplayNames
    on_call: OnCall
    outcomes: dict[CallId, ReplayedCall] = field(default_factory=dict)
    troubles: list[str] = field(default_factory=list)

    @asynccontextmanager
    async def tasks(self, client: httpx.AsyncClient, workload: Workload, *, cached: bool) -> AsyncIterator[None]:
        """Put all tasks; at the end of the block delete uncached tasks, which no later run can use."""
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

    async def walk(self, remaining: Iterator[tuple[RecordedTask, RecordedRollout]]) -> None:
        async with self.connect() as client:
            for task, rollout in remaining:
                await self.follow(client, task, rollout)

    async def follow(self, client: httpx.AsyncClient, task: RecordedTask, rollout: RecordedRollout) -> None:
        names = self.names.task(task), self.names.rollout(rollout)
        if rollout.labels:
            begun = {"rollout": names[1], "labels": dict(rollout.labels)}
            await control(client, "POST", f"/api/v1/tasks/{names[0]}/rollouts", begun)
        patience_s = OVERHEAD_S + task.spec.limits.timeout_s
        for request in rollout.requests:
            call_id = CallId(task.name, rollout.name, request.index)
            try:
                outcome = await call(client, "/t/{}/r/{}/".format(*names), request, patience_s=patience_s)
            except httpx.TransportError as error:
                lost = f"the proxy does not answer: {type(error).__name__} {error}"
                self.outcomes[call_id] = ReplayedCall(request.shown, 0.0, error=lost)
                break
            self.outcomes[call_id] = outcome
            self.on_call(outcome)
        # A finished rollout releases its sandbox, so the next rollouts need not wait for one.
        await self.finish(client, "/api/v1/tasks/{}/rollouts/{}".format(*names))

    async def finish(self, client: httpx.AsyncClient, path: str) -> None:
        """Delete a rollout or a task. A failure is only reported, because the figures are complete."""
        try:
            response = await client.delete(path)
        except httpx.TransportError as error:
            self.troubles.append(f"DELETE {path}: {type(error).__name__} {error}")
            return
        # A task or rollout without a call does not exist in the proxy.
        if not response.is_success and response.status_code != httpx.codes.NOT_FOUND:
            self.troubles.append(f"DELETE {path}: {problem(response)}")


async def call(client: httpx.AsyncClient, base: str, request: WorkloadRequest, *, patience_s: float) -> ReplayedCall:
    """Make one call, retried while the proxy is overloaded, or raise httpx.TransportError."""
    own_s = request.arguments.get("timeout_s") if isinstance(request.arguments, dict) else None
    timeout_s = patience_s + own_s if isinstance(own_s, int | float) else patience_s
    body, headers = b"", dict(request.headers)
    if request.arguments is not None:
        body, headers = orjson.dumps(request.arguments), {"Content-Type": "application/json", **headers}
    started, refusals = time.perf_counter(), 0
    while True:
        response = await client.request(
            request.method, base + request.path, content=body, headers=headers, timeout=timeout_s
        )
        seconds = time.perf_counter() - started
        pause_s = _pause_s(reply_of(response), seconds)
        if pause_s is None:
            return replace(read_outcome(response, request), seconds=seconds, refusals=refusals)
        refusals += 1
        await asyncio.sleep(pause_s)


def read_outcome(response: httpx.Response, request: WorkloadRequest) -> ReplayedCall:
    """Return the result in a response: an error if it is the proxy's own, or no command's result for a command."""
    outcome = ReplayedCall(request.shown, 0.0, outcome=outcome_of(response.headers.get("Cache-Status", "")))
    if not response.is_success and (request.is_command or error_of(reply_of(response)).slug):
        return replace(outcome, error=problem(response), outcome=None)
    if not request.is_command:
        # Bytes that are not UTF-8 stay different when they are different.
        text = response.content.decode(errors="backslashreplace")
        return replace(outcome, answer=ToolAnswer(text, "", None, response.status_code))
    try:
        result = orjson.loads(response.content)
        return replace(outcome, answer=ToolAnswer(result["stdout"], result["stderr"], result["exit_code"]))
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return replace(outcome, error=f"not a shell result: {response.text[:200]!r}", outcome=None)


def _pause_s(reply: Reply, spent_s: float) -> float | None:
    # Other 503 responses are errors: a call that crashes its sandbox would crash it again.
    if reply.status == httpx.codes.SERVICE_UNAVAILABLE and error_of(reply).slug != "overloaded":
        return None
    return retry_pause_s(reply, spent_s=spent_s, patience_s=PATIENCE_S)


async def totals(client: httpx.AsyncClient) -> dict[str, Any]:
    """Return the proxy's totals since its start."""
    return await control(client, "GET", "/api/v1/stats")


async def control(client: httpx.AsyncClient, method: str, path: str, body: Any = None) -> dict[str, Any]:
    """Send a request to the control plane and return the response's JSON object. Raises ReplayError."""
    try:
        response = await client.request(method, path, json=body)
    except httpx.TransportError as error:
        raise ReplayError(
            f"no proxy answers at {client.base_url} ({type(error).__name__} {error}). "
            "Start one with `forkpoint serve`, or omit --url to use a temporary proxy."
        ) from error
    if not response.is_success:
        raise ReplayError(f"{method} {path} was refused: {problem(response)}")
    result = response.json() if response.content else {}
    return result if isinstance(result, dict) else {}
