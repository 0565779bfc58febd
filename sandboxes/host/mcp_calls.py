"""Calls to the MCP servers in a sandbox, over stdio or over HTTP."""

import socket
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property, reduce
from operator import or_
from typing import Any

import orjson

from sandboxes.calls import Execution, ToolCall, ToolResult
from sandboxes.errors import ServerError
from sandboxes.host.guest import Guest
from sandboxes.host.server_calls import ServerCalls
from sandboxes.host.translate import execution
from sandboxes.ipc.codec import Envelope
from sandboxes.ipc.messages import CallDone
from sandboxes.ipc.server_messages import ServerConnected
from sandboxes.listener import Listener
from sandboxes.server_spec import McpServer
from sandboxes.spec import EnvironmentSpec
from sandboxes.tool_clients.mcp import (
    MAX_PAGES,
    PAGED,
    PROGRESS_TOKEN,
    McpConversation,
    McpResponse,
    SessionLostError,
    require_list,
)
from sandboxes.tool_clients.mcp_http import HttpTransport
from sandboxes.tool_clients.mcp_stdio import StdioTransport
from sandboxes.tool_clients.server_orders import mcp_order

MCP_TYPE = "application/vnd.forkpoint.mcp+json"
"""The media type of results: an object with the answer and the notifications before it."""
MCP_BYTES = 32 << 20
"""The largest message of an MCP server. Screenshots take a few megabytes; a server gone wild should end here."""


class McpCalls:
    """Talks to the MCP servers of one sandbox."""

    def __init__(
        self,
        guest: Guest,
        servers: ServerCalls,
        spec: EnvironmentSpec,
        environment: Mapping[str, str],
        known_reads: dict[str, frozenset[str]],
    ) -> None:
        """Prepare for a sandbox's calls. `known_reads`, which all sandboxes share, has tools that change nothing."""
        self._guest, self._servers, self._spec, self._environment = guest, servers, spec, environment
        self._known_reads = known_reads

    async def start(self) -> None:
        """Start all servers and initialize them, so that the first client finds a server as any later one does."""
        for name in self._spec.mcp_servers:
            # A ping is harmless, and `_ask` makes the handshake on the way.
            await self._ask(name, "ping", {}, read=True)

    async def execute(self, call: ToolCall, listener: Listener | None) -> Execution:
        """Send a request to one server, or to several (separated by commas) whose lists become one."""
        method, params, names = (call.arguments[member] for member in ("method", "params", "server"))
        if "," in names:
            return await self._list_all(method, params, names.split(","))
        # Only tools change anything; whether this one does is what the annotations say.
        read = method != "tools/call" or await self._only_reads(names, params.get("name"))
        ask = self._ask_pages if method in PAGED else self._ask
        response, done = await ask(names, method, dict(params), listener, read=read)
        body = orjson.dumps({"notifications": response.notifications, **response.payload})
        # A result that may depend on a refused reverse request is for this rollout only.
        ran = execution(done, ToolResult(200, MCP_TYPE, body))
        # Of several pages, only what the last one used is known.
        used = ran.resources if response.pages == 1 else None
        return replace(ran, shareable=ran.shareable and response.shareable, resources=used)

    async def _list_all(self, method: str, params: dict[str, Any], names: list[str]) -> Execution:
        """Return one list of what several servers have; a tool's name gets its server's name in front."""
        kind, runs = PAGED[method], []
        whole: list[Any] = []
        for name in names:
            response, done = await self._ask_pages(name, method, dict(params), read=True)
            # Each server's run has effects of its own; together they are the effect of this call.
            runs.append(execution(done, ToolResult(200, MCP_TYPE, b"")))
            listed = response.payload.get("result", {}).get(kind, [])
            # Two servers may have tools of the same name.
            whole += [{**entry, "name": f"{name}__{entry['name']}"} for entry in listed] if kind == "tools" else listed
        effect = reduce(or_, (run.effect for run in runs))
        result = ToolResult(200, MCP_TYPE, orjson.dumps({"notifications": [], "result": {kind: whole}}))
        # The last run's state is the state after all of them, but what it used is not what all have used.
        seconds = sum(run.seconds for run in runs)
        return replace(runs[-1], result=result, effect=effect, seconds=seconds, resources=None)

    async def _only_reads(self, name: str, tool: object) -> bool:
        """Whether a tool is known not to change its server's memory: by its annotations, if the spec trusts them."""
        server = self._spec.mcp_servers[name]
        if not server.trust_hints:
            return False
        # By environment and not by command alone: another environment may have another program under the same path.
        definition = f"{name} of {self._environment_text}"
        known = self._known_reads.get(definition)
        if known is None:
            # Two sandboxes may come here at the same time; both get the same list, and the later one stores it
            # again.
            response, _ = await self._ask_pages(name, "tools/list", {}, read=True)
            known = self._known_reads[definition] = _read_only_tools(response.payload)
        return tool in known

    @cached_property
    def _environment_text(self) -> str:
        return self._spec.model_dump_json()

    async def _ask_pages(
        self, name: str, method: str, params: dict[str, Any], listener: Listener | None = None, *, read: bool
    ) -> tuple[McpResponse, Envelope[CallDone]]:
        response, done = await self._ask(name, method, dict(params), listener, read=read)
        whole = response
        while cursor := response.payload.get("result", {}).get("nextCursor"):
            response, done = await self._ask(name, method, {**params, "cursor": cursor}, listener, read=read)
            whole = whole.with_page(response)
            if whole.pages > MAX_PAGES:
                # A list without end is a broken server; the sandbox goes with it, as after any failure of one.
                self._guest.link.die(f"MCP server {name!r} lists without end")
                raise ServerError(f"MCP server {name!r} has more than {MAX_PAGES} pages of {method}")
        return whole, done

    async def _ask(
        self, name: str, method: str, params: dict[str, Any], listener: Listener | None = None, *, read: bool
    ) -> tuple[McpResponse, Envelope[CallDone]]:
        server = self._spec.mcp_servers[name]
        order = mcp_order(name, self._spec, self._environment)
        # The supervisor starts the server if it does not run, and holds the sandbox in the call from here on.
        connected = await self._servers.connect(order)
        silence_s = server.timeout_s or self._spec.limits.timeout_s
        conversation = self._conversation(server, connected)
        # The progress token is always there, so that a server sees the same bytes whichever client asks.
        params["_meta"] = {**params.get("_meta", {}), "progressToken": PROGRESS_TOKEN}
        try:
            # From here each failure of the server ends the call at the supervisor too, which brings the server's log.
            async with self._servers.conversation(order.name):
                # Over HTTP a server that was started by something else has no session of ours either.
                if connected.message.fresh or (server.url is not None and not connected.message.note):
                    await conversation.initialize(silence_s=server.ready_s)
                try:
                    response = await conversation.request(method, params, silence_s=silence_s, listener=listener)
                except SessionLostError:
                    # As the specification has clients do it: the request goes into a new session.
                    await conversation.initialize(silence_s=server.ready_s)
                    response = await conversation.request(method, params, silence_s=silence_s, listener=listener)
                if method in PAGED:
                    require_list(method, response.payload)
                # Inside the block: a server may die between its response and the end of the call.
                return response, await self._servers.finish(read=read, note=conversation.note)
        finally:
            # The descriptors are duplicates, so the server's own pipes stay open.
            conversation.close()

    def _conversation(self, server: McpServer, connected: Envelope[ServerConnected]) -> McpConversation:
        if server.url is None:
            return McpConversation(StdioTransport(connected.fds, max_bytes=MCP_BYTES, fresh=connected.message.fresh))

        # Further connections come from the sandbox as well: its network is not the proxy's.
        async def reconnect() -> socket.socket:
            return socket.socket(fileno=await self._servers.reconnect(server.ready_s))

        first = socket.socket(fileno=connected.fds[0])
        note = connected.message.note
        return McpConversation(HttpTransport(server.url, first, reconnect, note, max_bytes=MCP_BYTES))


def _read_only_tools(payload: dict[str, Any]) -> frozenset[str]:
    tools = payload.get("result", {}).get("tools", [])
    # Only an explicit hint counts: without one a tool may change anything.
    return frozenset(tool["name"] for tool in tools if _annotations(tool).get("readOnlyHint") is True)


def _annotations(tool: dict[str, Any]) -> dict[str, Any]:
    annotations = tool.get("annotations")
    return annotations if isinstance(annotations, dict) else {}
