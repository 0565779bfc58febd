"""What a harness waits for, and which responses of models are the same (pure).

A response is an edge of the tree. Engines draw its ids and times at random and cut its text into events at random, so
two responses are the same edge if they are equal without these.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from proxy.tree.keys import CallKey, UncanonicalArgumentsError, call_key
from sandboxes.calls import ToolCall
from sandboxes.tool_clients.json_text import parse_json

ENDPOINT = "harness"
_DRAWN = frozenset({
    "id", "call_id", "item_id", "response_id", "responseId", "message_id", "request_id", "created", "created_at",
    "completed_at", "createTime", "system_fingerprint", "service_tier", "usage", "usageMetadata", "logprobs",
    "avgLogprobs", "sequence_number", "obfuscation", "timings", "time_info", "signature", "thoughtSignature",
    "encrypted_content",
})  # fmt: skip
"""Members that engines draw, or that say what a response has cost."""
_SAID = frozenset({"input", "args", "arguments", "action"})
"""Members that the model has chosen: nothing is left out below them, and no event goes on with a part of them."""
_TEXTS = frozenset({
    "text", "content", "delta", "partial_json", "arguments", "thinking", "reasoning", "reasoning_content", "refusal",
})  # fmt: skip
"""Members with a part of a text, which the next event goes on with."""
_CHOICES, _ENDS = ("choices", "candidates"), frozenset({"finish_reason", "finishReason"})
"""Members of an event with its alternatives (OpenAI, Google), and of each of them with why it ends."""
_DONE = b"[DONE]"


@dataclass(frozen=True, slots=True)
class ModelResponse:
    """A model's whole response. `asked` is its `kind_of_request`; empty for the oldest that waits."""

    status: int
    media_type: str
    body: bytes
    asked: str = ""


@dataclass(slots=True)
class Path:
    """The turns from the root to a node; `turns` is -1 before the start, and `exit` None while it runs."""

    turns: int = -1
    waiting: list[dict[str, Any]] = field(default_factory=list)
    exit: dict[str, Any] | None = None

    def waiting_for(self, asked: str) -> dict[str, Any]:
        """Return the oldest request of a kind; the oldest one if none is, or any will do."""
        return next((request for request in self.waiting if kind_of_request(request) == asked), self.waiting[0])

    def advance(self, call: ToolCall, answer: bytes) -> None:
        """Go one turn on, by its call and its recorded answer."""
        told = parse_json(answer)
        gone = {*told["gone"], call.arguments.get("connection")}
        self.turns += 1
        self.waiting = [request for request in self.waiting if request["connection"] not in gone] + told["requests"]
        self.exit = told["exit"]


def without_response(path: Path, begin: Mapping[str, Any] | None = None) -> tuple[ToolCall, CallKey]:
    """Return the call, with its key, that starts the harness, with what `begin` overrides, or lets it go on."""
    call = ToolCall(ENDPOINT, "start", begin or {}) if path.turns < 0 else ToolCall(ENDPOINT, "wait", {})
    return call, call_key(call)


def delivery(path: Path, response: ModelResponse) -> tuple[ToolCall, CallKey]:
    """Return the call, with its key, that delivers a response to its request."""
    request = path.waiting_for(response.asked)
    common = {"connection": request["connection"], "others": len(path.waiting) > 1, "status": response.status}
    try:
        words, key = _words_and_key(common, canonical(response))
    # What is read may be nested more deeply than what can be written.
    except (UncanonicalArgumentsError, orjson.JSONEncodeError):
        words, key = _words_and_key(common, _as_text(response))
    headers = [["content-type", response.media_type]]
    arguments = {**common, "headers": headers, "said": "\n".join(words), "asked": kind_of_request(request)}
    return ToolCall(ENDPOINT, "deliver", arguments, response.body), key


def _words_and_key(common: Mapping[str, Any], same: Any) -> tuple[list[str], CallKey]:
    return said(same), call_key(ToolCall(ENDPOINT, "deliver", {**common, "response": same}))


def response_of(call: ToolCall) -> ModelResponse | None:
    """Return the response that a recorded call has delivered; None if it has delivered none."""
    if call.tool != "deliver":
        return None
    arguments = call.arguments
    return ModelResponse(arguments["status"], arguments["headers"][0][1], call.body, arguments["asked"])


def kind_of_request(request: Mapping[str, Any]) -> str:
    """Return what tells an agent's requests apart that wait together, such as for a title and for the next step."""
    try:
        body = parse_json(str(request.get("body", "")).encode())
    except (orjson.JSONDecodeError, RecursionError):
        body = None
    members = body if isinstance(body, dict) else {}
    tools = members.get("tools")
    count = len(tools) if isinstance(tools, list) else 0
    return f"{str(request['target']).partition('?')[0]} {members.get('model', '')} {count} tools"


def canonical(response: ModelResponse) -> Any:
    """Return what two responses that are the same have in common, as JSON; the text of a body that is none."""
    try:
        if _kind(response) == "text/event-stream":
            return ["events", *_joined(part for text in _events(response.body) for part in _parted(_event(text)))]
        return ["json", _kept(parse_json(response.body))]
    # A body that is nested too deeply is compared as it is.
    except (orjson.JSONDecodeError, RecursionError):
        return _as_text(response)


def _as_text(response: ModelResponse) -> list[str]:
    return ["text", _kind(response), response.body.decode(errors="backslashreplace")]


def _kind(response: ModelResponse) -> str:
    return response.media_type.partition(";")[0].strip().lower()


def said(value: Any) -> list[str]:
    """Return what a model says in a response, for people: its texts, and its calls of tools with their arguments."""
    if isinstance(value, list):
        return [text for item in value for text in said(item)]
    # The last events of a stream say all of it once more.
    if not isinstance(value, dict) or str(value.get("type", "")).endswith((".done", ".completed")):
        return []
    texts = []
    for name, member in value.items():
        if name == "name" or (name in _TEXTS | _SAID and isinstance(member, str)):
            texts += [member] if isinstance(member, str) and member else []
        elif name in _SAID and member:
            texts.append(orjson.dumps(member).decode())
        else:
            texts += said(member)
    return texts


def _events(body: bytes) -> Iterable[bytes]:
    """Return the data of each server-sent event (WHATWG HTML, 9.2.6); comments and names are no part of it."""
    for block in body.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n\n"):
        lines = [line[5:].removeprefix(b" ") for line in block.split(b"\n") if line.startswith(b"data:")]
        if lines:
            yield b"\n".join(lines)


def _event(data: bytes) -> Any:
    return "[DONE]" if data == _DONE else _kept(parse_json(data))


def _parted(event: Any) -> list[Any]:
    """Return what an event says and, apart from it, the ends: engines send the last words with an end or before it."""
    name = next((name for name in _CHOICES if isinstance(event, dict) and isinstance(event.get(name), list)), None)
    if name is None or not all(isinstance(choice, dict) for choice in event[name]):
        return [event]
    ends = [[choice.get("index"), *(choice[end] for end in _ENDS & choice.keys())] for choice in event[name]]
    words = [{key: value for key, value in choice.items() if key not in _ENDS} for choice in event[name]]
    parts = [] if _is_empty(words) else [{**event, name: words}]
    return [*parts, ["end", ends]] if any(end[1:] not in ([], [None]) for end in ends) else parts


def _is_empty(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_empty(member) for name, member in value.items() if name not in {"index", "role"})
    return all(map(_is_empty, value)) if isinstance(value, list) else value in {"", None}


def _kept(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            name: member if name in _SAID else _kept(member) for name, member in value.items() if name not in _DRAWN
        }
    return [_kept(item) for item in value] if isinstance(value, list) else value


def _joined(events: Iterable[Any]) -> list[Any]:
    """Return events, with those that go on with the text of the one before as one event."""
    joined: list[Any] = []
    for event in events:
        # It only keeps the connection open.
        if event == {"type": "ping"}:
            continue
        if joined and _has_text(event) and (both := _continued(joined[-1], event)) is not None:
            joined[-1] = both
        else:
            joined.append(event)
    return joined


def _continued(one: Any, other: Any, name: str = "") -> Any:
    """Return two values as one, if they differ only in texts that go on; None if they do not."""
    if name in _SAID and not isinstance(one, str):
        return None
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        members = {key: _continued(member, other[key], key) for key, member in one.items()}
        differ = any(both is None and one[key] is not None for key, both in members.items())
        return None if differ else members
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        items = [_continued(item, other[i]) for i, item in enumerate(one)]
        return None if any(both is None and one[i] is not None for i, both in enumerate(items)) else items
    if name in _TEXTS and isinstance(one, str) and isinstance(other, str):
        return one + other
    return one if one == other and type(one) is type(other) else None


def _has_text(value: Any) -> bool:
    """Return whether a part of a text is somewhere in an event: two equal events without one are two events."""
    if isinstance(value, dict):
        return any(
            (name in _TEXTS and isinstance(member, str)) or (name not in _SAID and _has_text(member))
            for name, member in value.items()
        )
    return isinstance(value, list) and any(map(_has_text, value))
