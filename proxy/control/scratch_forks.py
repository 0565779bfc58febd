"""Scratch forks: throw-away sandboxes in which people inspect a state. Nothing in them is recorded."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlencode

import orjson

from proxy.dialects import dialect_of
from proxy.dialects.base import Call, Request
from proxy.execution.restore import Restorer
from proxy.refusals import RefusalError
from proxy.tree.tree import Node, Tree
from sandboxes.calls import ToolCall
from sandboxes.driver import Sandbox
from sandboxes.spec import EnvironmentSpec


class ScratchForks:
    """The scratch forks that are open now."""

    def __init__(self, restorer: Restorer, *, max_open: int) -> None:
        """Create the owner of scratch forks. Agents have the rest of the sandbox budget beside `max_open`."""
        self._restorer, self._max_open = restorer, max_open
        self.open = 0  # Number of open forks.

    @asynccontextmanager
    async def at(self, tree: Tree, node: Node) -> AsyncIterator[Sandbox]:
        """Yield a sandbox in a node's state, closed after the block. Raises as `Restorer.fork`, and RefusalError."""
        if node.detached:
            raise RefusalError(409, "forgotten", f"node n{node.id} was forgotten. Choose another node.")
        if self.open >= self._max_open:
            detail = f"the limit of {self._max_open} open scratch forks is reached. Close a terminal and retry."
            raise RefusalError(429, "visits", detail)
        self.open += 1
        try:
            async with self._restorer.fork(tree, node) as sandbox:
                yield sandbox
        finally:
            self.open -= 1


def call_of(spec: EnvironmentSpec, endpoint: str, method: str, path: str, query: dict[str, str], body: bytes) -> Call:
    """Return the tool call that a request to a path below the endpoint means. Raises RefusalError if it is none."""
    target = "/" + path.lstrip("/") + (f"?{urlencode(query)}" if query else "")
    if any(ord(character) < 33 or ord(character) > 126 for character in target):
        raise RefusalError(422, "path", "a path has only printable ASCII characters. Percent-encode the others.")
    headers = (("content-type", "application/json"),) if body else ()
    request = Request(method, target, headers, body, "visitor", f"http://127.0.0.1/t/visit/r/visitor/{endpoint}")
    meaning = dialect_of(spec, endpoint).read(request)
    if not isinstance(meaning, Call):
        raise RefusalError(422, "no-call", f"{method} {target} is not a tool call of endpoint {endpoint!r}.")
    return meaning


def sql_call(spec: EnvironmentSpec, tool: str, **fields: object) -> ToolCall:
    """Return a call of the sql endpoint."""
    return call_of(spec, "sql", "POST", tool, {}, orjson.dumps(fields)).call
