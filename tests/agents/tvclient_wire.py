"""What the executors of TVCACHE's client library send, written from its source at commit 3a4f95a; not its code.

The library is in no package registry, so tests use these unless `FORKPOINT_TVCLIENT` names the folder of the real one
(`tvcache/client` of its repository). Both have the same interface. `SemanticExecutor` leaves reading calls out of its
chains, and takes the length of an offered prefix for its position all the same. `GreedyExecutor` sends whole histories.
"""

import json
import time
from typing import Any, Protocol

import httpx


class ToolCall(Protocol):
    """A call of the user's tool."""

    def to_dict(self) -> dict[str, Any]: ...

    def will_mutate_state(self) -> bool: ...


class CacheClient:
    """The requests of the library's client; `sync` ones name their task in a header."""

    def __init__(self, base_url: str, *, sync: bool) -> None:
        self.base_url, self._sync = base_url, sync
        self._client = httpx.AsyncClient()

    async def _send(self, method: str, verb: str, task: str, **more: Any) -> Any:
        headers = {"X-Task-Name": task} if self._sync else {}
        response = await self._client.request(method, f"{self.base_url}/{verb}", headers=headers, **more)
        return response.raise_for_status().json()

    async def exact_match(self, task: str, chain: list[str]) -> bool:
        return bool((await self.get(task, chain))["found"])

    async def get(self, task: str, chain: list[str]) -> Any:
        return await self._send("GET", "get", task, params={"task_name": task, "tool_calls": chain})

    async def prefix_match(self, task: str, chain: list[str]) -> tuple[str | None, list[str]]:
        data = await self._send("POST", "prefix_match", task, json={"task_name": task, "tool_calls": chain})
        return (data["env_id"], data["history"]) if data["found"] else (None, [])

    async def unref(self, sandbox: str, task: str) -> None:
        await self._send("POST", "unref", task, json={"task_name": task, "env_id": sandbox})

    async def put(
        self, task: str, chain: list[str], sandbox: str | None, values: list[Any], times: list[float], first: int
    ) -> list[str]:
        body = {"task_name": task, "history": chain, "env_id": sandbox, "values": values, "tool_exec_times": times}
        return list((await self._send("PUT", "put", task, json={**body, "start_idx": first}))["removed_env_ids"])

    async def close(self) -> None:
        await self._client.aclose()


class SemanticExecutor:
    """Executes the last of a list of calls unless the cache knows its answer (`AsyncSemanticStatefulExecutor`)."""

    sync = False

    def __init__(self, tool_call_env_class: Any, tool_call_class: Any, task_id: str) -> None:  # noqa: ARG002 - as the library
        self.client = CacheClient("", sync=self.sync)
        self._make, self._task = tool_call_env_class, task_id
        self.executed_commands = 0
        self.rollout_environment: Any = None
        self._bank: Any = None

    def set_fork_bank(self, fork_bank: Any) -> None:
        self._bank = fork_bank

    async def execute(self, calls: list[Any]) -> Any:
        chain = self._chain(calls)
        if await self.client.exact_match(self._task, chain):
            return (await self.client.get(self._task, chain))["value"]
        parent, prefix = await self.client.prefix_match(self._task, chain)
        if len(prefix) == len(chain):
            return (await self.client.get(self._task, chain))["value"]
        if parent is not None and len(prefix) > self.executed_commands:
            # The library's defect: the prefix counts the calls of the chain, and not those of the history.
            self.executed_commands = len(prefix)
            forked = await self._make(env_id=parent, task_name=self._task).fork()
            await self.client.unref(parent, self._task)
            if self.rollout_environment is not None:
                await self.rollout_environment.stop()
            self.rollout_environment = forked
        elif self.rollout_environment is None:
            self.rollout_environment = self._make(task_name=self._task)
        return await self._execute_and_put(calls)

    async def close(self) -> None:
        await self.client.close()
        if self.rollout_environment is not None:
            await self.rollout_environment.stop()

    async def _execute_and_put(self, calls: list[Any]) -> Any:
        values, times, sandbox = [], [], self.rollout_environment
        for call in calls[self.executed_commands :]:
            self.executed_commands += 1
            if call is calls[-1] or self._changes(call):
                began = time.perf_counter()
                values.append(await sandbox.execute(call))
                times.append(time.perf_counter() - began)
        if str(values[-1]).startswith("Failed to execute"):
            return values[-1]
        chain, kept = self._chain(calls), None
        known = await self.client.get(self._task, chain)
        if self._changes(calls[-1]):
            if known["env_id"] is not None:
                return values[-1]
            kept = await sandbox.fork()
        elif known["value"] is not None:
            return values[-1]
        first = len(chain) - len(values)
        removed = await self.client.put(self._task, chain, kept and kept.get_id(), values, times, first)
        for name in removed:
            await self._make(env_id=name, task_name=self._task).stop()
        return values[-1]

    def _chain(self, calls: list[Any]) -> list[str]:
        return [json.dumps(call.to_dict()) for call in calls if call is calls[-1] or self._changes(call)]

    def _changes(self, call: Any) -> bool:
        return bool(call.will_mutate_state())


class GreedyExecutor(SemanticExecutor):
    """The same with whole histories (`GreedyToolCallExecutor`), which forks after each call that took long."""

    sync = True

    def _changes(self, call: Any) -> bool:  # noqa: ARG002 - every call counts
        return True
