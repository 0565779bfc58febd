"""The video endpoint: `POST {tool}`, `GET tools`, and its tools for MCP and for `tvcache_video` (pure)."""

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any, Literal
from urllib.parse import unquote

import orjson
from pydantic import Field, model_validator
from typing_extensions import override

from proxy.dialects import tvcache_video
from proxy.dialects.arguments import BuiltInTool, ToolArguments, checked_arguments
from proxy.dialects.base import Call, Dialect, Local, Meaning, Request, Response
from proxy.refusals import Problem, RefusalError
from proxy.tree.keys import call_key
from sandboxes.calls import ToolCall
from sandboxes.spec import EnvironmentSpec

MAX_SAMPLES, MAX_TILES, MAX_TEXT = 64, 36, 4000
"""Limit the pictures of one response, the tiles of a contact sheet, and the characters of a question."""
_NUMBER = re.compile(r"([0-9]{1,9})$")


class _Nothing(ToolArguments):
    pass


class _Load(ToolArguments):
    name: str = Field(min_length=1, max_length=255)


class _Span(ToolArguments):
    start: float | None = Field(default=None, description="seconds; the beginning where left out")
    end: float | None = Field(default=None, description="seconds; the end where left out")


class _Picture(ToolArguments):
    max_side: int = Field(default=448, ge=16, le=4096, description="of a picture, in pixels")
    format: Literal["jpeg", "png"] = "jpeg"
    exact: bool = Field(
        default=False, description="the very picture at that time, decoded now; else the kept one nearest, of its shot"
    )


class _Frame(_Picture):
    t: float = Field(description="seconds")


class _Samples(_Picture, _Span):
    n: int | None = Field(default=None, ge=1, le=MAX_SAMPLES, description="so many, evenly; 8 by default")
    every_s: float | None = Field(default=None, gt=0, description="or one in so many seconds")
    at: list[float] | None = Field(default=None, min_length=1, max_length=MAX_SAMPLES, description="or at these times")

    @model_validator(mode="after")
    def _reject_two_sampling_ways(self) -> "_Samples":
        if sum(way is not None for way in (self.n, self.every_s, self.at)) > 1:
            raise ValueError("say one of n, every_s and at")
        if self.n is None and self.every_s is None and self.at is None:
            self.n = 8
        return self


class _Sheet(_Span):
    n: int = Field(default=9, ge=1, le=MAX_TILES)
    max_side: int = Field(default=160, ge=16, le=1024, description="of each tile, in pixels")
    format: Literal["jpeg", "png"] = "jpeg"


class _Shots(ToolArguments):
    threshold: float | None = Field(default=None, gt=0, lt=1, description="difference of two pictures that is a cut")


class _Captions(ToolArguments):
    start: int = Field(description="first segment")
    end: int = Field(description="last segment")


class _Localization(ToolArguments):
    description: str = Field(min_length=1, max_length=MAX_TEXT)
    k: int = Field(default=5, ge=1, le=100)


class _Question(ToolArguments):
    question: str = Field(min_length=1, max_length=MAX_TEXT)


class _SegmentQuestion(_Question):
    segment: int


TOOLS: dict[str, BuiltInTool] = {
    "load_video": BuiltInTool(_Load, "Load a video by its name. What was loaded before is gone."),
    "preprocess": BuiltInTool(
        _Nothing, "Prepare the loaded video: pictures, shots, sound, subtitles, descriptions of segments."
    ),
    "video_info": BuiltInTool(
        _Nothing, "Say what the loaded video is: length, size, tracks, number of segments and shots.", reads=True
    ),
    "sample_frames": BuiltInTool(_Samples, "Show several pictures.", reads=True),
    "get_frame": BuiltInTool(_Frame, "Show the picture at a time.", reads=True),
    "contact_sheet": BuiltInTool(_Sheet, "Show n pictures of a span on one sheet, with their times.", reads=True),
    "detect_shots": BuiltInTool(_Shots, "List the shots: spans between two cuts.", reads=True),
    "get_subtitles": BuiltInTool(_Span, "List the subtitles that are seen in a span.", reads=True),
    "audio_profile": BuiltInTool(_Span, "Tell loudness, peak and tone of each segment in a span.", reads=True),
    "segment_localization": BuiltInTool(_Localization, "Find the k segments that fit a description best.", reads=True),
    "caption_retrieval": BuiltInTool(_Captions, "Tell what is seen in each of the segments start to end.", reads=True),
    "visual_question_answering": BuiltInTool(
        _SegmentQuestion, "Answer a question about what is seen around a segment.", reads=True
    ),
    "object_memory_querying": BuiltInTool(
        _Question, "Answer a question about the things that were seen in the whole video.", reads=True
    ),
}
SAMPLED = frozenset({"visual_question_answering", "object_memory_querying"})
"""Tools whose answers are sampled from a model. A task may want several answers to each call (`variants`)."""


def listed() -> list[dict[str, Any]]:
    """Return the answer to `GET tools`, in MCP's form."""
    return [tool.listed(name) for name, tool in TOOLS.items()]


def call_of(tool: str, given: Any, spec: EnvironmentSpec) -> ToolCall:
    """Return the call of a tool, with defaults filled in. Raises RefusalError (404 or 422), with a remedy."""
    if spec.video is None:
        raise RefusalError(404, "no-video", "this task has no videos. PUT it with `video`: docs/video.md shows how.")
    if tool not in TOOLS:
        raise RefusalError(404, "no-such-tool", f"the video endpoint has {', '.join(TOOLS)}; GET tools says more.")
    kind = TOOLS[tool].kind
    if not isinstance(given, dict):
        raise RefusalError(422, "arguments", f"{tool} takes a JSON object.")
    arguments = checked_arguments(tool, kind, given).model_dump()
    return ToolCall("video", tool, arguments | ({"variant": 0} if tool in SAMPLED else {}))


def for_rollout(call: ToolCall, rollout: str, spec: EnvironmentSpec) -> ToolCall:
    """Return a call with this rollout's variant, by the number at the end of its name, which spreads a group evenly."""
    if spec.video is None or spec.video.model is None or spec.video.variants == 1 or call.tool not in SAMPLED:
        return call
    number = _NUMBER.search(rollout)
    chosen = int(number[1]) if number else int.from_bytes(blake2b(rollout.encode(), digest_size=8).digest(), "big")
    return replace(call, arguments={**call.arguments, "variant": chosen % spec.video.variants})


def mcp_content(response: Response) -> dict[str, Any] | None:
    """Return the MCP result of a response of the video endpoint; None for any other response."""
    headers = dict(response.headers)
    kind = headers.get("content-type", "")
    if kind in ("image/jpeg", "image/png"):
        content = [_image(kind, response.body)]
        if "x-frame-time" in headers:
            content.append({"type": "text", "text": f"at {headers['x-frame-time']} s"})
        return {"content": content, "isError": False}
    if kind != "application/json":
        return None
    value = orjson.loads(response.body)
    if not isinstance(value, dict) or not ("label" in value or _is_fault(value)):
        return None
    if isinstance(value.get("frames"), list):
        return {"content": _frames(value["frames"]), "isError": False}
    text = value["error"]["message"] if "error" in value else response.body.decode()
    return {
        "content": [{"type": "text", "text": text}], "structuredContent": value, "isError": "error" in value,
    }  # fmt: skip


def _image(media_type: str, data: bytes) -> dict[str, Any]:
    return {"type": "image", "data": base64.b64encode(data).decode(), "mimeType": media_type}


def _frames(frames: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    content: list[dict[str, Any]] = []
    for frame in frames:
        content.append({"type": "text", "text": f"at {frame['frame_t']:.3f} s"})
        content.append({"type": "image", "data": frame["data"], "mimeType": frame["media_type"]})
    return content


def _is_fault(value: dict[str, Any]) -> bool:
    return (
        value.keys() == {"error"} and isinstance(value["error"], dict) and value["error"].keys() == {"kind", "message"}
    )


class VideoDialect(Dialect):
    """The dialect of a task's video endpoint."""

    def __init__(self, spec: EnvironmentSpec) -> None:
        self._spec = spec
        self.headers_matter = spec.video is not None and spec.video.variants > 1
        # With variants, requests of the same bytes are different calls of different rollouts.

    @override
    def read(self, request: Request) -> Meaning:
        tool = unquote(request.path).strip("/")
        if tvcache_video.speaks(request):
            return tvcache_video.read(request, self._call)
        if tool == "tools" and request.method == "GET":
            return Local(200, orjson.dumps({"tools": listed()}))
        if request.method != "POST":
            raise RefusalError(405, "method", "tools take POST with a JSON body; GET tools lists them.")
        try:
            given = orjson.loads(request.body or b"{}")
        except orjson.JSONDecodeError as error:
            raise RefusalError(400, "json", f'the body is not JSON: {error}. Send {{"t": 1.5}} as UTF-8.') from None
        call = self._call(tool, given, request.rollout)
        if not request.rollout:
            raise RefusalError(400, "no-rollout", "the URL must name the rollout: /t/{task}/r/{rollout}/video/…")
        return Call(call, call_key(call))

    def _call(self, tool: str, given: Any, rollout: str) -> ToolCall:
        return for_rollout(call_of(tool, given, self._spec), rollout, self._spec)

    @override
    def answer(self, response: Response, request: Request) -> Response:
        return tvcache_video.answer(response, request) if tvcache_video.speaks(request) else response

    @override
    def problem(self, problem: Problem, request: Request) -> Local | None:
        return tvcache_video.problem(problem) if tvcache_video.speaks(request) else None
