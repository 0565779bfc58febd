"""A model whose every word is written before, with the four APIs of today's harnesses, streamed or whole.

The URL begins with `/{who}/{turn}`: that is the model of one rollout, which says something of its own at one turn.
Ids, chunks and usage are drawn at random, as engines draw them.
"""

import json
import random
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

DRAWN = random.SystemRandom()
Say = Callable[[int, str], str | None]
"""Returns the command that the model wants to have run in a turn, for a rollout's own word; None for the end."""


class ScriptedModel(ThreadingHTTPServer):
    """The server. `asked` has what it was asked: who asks, and the request's body."""

    daemon_threads = True

    def __init__(self, say: Say) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.say = say
        # In place of `say`, for URLs that begin with `/{who}`: it is given `who` in each turn.
        self.say_whole: Say | None = None
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.keys: list[str] = []
        self.failures = 0
        self.delay_s = 0.0
        self.lock = threading.Lock()

    @property
    def root(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"

    def url(self, who: str = "all", turn: int = 1 << 30) -> str:
        return f"{self.root}{who}/{turn}"


@contextmanager
def scripted_model(say: Say) -> Iterator[ScriptedModel]:
    """Run a model until the end of the block."""
    with ScriptedModel(say) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ScriptedModel

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        _, who, turn, path = self.path.split("/", 3) if self.server.say_whole is None else self._whole_name()
        with self.server.lock:
            self.server.asked.append((who, body))
            self.server.keys.append(self.headers.get("x-api-key") or self.headers.get("authorization") or "")
            self.server.failures -= (failed := self.server.failures > 0)
        if self.server.delay_s:
            threading.Event().wait(self.server.delay_s)
        if failed:
            self._send(503, "application/json", b"{}")
            return
        said = _SHAPES[next(end for end in _SHAPES if path.partition("?")[0].endswith(end))]
        say = self.server.say_whole or (lambda number, who: self.server.say(number, who if number == int(turn) else ""))
        events, whole = said(body, lambda number: say(number, who))
        if body.get("stream") or ":stream" in path:
            self._send(200, "text/event-stream; charset=utf-8", b"".join(map(_sse, events)))
        else:
            self._send(200, "application/json", json.dumps(whole).encode())

    def _whole_name(self) -> list[str]:
        _, who, path = self.path.split("/", 2)
        return ["", who, "0", path]

    def _send(self, status: int, media_type: str, data: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", media_type)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


Events = list[tuple[str, Any]]


def _sse(event: tuple[str, Any]) -> bytes:
    name, data = event
    text = data if isinstance(data, str) else json.dumps(data)
    return (f"event: {name}\n" if name else "").encode() + f"data: {text}\n\n".encode()


def _pieces(text: str) -> list[str]:
    pieces = []
    while text:
        size = DRAWN.randint(1, 9)
        pieces.append(text[:size])
        text = text[size:]
    return pieces


def _tool(body: dict[str, Any], names: list[str]) -> dict[str, Any] | None:
    tools = [tool.get("function", tool) for tool in body.get("tools", [])]
    tools += [tool for each in tools for tool in each.get("functionDeclarations", [])]
    return next((tool for name in names for tool in tools if tool.get("name") == name), None)


def _anthropic(body: dict[str, Any], say: Callable[[int], str | None]) -> tuple[Events, Any]:
    tool = _tool(body, ["Bash", "bash"])
    command = say(sum(message["role"] == "assistant" for message in body["messages"])) if tool else None
    message: dict[str, Any] = {
        "id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": body["model"], "content": [],
        "stop_reason": None, "stop_sequence": None, "usage": {"input_tokens": DRAWN.randint(1, 99), "output_tokens": 1},
    }  # fmt: skip
    if command is None:
        block: dict[str, Any] = {"type": "text", "text": "all done" if tool else '{"title": "A task"}'}
        begun, kind, part, text = {**block, "text": ""}, "text_delta", "text", block["text"]
    else:
        given = {"command": command, "description": "a step"}
        block = {
            "type": "tool_use",
            "id": f"toolu_{uuid.uuid4().hex[:20]}",
            "name": tool["name"] if tool else "",
            "input": given,
        }
        begun, kind, part, text = {**block, "input": {}}, "input_json_delta", "partial_json", json.dumps(given)
    stop = "end_turn" if command is None else "tool_use"
    deltas = [{"type": kind, part: piece} for piece in _pieces(text)]
    events: list[dict[str, Any]] = [
        {"type": "message_start", "message": message},
        {"type": "content_block_start", "index": 0, "content_block": begun},
        *({"type": "content_block_delta", "index": 0, "delta": delta} for delta in deltas),
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": stop, "stop_sequence": None}, "usage": {"output_tokens": 9}},
        {"type": "message_stop"},
    ]
    return [(str(event["type"]), event) for event in events], {**message, "content": [block], "stop_reason": stop}


def _chat(body: dict[str, Any], say: Callable[[int], str | None]) -> tuple[Events, Any]:
    tool = _tool(body, ["bash", "run_shell_command", "shell", "execute_bash", "terminal"])
    # Qwen Code puts words of its own into the model's mouth.
    command = say(sum("tool_calls" in message for message in body["messages"])) if tool else None
    chunk = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": DRAWN.randint(1, 1 << 31), "model": body["model"]}
    # What llama.cpp and Cerebras say of how long they took.
    chunk |= {"timings": {"predicted_ms": DRAWN.random()}, "time_info": {"total_time": DRAWN.random()}}
    if command is None or tool is None:
        message: dict[str, Any] = {"role": "assistant", "content": "all done" if tool else "A task"}
        deltas: list[dict[str, Any]] = [{"content": piece} for piece in _pieces(message["content"])]
    else:
        about = {"description": "a step"} if "description" in tool.get("parameters", {}).get("properties", ()) else {}
        given = json.dumps({"command": command, **about})
        call = {"index": 0, "id": f"call_{uuid.uuid4().hex[:20]}", "type": "function"}
        function = {"name": tool["name"], "arguments": given}
        message = {"role": "assistant", "content": None, "tool_calls": [{**call, "function": function}]}
        deltas = [{"tool_calls": [{**call, "function": {**function, "arguments": ""}}]}]
        deltas += [{"tool_calls": [{"index": 0, "function": {"arguments": piece}}]} for piece in _pieces(given)]
    stop = "stop" if command is None else "tool_calls"
    usage = {"prompt_tokens": 9, "completion_tokens": DRAWN.randint(1, 99), "total_tokens": 100}
    choices = [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]
    choices += [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
    choices += [{"index": 0, "delta": {}, "finish_reason": stop}]
    chunks: Events = [("", {**chunk, "object": "chat.completion.chunk", "choices": [choice]}) for choice in choices]
    chunks += [("", {**chunk, "object": "chat.completion.chunk", "choices": [], "usage": usage}), ("", "[DONE]")]
    whole = {**chunk, "object": "chat.completion", "usage": usage}
    return chunks, {**whole, "choices": [{"index": 0, "message": message, "finish_reason": stop}]}


def _responses(body: dict[str, Any], say: Callable[[int], str | None]) -> tuple[Events, Any]:
    tool = _tool(body, ["exec_command", "shell_command", "shell", "local_shell"])
    turns = sum(item.get("type") == "function_call" for item in body["input"] if isinstance(item, dict))
    command = say(turns) if tool else None
    response = {"id": f"resp_{uuid.uuid4().hex}", "object": "response", "created_at": DRAWN.randint(1, 1 << 31)}
    response |= {"model": body["model"], "status": "in_progress", "output": []}
    if command is None or tool is None:
        text = "all done"
        item: dict[str, Any] = {
            "type": "message", "id": f"msg_{uuid.uuid4().hex}", "role": "assistant", "status": "completed",
            "content": [{"type": "output_text", "text": text, "annotations": []}],
        }  # fmt: skip
        begun, kind = {**item, "content": [], "status": "in_progress"}, "response.output_text"
    else:
        member = "cmd" if tool["name"] == "exec_command" else "command"
        given: Any = ["bash", "-lc", command] if tool["name"] == "shell" else command
        text = json.dumps({member: given})
        item = {"type": "function_call", "id": f"fc_{uuid.uuid4().hex}", "call_id": f"call_{uuid.uuid4().hex[:20]}"}
        item |= {"name": tool["name"], "arguments": text, "status": "completed"}
        begun, kind = {**item, "arguments": "", "status": "in_progress"}, "response.function_call_arguments"
    usage: dict[str, Any] = {"input_tokens": 9, "output_tokens": DRAWN.randint(1, 99), "total_tokens": 100}
    usage |= {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
    whole = {**response, "status": "completed", "output": [item], "usage": usage}
    place = {"output_index": 0, "item_id": item["id"]}
    events: list[dict[str, Any]] = [
        {"type": "response.created", "response": response},
        {"type": "response.output_item.added", "output_index": 0, "item": begun},
        *({"type": f"{kind}.delta", **place, "delta": piece} for piece in _pieces(text)),
        {"type": "response.output_item.done", "output_index": 0, "item": item},
        {"type": "response.completed", "response": whole},
    ]
    return [(str(e["type"]), {**e, "sequence_number": i}) for i, e in enumerate(events)], whole


def _google(body: dict[str, Any], say: Callable[[int], str | None]) -> tuple[Events, Any]:
    tool = _tool(body, ["run_shell_command", "bash"])
    turns = sum("functionCall" in part for content in body["contents"] for part in content["parts"])
    command = say(turns) if tool else None
    parts: list[dict[str, Any]]
    if command is None or tool is None:
        whole: dict[str, Any] = {"text": "all done" if tool else "A task"}
        parts = [{"text": piece} for piece in _pieces(whole["text"])]
    else:
        given = {"command": command, "description": "a step"}
        whole = {"functionCall": {"name": tool["name"], "args": given, "id": f"call_{uuid.uuid4().hex[:20]}"}}
        whole["thoughtSignature"] = uuid.uuid4().hex
        parts = [whole]
    # Some engines end a stream with its last words, others after them.
    parts += [{"text": ""}] if "text" in whole and DRAWN.random() < 0.5 else []
    usage = {"promptTokenCount": 9, "candidatesTokenCount": DRAWN.randint(1, 99), "totalTokenCount": 100}
    common = {"responseId": uuid.uuid4().hex, "modelVersion": "scripted", "usageMetadata": usage}
    streamed: list[dict[str, Any]] = [{"content": {"role": "model", "parts": [part]}, "index": 0} for part in parts]
    streamed[-1]["finishReason"] = "STOP"
    at_once = {"content": {"role": "model", "parts": [whole]}, "index": 0, "finishReason": "STOP"}
    return [("", {**common, "candidates": [one]}) for one in streamed], {**common, "candidates": [at_once]}


_SHAPES = {
    "/messages": _anthropic, "/chat/completions": _chat, "/responses": _responses, "enerateContent": _google,
}  # fmt: skip
