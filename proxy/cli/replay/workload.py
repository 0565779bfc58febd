"""Recorded workloads, read as requests to the endpoints of tasks.

Each line of a file is the JSON object of one rollout (`docs/data.md`):

- `{"task", "rollout", "calls": [{"tool": "shell", "args": {"command": ...}}], "spec"?: {...}, "labels"?: {...}}`
"""

import hashlib
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import count
from pathlib import Path
from typing import Any

import orjson
from pydantic import ValidationError

from proxy.refusals import RefusalError
from proxy.tree.labels import checked
from sandboxes.spec import EnvironmentSpec

_TOOLS = {"bash": ("shell/exec", "command"), "shell": ("shell/exec", "command"), "sql": ("sql/query", "sql")}
"""By the short name of a tool, its path below the rollout's URL and the argument that it needs."""
_ENDPOINTS = ("shell", "sql", "video")
"""Endpoints whose tools can be named in full, such as `video/get_frame`."""
_JSON_KINDS: Mapping[type[Any], str] = {str: "string", list: "list", dict: "object"}
_NAME_LENGTH = 100
"""Longest name without its suffix, in characters: the proxy's paths take 128."""


class WorkloadError(ValueError):
    """A workload cannot be read, or it uses an unknown tool. The text names the file and the line."""


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """The request of one recorded call, at a position in the rollout from 0, to a path below its URL."""

    index: int
    path: str
    arguments: Any
    shown: str
    method: str = "POST"
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_command(self) -> bool:
        """Whether the answer is the result of a shell command."""
        return self.path == "shell/exec"


@dataclass(frozen=True, slots=True)
class RecordedRollout:
    """A recorded rollout and its calls in order."""

    name: str
    requests: tuple[WorkloadRequest, ...]
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RecordedTask:
    """A task with its environment and its recorded rollouts, in file order."""

    name: str
    spec: EnvironmentSpec
    rollouts: tuple[RecordedRollout, ...]


@dataclass(frozen=True, slots=True)
class Workload:
    """The tasks of a workload, in file order."""

    tasks: tuple[RecordedTask, ...]

    @property
    def calls(self) -> int:
        """Number of calls."""
        return sum(len(rollout.requests) for task in self.tasks for rollout in task.rollouts)

    def select(self, *, task: str | None = None, limit: int | None = None) -> "Workload":
        """Return the tasks whose names match a shell pattern, with at most `limit` rollouts together."""
        remaining = sys.maxsize if limit is None else limit
        chosen: list[RecordedTask] = []
        for candidate in self.tasks:
            if remaining and fnmatchcase(candidate.name, task or "*"):
                chosen.append(replace(candidate, rollouts=candidate.rollouts[:remaining]))
                remaining -= len(chosen[-1].rollouts)
        return Workload(tuple(chosen))


def read_workload(files: Sequence[Path]) -> Workload:
    """Read files into one workload; a task may have rollouts in several. Raises WorkloadError."""
    parsed = []
    for file in files:
        try:
            lines = file.read_bytes().splitlines()
        except OSError as error:
            raise WorkloadError(f"{file}: cannot be read: {error.strerror}. Choose a JSONL file.") from error
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    parsed.append(_parsed(line))
                except WorkloadError as error:
                    raise WorkloadError(f"{file}, line {number}: {error}") from error
    return _gather(parsed)


def _parsed(line: bytes) -> tuple[str, EnvironmentSpec, RecordedRollout]:
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise WorkloadError(f"not JSON: {error}. A workload has one JSON object per line.") from error
    task, rollout, calls = member(record, "task", str), member(record, "rollout", str), member(record, "calls", list)
    try:
        spec = EnvironmentSpec.model_validate(record.get("spec", {}))
    except ValidationError as error:
        raise WorkloadError(f"`spec` is not an environment spec: {error}") from error
    try:
        labels = checked(member({"labels": {}, **record}, "labels", dict))
    except RefusalError as error:
        raise WorkloadError(str(error)) from error
    return task, spec, RecordedRollout(rollout, tuple(map(request_of, calls, count())), labels)


def _gather(parsed: Iterable[tuple[str, EnvironmentSpec, RecordedRollout]]) -> Workload:
    """Group rollouts by task. A rollout whose name is taken in its task becomes `name#2`, `name#3` and so on."""
    specs: dict[str, EnvironmentSpec] = {}
    rollouts: dict[str, dict[str, RecordedRollout]] = {}
    for task, spec, rollout in parsed:
        if specs.setdefault(task, spec) != spec:
            raise WorkloadError(
                f"task {task!r}: its rollouts have different environments. Rollouts of a task start in the same state: "
                "give them the same `spec`, or give the tasks different names."
            )
        siblings = rollouts.setdefault(task, {})
        name, number = rollout.name, 1
        while name in siblings:
            number += 1
            name = f"{rollout.name}#{number}"
        siblings[name] = replace(rollout, name=name)
    return Workload(tuple(RecordedTask(name, specs[name], tuple(rollouts[name].values())) for name in specs))


def request_of(call: Any, index: int) -> WorkloadRequest:
    """Return the request that makes a recorded call again. Raises WorkloadError if the call is none."""
    if isinstance(call, dict) and "request" in call:
        return _http_request(member(call, "request", dict), index)
    tool, args = member(call, "tool", str), member(call, "args", dict)
    if tool in _TOOLS:
        path, needed = _TOOLS[tool]
        return WorkloadRequest(index, path, args, member(args, needed, str))
    endpoint, _, rest = tool.partition("/")
    if endpoint not in _ENDPOINTS or not rest:
        raise WorkloadError(
            f"call {index} uses the tool {tool!r}, which a replay does not know. It knows {', '.join(_TOOLS)}, "
            f"{', '.join(f'{name}/TOOL' for name in _ENDPOINTS)}, and calls with a `request`."
        )
    return WorkloadRequest(index, tool, args, f"{tool} {orjson.dumps(args).decode()}")


def _http_request(request: Mapping[str, Any], index: int) -> WorkloadRequest:
    """Return a request to a tool server: `{"method"?, "path": "SERVER/…", "json"?, "headers"?}`."""
    path, method = member(request, "path", str).lstrip("/"), request.get("method", "POST")
    headers = request.get("headers", {})
    texts = isinstance(headers, dict) and all(isinstance(value, str) for value in headers.values())
    if not isinstance(method, str) or not texts:
        raise WorkloadError(f"call {index}: `method` must be a string, and `headers` an object of strings.")
    return WorkloadRequest(index, path, request.get("json"), f"{method} {path}", method, headers)


def member(record: Any, name: str, kind: type[Any]) -> Any:
    """Return a member of a JSON object. Raises WorkloadError if it is missing or of another kind."""
    value = record.get(name) if isinstance(record, dict) else None
    if not isinstance(value, kind):
        raise WorkloadError(f"`{name}` is required and must be a JSON {_JSON_KINDS[kind]}.")
    return value


def safe_name(name: str, suffix: str = "") -> str:
    """Return a name that the proxy accepts in paths; a changed one ends in a digest, so names stay different."""
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", name).lstrip("._-")
    if not safe or safe != name or len(safe) > _NAME_LENGTH:
        digest = hashlib.blake2b(name.encode(), digest_size=4).hexdigest()
        safe = f"{safe[: _NAME_LENGTH - 9]}-{digest}".lstrip("-")
    return safe + suffix
