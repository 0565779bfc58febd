"""Chains of calls as paths of the tree: look-ups, prefixes with a client's sandbox, and reports of what ran.

1. The first report of a call counts. A different answer to the same chain proves that a tool does not repeat itself:
   from then on nothing at that call or behind it is answered or recorded (`Tree.quarantine`), because the client's
   sandboxes need not be in the state that the recorded answers show.
2. Only for a *whole* chain, with every call of its rollout, a prefix with a sandbox is offered. The library takes the
   length of a prefix for its position in the list of calls: otherwise it would run calls twice in the sandbox.
"""

import asyncio
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import orjson
import structlog

from proxy.compat.endpoints import EndpointContext
from proxy.compat.tvcache.held_states import HeldStates
from proxy.compat.tvcache.requests import CacheRequest, call_of, history_test, key_of
from proxy.compat.tvcache.walkers import ChainWalkers
from proxy.tree.keys import CallKey, call_key
from proxy.tree.labels import Labels
from proxy.tree.task import Task
from proxy.tree.tree import Node, Record, Tree
from sandboxes.calls import ToolCall
from sandboxes.client.driver import ROOT, ClientReport

log = structlog.get_logger()

_DIFFERS = "a client's tool answered the same calls differently"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sends a request: its connection, and the labels for the rollout that counts its calls."""

    connection: Hashable
    labels: Labels


@dataclass(slots=True)
class _Clients:
    """What clients have in one tree: their sandboxes, and the turn of their reports."""

    held: HeldStates = field(default_factory=HeldStates)
    # One report after another, so that each is compared with the one before.
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


class Chains:
    """Answers the requests of the cache API from the trees of tasks."""

    def __init__(self, context: EndpointContext) -> None:
        """Create the chains of all tasks of a proxy that is not open yet."""
        self._context, self._walkers = context, ChainWalkers(context)
        self._clients: dict[int, _Clients] = {}

    async def get(self, task: Task, request: CacheRequest, caller: Caller) -> dict[str, Any]:
        """Return the answer to the last call of a chain. O(length of the chain)."""
        path = self._path(task.tree, request)
        if not request.chain or len(path) < len(request.chain):
            return {"found": False, "env_id": None, "value": None, "tool_exec_time": None}
        record = path[-1]
        value = orjson.loads(self._context.answers.of(record).body)
        await self._walkers.count_hit(task, caller.connection, caller.labels, record)
        sandbox = self._of(task.tree).held.at(record.target) if request.whole else None
        return {"found": True, "env_id": sandbox, "value": value, "tool_exec_time": record.seconds}

    def prefix_match(self, task: Task, request: CacheRequest) -> dict[str, Any]:
        """Return a whole chain that is known, or the longest prefix with a sandbox, which gets a lease."""
        path, held = self._path(task.tree, request), self._of(task.tree).held
        if request.chain and len(path) == len(request.chain):
            # Another client has reported the call since this one looked it up.
            return {"found": True, "env_id": held.lease(path[-1].target), "history": list(request.chain)}
        for length in range(len(path) if request.whole else 0, 0, -1):
            sandbox = held.lease(path[length - 1].target)
            if sandbox is not None:
                return {"found": True, "env_id": sandbox, "history": list(request.chain[:length])}
        return {"found": False, "env_id": None, "history": None}

    def should_fork(self, task: Task, request: CacheRequest) -> dict[str, Any]:
        """Return the sandbox at the end of a chain, which gets a lease."""
        path = self._path(task.tree, request)
        known = request.whole and request.chain and len(path) == len(request.chain)
        sandbox = self._of(task.tree).held.lease(path[-1].target) if known else None
        return {"should_fork": sandbox is not None, "env_id": sandbox}

    def all_sandboxes(self, task: Task) -> dict[str, Any]:
        """Return the sandboxes of a task, each with a lease."""
        return {"env_ids": self._of(task.tree).held.lease_all()}

    def release(self, task: Task, request: CacheRequest) -> dict[str, Any]:
        """End a lease."""
        self._of(task.tree).held.release(request.sandbox)
        return {"success": True}

    async def put(self, task: Task, request: CacheRequest, caller: Caller) -> dict[str, Any]:
        """Record what ran, and keep the client's sandbox if another rollout may be offered it."""
        clients = self._of(task.tree)
        async with clients.turn:
            stopped = list[str]()
            node = await self._record_chain(task, request, caller, stopped)
            if request.sandbox:
                keeps = node is not None and request.whole
                stopped += clients.held.put(node, request.sandbox) if keeps and node is not None else [request.sandbox]
        return {"success": True, "removed_env_ids": stopped}

    async def test_result(self, task: Task, request: CacheRequest, caller: Caller) -> dict[str, Any]:
        """Return the result of the test after exactly these calls."""
        record = self._readable(task.tree, task.tree.root, call_key(history_test(request.chain)))
        if record is None:
            return {"found": False, "test_result": None}
        value = orjson.loads(self._context.answers.of(record).body)
        await self._walkers.count_hit(task, caller.connection, caller.labels, record)
        return {"found": True, "test_result": value}

    async def store_test_result(self, task: Task, request: CacheRequest, caller: Caller) -> dict[str, Any]:
        """Record the result of the test after exactly these calls. A test that answers differently is forgotten."""
        root, key = task.tree.root, call_key(history_test(request.chain))
        report = ClientReport(_digest(root), request.result, 0.0, changes=False)
        async with self._of(task.tree).turn:
            record = await self._recorded(
                task, caller, root, key, history_test(request.chain, report.encoded()), report, []
            )
        return {"success": record is not None}

    # -- the tree ----------------------------------------------------------------------------------------------------

    def _of(self, tree: Tree) -> _Clients:
        return self._clients.setdefault(tree.id, _Clients())

    def _path(self, tree: Tree, request: CacheRequest) -> list[Record]:
        path, node = list[Record](), tree.root
        for text in request.chain:
            record = self._readable(tree, node, key_of(text, whole=request.whole))
            if record is None:
                break
            path.append(record)
            node = record.target
        return path

    def _readable(self, tree: Tree, node: Node, key: CallKey) -> Record | None:
        record = node.records.get(key)
        return record if record is not None and self._context.executor.is_readable(tree, record) else None

    async def _record_chain(self, task: Task, request: CacheRequest, caller: Caller, stopped: list[str]) -> Node | None:
        """Record the reported calls of a chain; return its last node, or None if the tree does not reach it."""
        node, first = task.tree.root, len(request.chain) - len(request.reported)
        for index, text in enumerate(request.chain):
            key = key_of(text, whole=request.whole)
            if index < first:
                record = self._readable(task.tree, node, key)
            else:
                reported = request.reported[index - first]
                if reported.answer is None:
                    return None
                report = ClientReport(_digest(node), reported.answer, reported.seconds, changes=True)
                call = call_of(text, whole=request.whole, body=report.encoded())
                record = await self._recorded(task, caller, node, key, call, report, stopped)
            # A call without an answer has no record, and nothing is known of what follows it.
            if record is None:
                return None
            node = record.target
        return node

    async def _recorded(
        self,
        task: Task,
        caller: Caller,
        node: Node,
        key: CallKey,
        call: ToolCall,
        report: ClientReport,
        stopped: list[str],
    ) -> Record | None:
        """Return the record of a reported call; None if it does not repeat itself. `stopped` takes sandboxes to end."""
        if key in node.quarantined:
            return None
        known = self._readable(task.tree, node, key)
        if known is None:
            rollout = self._walkers.at(task, caller.connection, caller.labels, node)
            answer = await self._context.step.run(rollout, call, key)
            # A private record has another key. So has the answer of another report, if this is one that a member of a
            # cluster makes again.
            return answer.record if node.records.get(key) is answer.record else None
        if self._context.answers.of(known).body == report.answer:
            return known
        lost = task.tree.quarantine(known, _DIFFERS)
        self._context.audit.save_finding(task.tree, known, lost, quarantined=True)
        stopped += self._of(task.tree).held.drop(lost)
        log.warning("a client's call differs from its record, and is shared no more", task=task.name, record=known.id)
        return None


def _digest(node: Node) -> bytes:
    return ROOT.exact if node.state is None else node.state.exact
