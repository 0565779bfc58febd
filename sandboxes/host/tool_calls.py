"""Servers that run inside a sandbox, asked from the driver's side; what the sandboxes of both drivers share."""

import asyncio
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from operator import or_
from pathlib import Path
from types import MappingProxyType
from typing import Any

import orjson

from sandboxes.calls import Execution, ToolCall, ToolResult
from sandboxes.errors import NotFreezableError, SandboxError, ServerError
from sandboxes.host.guest_link import GRACE_S, Talk
from sandboxes.host.inspect import entries_of
from sandboxes.host.process_calls import ProcessConversation, is_process, is_tending, refused, tended
from sandboxes.host.process_calls import request as process_request
from sandboxes.host.translate import execution
from sandboxes.inspection import FileEntry
from sandboxes.ipc.frames import Message
from sandboxes.listener import Listener
from sandboxes.server_spec import McpServer
from sandboxes.spec import EnvironmentSpec
from sandboxes.tool_clients import server_orders as serving
from sandboxes.tool_clients.http1 import MalformedResponseError, exchange
from sandboxes.tool_clients.mcp import MAX_PAGES, PAGED, PROGRESS_TOKEN, Conversation, McpResponse
from sandboxes.tool_clients.mcp_http import HttpTransport
from sandboxes.tool_clients.mcp_stdio import StdioTransport
from sandboxes.tool_clients.server_orders import Spool, mcp_order, order
from sandboxes.tool_clients.websocket import Socket, carrier, is_message

MCP_TYPE = "application/vnd.forkpoint.mcp+json"
ALONG_BYTES = 16 << 10
"""Of a request; what a fresh connection takes at once, whatever the server does."""
LOOK_S = 30.0
"""Of looking at files."""
MCP_BYTES = 32 << 20
"""Of one message of an MCP server."""


class Hosting(Talk):
    """A sandbox with servers in it."""

    def hosts(
        self,
        spec: EnvironmentSpec,
        environment: Mapping[str, str],
        folder: Path,
        known_reads: dict[str, frozenset[str]],
        born_with: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Note what this sandbox hosts.

        folder: where long answers lie while they come. known_reads: by definition of an MCP server, the tools that it
        says change nothing; shared by the driver's sandboxes. born_with: the image's variables, which a process of its
        own has too.
        """
        self._born_with = born_with
        self._hosted, self._environment, self._folder, self._known_reads = spec, environment, folder, known_reads
        self._sockets: dict[str, Socket] = {}

    async def ask(self, fields: dict[str, Any], body: bytes, timeout_s: float, fds: list[int] | None = None) -> Message:
        """Send a call and return the answer to it."""
        raise NotImplementedError

    def _concluded(self, answer: Message) -> Message:
        """Begin what a call leaves to do."""
        raise NotImplementedError

    async def entries(self, paths: Sequence[str], *, content_bytes: int) -> Mapping[str, FileEntry]:
        """See `InspectableSandbox.entries`."""
        arguments = {"paths": list(paths), "content_bytes": content_bytes}
        fields = {"op": "file", "tool": "entries", "arguments": arguments, "timeout_s": LOOK_S}
        return entries_of(self._concluded(await self.ask(fields, b"", LOOK_S)), paths)

    def is_hosted(self, call: ToolCall) -> bool:
        """Whether call is for one of the servers, or for a process of its own."""
        return is_process(call) or is_tending(call) or call.endpoint == "mcp" or call.endpoint in self._hosted.hosted

    async def serve(self, call: ToolCall, listener: Listener | None) -> Execution:
        """Have a server answer call; listener hears the answer while it comes.

        Raises:
            ServerError: the server failed. SandboxError: the sandbox did. It is dead in both cases.
        """
        if is_tending(call):
            return await self._tend(call)
        if is_process(call):
            return await self.run_process(call, listener)
        if call.endpoint == "mcp":
            return await self._mcp(call, listener)
        return await (self._message(call) if is_message(call) else self._forward(call, listener))

    async def run_process(self, call: ToolCall, listener: Listener | None) -> Execution:
        """Run a process of its own; listener hears its output while it comes. Its ending is in the answer alone.

        Where listener's client leaves, the process goes on without it, and its answer is nobody else's.

        Raises:
            SandboxError: the sandbox failed; it is dead.
        """
        refusal = refused(call)
        if refusal is not None:
            return refusal
        timeout_s = float(call.arguments.get("timeout_s") or self._hosted.limits.timeout_s)
        asked = process_request(call, self._hosted, self._born_with, timeout_s)
        connected = await self.ask(asked, call.body, timeout_s)
        conversation = ProcessConversation(call, listener)
        try:
            leave = self._channel.tell({"op": "leave"})
            await conversation.hear(connected.fds[0], leave, within_s=timeout_s)
            return conversation.execution(self._concluded(await self._listen()))
        except asyncio.CancelledError:
            self._die("its call was cancelled")
            raise
        except SandboxError as error:
            self._die(str(error))
            raise

    async def _tend(self, call: ToolCall) -> Execution:
        timeout_s = self._hosted.limits.timeout_s
        asked = {"op": "tend", "tool": call.tool, "arguments": dict(call.arguments), "timeout_s": timeout_s}
        return tended(call, self._concluded(await self.ask(asked, call.body, timeout_s)))

    async def start_servers(self) -> None:
        """Start those that run in the root state.

        Raises:
            ServerError: one of them did not get ready.
        """
        names = [name for name, server in self._hosted.hosted.items() if server.start == "root"]
        if names:
            orders = [order(name, self._hosted, self._environment) for name in names]
            within_s = sum(self._hosted.hosted[name].ready_s for name in names)
            self._hear_of_server(await self._run({"op": "start", "servers": orders}, b"", within_s, []))
        for name in self._hosted.mcp_servers:
            # Greeted once, when it starts: its first client finds it as any later one does.
            await self._ask_mcp(name, "ping", {}, read=True)

    async def _forward(self, call: ToolCall, listener: Listener | None) -> Execution:
        server = self._hosted.hosted[call.endpoint]
        head = serving.request(call, server.port)
        # A small request goes along: it is on its way before the connection has come here.
        along = head + call.body if len(head) + len(call.body) <= ALONG_BYTES else b""
        asked = {"op": "serve", "server": order(call.endpoint, self._hosted, self._environment)}
        connected = self._hear_of_server(await self.ask(asked, along, server.ready_s))
        silence_s = server.timeout_s or self._hosted.limits.timeout_s
        spool = Spool(call, listener, most=server.answer_bytes, folder=self._folder)
        try:
            connection = socket.socket(fileno=connected.fds[0])
            await exchange(connection, head, call.body, spool, silence_s=silence_s, sent=bool(along))
            answer = self._concluded(await self._talk({"op": "served", "read": serving.reads(call), "log": False}))
            return replace(
                execution(answer, float(answer.fields["seconds"]), spool.result()),
                shareable=spool.whole and not serving.volatile(call),
            )
        except (MalformedResponseError, OSError, TimeoutError) as error:
            raise await self._server_failed(call.endpoint, error) from error
        except asyncio.CancelledError:
            self._die("its call was cancelled")
            raise
        finally:
            spool.close()

    async def _message(self, call: ToolCall) -> Execution:
        """Send a message over its WebSocket; the first one opens it."""
        server = self._hosted.hosted[call.endpoint]
        asked = carrier(call, order(call.endpoint, self._hosted, self._environment))
        connected = self._hear_of_server(await self.ask({"op": "serve", "server": asked}, b"", server.ready_s))
        silence_s = server.timeout_s or self._hosted.limits.timeout_s
        try:
            talk = self._socket(call, asked["name"], connected, server.port, server.answer_bytes)
            if connected.fields["fresh"]:
                await talk.shake_hands(call, silence_s=silence_s)
            said = await talk.ask(call, silence_s=silence_s)
            answer = self._concluded(await self._talk({"op": "served", "read": serving.reads(call), "log": False}))
        except (MalformedResponseError, OSError, TimeoutError) as error:
            raise await self._server_failed(call.endpoint, error) from error
        except asyncio.CancelledError:
            self._die("its call was cancelled")
            raise
        ran = execution(answer, float(answer.fields["seconds"]), said.result())
        return replace(ran, shareable=not serving.volatile(call))

    def _socket(self, call: ToolCall, name: str, connected: Message, port: int, most: int) -> Socket:
        """Return a connection's end here: the one that there is, or one over the descriptors that have come."""
        fresh = bool(connected.fields["fresh"])
        known = self._sockets.get(name)
        if known is not None and not fresh:
            for fd in connected.fds:
                os.close(fd)
            return known
        if known is not None:
            known.close()
        self._sockets[name] = Socket(connected.fds, call, port, most=most, opened=not fresh)
        if fresh and not call.arguments["first"]:
            raise MalformedResponseError("its WebSocket has ended")
        return self._sockets[name]

    def require_still(self) -> None:
        """Raise where something came over a WebSocket that no call has told yet: no frozen state would have it.

        Raises:
            NotFreezable: so it is.
        """
        if not all(talk.still for talk in self._sockets.values()):
            raise NotFreezableError("a server has sent messages over its WebSocket that nobody has asked for")

    def close_sockets(self) -> None:
        """Let go of the WebSockets, when the sandbox goes."""
        for talk in self._sockets.values():
            talk.close()

    async def _mcp(self, call: ToolCall, listener: Listener | None) -> Execution:
        method, params, names = (call.arguments[member] for member in ("method", "params", "server"))
        if "," in names:
            return await self._list_all(method, params, names.split(","))
        read = method != "tools/call" or await self._reads(names, params.get("name"))
        ask = self._ask_pages if method in PAGED else self._ask_mcp
        heard, answer = await ask(names, method, dict(params), listener, read=read)
        told = {"notifications": heard.notifications, **heard.payload}
        result = ToolResult(200, MCP_TYPE, orjson.dumps(told))
        return replace(execution(answer, float(answer.fields["seconds"]), result), shareable=heard.shareable)

    async def _list_all(self, method: str, params: dict[str, Any], names: list[str]) -> Execution:
        """Return one list of what several servers have; what is called has its server's name before its own."""
        found: dict[str, list[Any]] = {}
        runs = []
        for name in names:
            heard, answer = await self._ask_pages(name, method, dict(params), read=True)
            runs.append(execution(answer, float(answer.fields["seconds"]), ToolResult(200, MCP_TYPE, b"")))
            for kind, listed in heard.payload.get("result", {}).items():
                if isinstance(listed, list):
                    called = kind == "tools"
                    found.setdefault(kind, []).extend(
                        {**one, "name": f"{name}__{one['name']}"} if called else one for one in listed
                    )
        effect = reduce(or_, (run.effect for run in runs))
        result = ToolResult(200, MCP_TYPE, orjson.dumps({"notifications": [], "result": found}))
        return replace(runs[-1], result=result, effect=effect, seconds=sum(run.seconds for run in runs))

    async def _reads(self, name: str, tool: object) -> bool:
        """Whether a tool is known to leave its server's memory alone: by its annotations, where these are trusted.

        They are asked of the first process of each server.
        """
        server = self._hosted.mcp_servers[name]
        if not server.trust_hints:
            return False
        known = self._known_reads.get(server.model_dump_json())
        if known is None:
            heard, _ = await self._ask_pages(name, "tools/list", {}, read=True)
            known = self._known_reads[server.model_dump_json()] = _read_only_tools(heard.payload)
        return tool in known

    async def _ask_pages(
        self, name: str, method: str, params: dict[str, Any], listener: Listener | None = None, *, read: bool
    ) -> tuple[McpResponse, Message]:
        """Ask for a list, all pages of it; see `_ask_mcp`."""
        heard, answer = await self._ask_mcp(name, method, dict(params), listener, read=read)
        whole = heard
        while cursor := heard.payload.get("result", {}).get("nextCursor"):
            heard, answer = await self._ask_mcp(name, method, {**params, "cursor": cursor}, listener, read=read)
            whole = whole.with_page(heard)
            if whole.pages > MAX_PAGES:
                self._die(f"MCP server {name!r} lists without end")
                raise ServerError(f"MCP server {name!r} has more than {MAX_PAGES} pages of {method}")
        return whole, answer

    async def _ask_mcp(
        self, name: str, method: str, params: dict[str, Any], listener: Listener | None = None, *, read: bool
    ) -> tuple[McpResponse, Message]:
        """Ask an MCP server; return what it said, and what pid 1 saw. listener: hears notifications as they come.

        Raises:
            SandboxError: the server or the sandbox failed.
        """
        server = self._hosted.mcp_servers[name]
        asked: dict[str, Any] = {"op": "serve", "server": mcp_order(name, self._hosted, self._environment)}
        connected = self._hear_of_server(await self.ask(asked, b"", server.ready_s))
        silence_s = server.timeout_s or self._hosted.limits.timeout_s
        talk = self._talk_to(server, connected)
        params["_meta"] = {**params.get("_meta", {}), "progressToken": PROGRESS_TOKEN}
        try:
            if connected.fields["fresh"] or (server.url is not None and not connected.fields["note"]):
                await talk.initialize(silence_s=server.ready_s)
            heard = await talk.request(method, params, silence_s=silence_s, listener=listener)
            told = {"op": "served", "read": read, "log": False, "note": talk.note}
            answer = self._concluded(await self._talk(told))
        except (MalformedResponseError, OSError, TimeoutError) as error:
            raise await self._server_failed(asked["server"]["name"], error) from error
        except asyncio.CancelledError:
            self._die("its call was cancelled")
            raise
        finally:
            talk.close()
        return heard, answer

    def _talk_to(self, server: McpServer, connected: Message) -> Conversation:
        """Return the conversation with a server, over what leads to it."""
        if server.url is None:
            return Conversation(
                StdioTransport(connected.fds, max_bytes=MCP_BYTES, fresh=bool(connected.fields["fresh"]))
            )

        async def again() -> socket.socket:
            try:
                more = self._hear_of_server(await self._talk({"op": "again"}, within_s=server.ready_s + GRACE_S))
            except asyncio.CancelledError:
                # The answer would be taken for that to what is asked next.
                self._die("its call was cancelled")
                raise
            return socket.socket(fileno=more.fds[0])

        first = socket.socket(fileno=connected.fds[0])
        return Conversation(HttpTransport(server.url, first, again, connected.fields["note"], max_bytes=MCP_BYTES))

    async def _server_failed(self, name: str, error: Exception) -> ServerError:
        """Return what is raised where a server gave no answer; nobody knows what it did, so the sandbox is dead."""
        silent = isinstance(error, TimeoutError)
        told = await self._talk({"op": "served", "read": False, "log": True})
        self._die(f"its server {name!r} failed")
        what = "says nothing for too long" if silent else f"failed: {error}"
        return ServerError(f"server {name!r} {what}. It printed: {told.fields['log']}", silent=silent)

    def _hear_of_server(self, message: Message) -> Message:
        if "failed" not in message.fields:
            return message
        self._die(str(message.fields["detail"]))
        raise ServerError(str(message.fields["detail"]), silent=message.fields["failed"] == "silent")


def _read_only_tools(listed: dict[str, Any]) -> frozenset[str]:
    tools = listed.get("result", {}).get("tools", [])
    return frozenset(tool["name"] for tool in tools if (tool.get("annotations") or {}).get("readOnlyHint") is True)
