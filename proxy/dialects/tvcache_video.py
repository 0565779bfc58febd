"""The protocol of TVCACHE's authors: `/start`, `/execute`, `/fork`, `/stop`, with a sandbox_id in each body (pure).

A sandbox is a rollout. Commands are the video endpoint's tools under other names, with the same records; responses are
the texts that the authors' agents know.
"""

import ast
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson

from proxy.dialects.base import Call, Close, Local, Meaning, Open, Request, Response, json_object
from proxy.names import named
from proxy.refusals import Problem, RefusalError
from proxy.tree.keys import call_key
from sandboxes.calls import ToolCall

MakeCall = Callable[[str, Any, str], ToolCall]
"""Takes the tool, its arguments and the rollout; returns the call."""
_PATHS = frozenset({"start", "stop", "fork", "execute"})
_BAD_TUPLE = "Invalid input tuple!"
_JSON = (("content-type", "application/json"),)


class _BadTupleError(ValueError):
    """An argument that should be a text with a Python tuple is malformed."""


def speaks(request: Request) -> bool:
    """Return whether a request is one of this protocol."""
    return request.path.strip("/") in _PATHS


def read(request: Request, make: MakeCall) -> Meaning:
    """Return what a request means. Raises RefusalError: 400 as the authors' server, or 405."""
    if request.method != "POST":
        raise RefusalError(405, "method", "this takes POST with a JSON body.")
    body = json_object(request.body, status=400)
    verb = request.path.strip("/")
    rollout = request.rollout or named("rollout", _text(body, "sandbox_id"))
    if verb == "start":
        reply = {"success": True, "sandbox_id": rollout, "sandbox_path": f"sandbox/{rollout}"}
        return Open(rollout, _local(reply))
    if verb == "stop":
        return Close(rollout, _local({"success": True, "sandbox_id": rollout}))
    if verb == "fork":
        if not request.fresh:
            raise RefusalError(
                400, "fork", "a fork gets a name of its own, so the URL must not name a rollout: /t/{task}/video/fork."
            )
        return Open(request.fresh, _local({"success": True, "sandbox_id": request.fresh}), parent=rollout)
    return _execute(body, rollout, request, make)


def _execute(body: Mapping[str, Any], rollout: str, request: Request, make: MakeCall) -> Meaning:
    command = _text(body, "command")
    if command not in _COMMANDS:
        raise RefusalError(400, "command", f"there is no command {command!r}; there are: {', '.join(_COMMANDS)}.")
    tool, arguments_of = _COMMANDS[command]
    try:
        arguments = arguments_of(body.get("argument", ""))
    except _BadTupleError:
        return _local({"success": True, "command": command, "result": _BAD_TUPLE})
    call = make(tool, arguments, rollout)
    return Call(call, call_key(call), rollout=rollout, bound=True, existing=not request.rollout)


def _text(body: Mapping[str, Any], member: str) -> str:
    value = body.get(member)
    if not isinstance(value, str) or not value:
        raise RefusalError(400, member, f"{member} is required, as a string.")
    return value


def _local(reply: dict[str, Any]) -> Local:
    return Local(200, orjson.dumps(reply), _JSON)


# -- arguments: texts, some of which hold a Python tuple ---------------------------------------------------------------


def _as_text(argument: Any) -> str:
    if not isinstance(argument, str) or not argument.strip():
        raise RefusalError(400, "argument", "this command takes an argument, as a string.")
    return argument.strip()


def _span(argument: Any) -> dict[str, Any]:
    start, end = _pair(argument)
    if not (_is_number(start) and _is_number(end)):
        raise _BadTupleError
    return {"start": start, "end": end}


def _question_and_segment(argument: Any) -> dict[str, Any]:
    question, segment = _pair(argument)
    if not isinstance(question, str) or not question.strip() or not _is_number(segment):
        raise _BadTupleError
    return {"question": question, "segment": segment}


def _pair(argument: Any) -> Sequence[Any]:
    value = argument
    if isinstance(argument, str):
        try:
            value = ast.literal_eval(argument.strip())
        except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
            raise _BadTupleError from None
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise _BadTupleError
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 53


_COMMANDS: dict[str, tuple[str, Callable[[Any], dict[str, Any]]]] = {
    "load_video_into_sandbox": ("load_video", lambda argument: {"name": _as_text(argument)}),
    "preprocess": ("preprocess", lambda _: {}),
    "caption_retrieval": ("caption_retrieval", _span),
    "segment_localization": ("segment_localization", lambda argument: {"description": _as_text(argument)}),
    "visual_question_answering": ("visual_question_answering", _question_and_segment),
    "object_memory_querying": ("object_memory_querying", lambda argument: {"question": _as_text(argument)}),
}


# -- answers ----------------------------------------------------------------------------------------------------------


def answer(response: Response, request: Request) -> Response:
    """Return a recorded response in the authors' form, errors in `result` too: their client reads only that."""
    command = json_object(request.body, status=400).get("command", "")
    value = orjson.loads(response.body)
    if "error" in value:
        message = value["error"]["message"]
        reply = {"success": False, "command": command, "result": message, "error": message}
    else:
        reply = {"success": True, "command": command, "result": _TEXTS[command](value)}
    body = orjson.dumps(reply)
    kept = tuple((n, v) for n, v in response.headers if n.lower() not in ("content-type", "content-length"))
    return Response(200, (*_JSON, ("content-length", str(len(body))), *kept), body)


def problem(problem: Problem) -> Local:
    """Return a problem as the authors' server reports it: as `error`, with the status."""
    headers = [(n.decode(), v.decode()) for n, v in problem.headers() if n != b"content-type"]
    return Local(problem.status, orjson.dumps({"error": problem.detail}), (*_JSON, *headers))


def _of_all(value: Mapping[str, Any]) -> str:
    return f"There are {value['segments']} segments in total, ranging from 0 to {value['segments'] - 1}."


def _captions(value: Mapping[str, Any]) -> str:
    captions = {each["segment"]: each["caption"] for each in value["captions"]}
    return f"\n{_of_all(value)} Caption of segments from {min(captions)} to {max(captions)} is {captions}\n"


def _segments(value: Mapping[str, Any]) -> str:
    captions = {each["segment"]: each["caption"] for each in value["found"]}
    return f"\n{_of_all(value)} The most relevant segments are: {captions}.\n"


def _answer_text(value: Mapping[str, Any]) -> str:
    return f"\nSegment description: {value['caption']}\nAnswer to the question: {value['answer']}\n"


_TEXTS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "load_video_into_sandbox": lambda _: "Successfully loaded video into the sandbox",
    "preprocess": lambda _: "Preprocessing completed",
    "caption_retrieval": _captions,
    "segment_localization": _segments,
    "visual_question_answering": _answer_text,
    "object_memory_querying": lambda v: str(v["answer"]) if v["answered"] else "I cannot answer that question",
}
