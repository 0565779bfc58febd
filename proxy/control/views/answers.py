"""Recorded answers as the REST API and the page show them: bounded in size, whatever their bytes are. Pure."""

import contextlib
from typing import Any

import orjson
from pydantic import BaseModel, Field

from sandboxes.calls import ToolResult

SHOWN_CHARS = 64 << 10
"""Longest text that a view contains, in characters. `GET …/answer` downloads the rest."""
_SHOWN_ITEMS = 1000
"""Longest list or object that a view contains, in items: a page with more is slow to draw."""
_SHOWN_DEPTH = 60
"""Deepest nesting that a view contains, far below the limits of JSON readers and of the interpreter's stack."""
_PARSED_BYTES = 16 << 20
"""Largest JSON body that is parsed for a view. Larger bodies are shown as text."""
_NOT_TEXT = ("image/", "video/", "audio/", "application/octet-stream")


class AnswerView(BaseModel):
    """A recorded answer. Text and JSON are shown; of other bytes only the size is.

    Attributes:
        truncated: Whether long texts or lists were cut; `GET …/answer` downloads the whole body.
        json_: The body if it is JSON, named `json` in the response; otherwise null.
        text: The body if it is other text; otherwise null.
    """

    status: int
    media_type: str
    size_bytes: int
    truncated: bool = False
    json_: Any = Field(default=None, serialization_alias="json")
    text: str | None = None


class ShownAnswer(AnswerView):
    """A recorded answer as the page shows it: bytes that are no UTF-8 are U+FFFD, and `exact` is then false."""

    exact: bool = True


def answer_view(result: ToolResult) -> AnswerView:
    """Return the view of a recorded answer; long answers are cut."""
    view = AnswerView(status=result.status, media_type=result.media_type, size_bytes=len(result.body))
    if result.media_type.partition(";")[0].endswith("json") and len(result.body) <= _PARSED_BYTES:
        with contextlib.suppress(orjson.JSONDecodeError):
            value, truncated = bounded(orjson.loads(result.body))
            return view.model_copy(update={"json_": value, "truncated": truncated})
    try:
        text = result.body.decode()
    except UnicodeDecodeError:
        return view
    return view.model_copy(update={"text": text[:SHOWN_CHARS], "truncated": len(text) > SHOWN_CHARS})


def shown_answer(result: ToolResult) -> ShownAnswer:
    """Return the page's view of an answer. A body of several megabytes takes milliseconds: call it in a thread."""
    view = ShownAnswer(**dict(answer_view(result)))
    if view.text is not None or view.json_ is not None or result.media_type.startswith(_NOT_TEXT):
        return view
    text = result.body[:SHOWN_CHARS].decode(errors="replace")
    return view.model_copy(update={"text": text, "exact": False, "truncated": len(result.body) > SHOWN_CHARS})


def bounded(value: Any) -> tuple[Any, bool]:
    """Return a JSON value without its excess length and depth, and whether anything was cut."""
    truncated = False

    def bound(part: Any, depth: int = 0) -> Any:
        nonlocal truncated
        if depth == _SHOWN_DEPTH and isinstance(part, list | dict):
            truncated = True
            return "…"
        if isinstance(part, str) and len(part) > SHOWN_CHARS:
            truncated = True
            return part[:SHOWN_CHARS]
        if isinstance(part, list):
            truncated = truncated or len(part) > _SHOWN_ITEMS
            return [bound(item, depth + 1) for item in part[:_SHOWN_ITEMS]]
        if isinstance(part, dict):
            truncated = truncated or len(part) > _SHOWN_ITEMS
            return {name: bound(item, depth + 1) for name, item in list(part.items())[:_SHOWN_ITEMS]}
        return part

    return bound(value), truncated
