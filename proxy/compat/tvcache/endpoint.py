"""The tvcache endpoint: look-ups and reports of a client that runs its tools in sandboxes of its own."""

from collections.abc import Mapping
from typing import Any

import orjson

from proxy.compat.endpoints import EndpointContext
from proxy.compat.tvcache.chains import Caller, Chains
from proxy.compat.tvcache.requests import CacheRequest, read
from proxy.dialects.base import Local
from proxy.http.access import ALL, GRANT, Grant
from proxy.http.address import Address
from proxy.http.exchange import Exchange, beside
from proxy.http.sent_labels import labels_of
from proxy.refusals import Problem, RefusalError
from proxy.tree.task import Task
from sandboxes.client.driver import NAME
from sandboxes.spec import EnvironmentSpec

_UNKNOWN: Mapping[str, dict[str, Any]] = {
    "get": {"found": False, "env_id": None, "value": None, "tool_exec_time": None},
    "prefix_match": {"found": False, "env_id": None, "history": None},
    "should_fork": {"should_fork": False, "env_id": None},
    "get_all_envs": {"env_ids": []},
    "get_test_result": {"found": False, "test_result": None},
    "unref": {"success": True},
}
"""The answers for a task that nothing was reported of. They create no task."""


class TvcacheEndpoint:
    """Serves the tvcache endpoint of all tasks."""

    def __init__(self, context: EndpointContext) -> None:
        self._context, self._request_of = context, context.request_of
        self._chains = Chains(context)

    async def serve(self, scope: Mapping[str, Any], address: Address, body: bytes, exchange: Exchange) -> None:
        """Answer a request. Raises RefusalError if it is malformed, hidden, or of a task with the proxy's sandboxes."""
        request = await beside(len(body), read, self._request_of(scope, address, body))
        grant: Grant = scope.get(GRANT, ALL)
        # The grant was checked for the URL's task only.
        grant.require(request.task)
        grant.require_no_rollout()
        task = await self._task(request)
        caller = Caller(scope.get("client"), labels_of(scope, scope["headers"]))
        reply = _UNKNOWN[request.verb] if task is None else await self._answer(task, request, caller)
        await exchange.local(Local(200, orjson.dumps(reply)))

    def task_of(self, scope: Mapping[str, Any], address: Address, body: bytes) -> tuple[str, bool]:
        """See `NamingEndpoint`: a member of a cluster passes a request on to the owner of this task."""
        request = read(self._request_of(scope, address, body))
        return request.task, request.verb not in _UNKNOWN

    async def refuse(self, scope: Mapping[str, Any], address: Address, problem: Problem, exchange: Exchange) -> None:  # noqa: ARG002 - every client reads the same form
        """Answer a request with a problem that was noticed before the request was read."""
        await exchange.problem(problem)

    async def _answer(self, task: Task, request: CacheRequest, caller: Caller) -> dict[str, Any]:
        chains = self._chains
        match request.verb:
            case "get":
                return await chains.get(task, request, caller)
            case "prefix_match":
                return chains.prefix_match(task, request)
            case "put":
                return await chains.put(task, request, caller)
            case "should_fork":
                return chains.should_fork(task, request)
            case "unref":
                return chains.release(task, request)
            case "get_test_result":
                return await chains.test_result(task, request, caller)
            case "store_test_result":
                return await chains.store_test_result(task, request, caller)
        return chains.all_sandboxes(task)

    async def _task(self, request: CacheRequest) -> Task | None:
        tasks = self._context.tasks
        if self._context.store.tasks.get(request.task) is None:
            if request.verb in _UNKNOWN:
                return None
            # Two first reports may both find the task missing: at worst the same spec is written twice.
            await tasks.put(request.task, EnvironmentSpec(driver=NAME))
        task = await tasks.open(request.task)
        if task.spec.driver != NAME:
            raise RefusalError(409, "driver", f"the proxy has the sandboxes of {request.task!r}. Choose another task.")
        return task
