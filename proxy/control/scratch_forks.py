"""Throw-away forks for who looks at a state: the tree is not touched, nothing that happens in them is recorded."""

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
    """Forks that people and tools look around in. most: open at once; agents have the rest of the budget."""

    def __init__(self, restorer: Restorer, *, most: int) -> None:
        self._restorer, self._most = restorer, most
        self.open = 0

    @asynccontextmanager
    async def at(self, tree: Tree, node: Node) -> AsyncIterator[Sandbox]:
        """Give a sandbox that stands at node; it is gone after the block.

        Raises:
            Refused: 409, the node was forgotten; 429, too many are open.
            StateLost, SandboxError, SpecError, Overloaded: see `Restorer.fork`.
        """
        if node.detached:
            raise RefusalError(409, "forgotten", f"the state n{node.id} was forgotten.")
        if self.open >= self._most:
            raise RefusalError(
                429, "visits", f"{self._most} forks are open for people already. Close one, and try again."
            )
        self.open += 1
        try:
            async with self._restorer.fork(tree, node) as sandbox:
                yield sandbox
        finally:
            self.open -= 1


def call_of(spec: EnvironmentSpec, endpoint: str, method: str, path: str, query: dict[str, str], body: bytes) -> Call:
    """Return the call that a request to an endpoint makes.

    Raises:
        Refused: it makes none, or cannot be read.
    """
    target = "/" + path.lstrip("/") + (f"?{urlencode(query)}" if query else "")
    if any(ord(sign) < 33 or ord(sign) > 126 for sign in target):
        raise RefusalError(422, "path", "a path is printable ASCII. Percent-encode the rest.")
    headers = (("content-type", "application/json"),) if body else ()
    request = Request(method, target, headers, body, "visitor", f"http://127.0.0.1/t/visit/r/visitor/{endpoint}")
    meaning = dialect_of(spec, endpoint).read(request)
    if not isinstance(meaning, Call):
        raise RefusalError(422, "no-call", f"{method} {target} of endpoint {endpoint!r} is no tool call.")
    return meaning


def command_call(spec: EnvironmentSpec, command: str, session: str, timeout_s: float | None) -> Call:
    """Return the call that runs a shell command."""
    members = {"command": command, "session": session} | ({} if timeout_s is None else {"timeout_s": timeout_s})
    return call_of(spec, "shell", "POST", "exec", {}, orjson.dumps(members))


def sql_call(spec: EnvironmentSpec, tool: str, **members: object) -> ToolCall:
    """Return a call of the sql endpoint."""
    return call_of(spec, "sql", "POST", tool, {}, orjson.dumps(members)).call
