"""Recorded workloads, read as the requests that the shell endpoint takes.

Two formats, one JSON object a line and one line a rollout:

- our own: `{"task", "rollout", "calls": [{"tool": "shell", "args": {"command": ...}}], "spec"?: {...}}`
- InterCode's recorded runs: the same with `fixture` (a tarball, relative to the file) in place of `spec`, and in each
  call the `argv` that its container started.
"""

import hashlib
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import orjson
from pydantic import ValidationError

from sandboxes.spec import Archive, EnvironmentSpec, Limits

CONTAINER_ENV = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
}
SAFE_NAME_LENGTH = 100


class WorkloadError(ValueError):
    """A workload cannot be read or has no endpoint here; the message names the file and the line."""


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """One call as it goes out: POST `path` below the rollout, with `arguments` as its JSON body.

    index: its place in the recorded rollout, from 0, skipped calls counted.
    shown: the call as the agent wrote it.
    """

    index: int
    path: str
    arguments: Mapping[str, Any]
    shown: str


@dataclass(frozen=True, slots=True)
class RecordedRollout:
    """One recorded run. skipped: calls that never reached a tool, because they could not be parsed."""

    name: str
    requests: tuple[WorkloadRequest, ...]
    skipped: int = 0


@dataclass(frozen=True, slots=True)
class RecordedTask:
    name: str
    spec: EnvironmentSpec
    rollouts: tuple[RecordedRollout, ...]


@dataclass(frozen=True, slots=True)
class Workload:
    """Tasks in file order, and in each its rollouts in file order."""

    tasks: tuple[RecordedTask, ...]

    @property
    def rollouts(self) -> int:
        return sum(len(task.rollouts) for task in self.tasks)

    @property
    def calls(self) -> int:
        return sum(len(rollout.requests) for task in self.tasks for rollout in task.rollouts)

    @property
    def skipped(self) -> int:
        return sum(rollout.skipped for task in self.tasks for rollout in task.rollouts)

    def select(self, *, task: str | None = None, limit: int | None = None) -> "Workload":
        """Return the tasks whose name matches the shell pattern task, and of their rollouts the first limit."""
        left = self.rollouts if limit is None else limit
        chosen: list[RecordedTask] = []
        for candidate in self.tasks:
            if task is not None and not fnmatchcase(candidate.name, task):
                continue
            rollouts = candidate.rollouts[:left]
            left -= len(rollouts)
            if rollouts:
                chosen.append(replace(candidate, rollouts=rollouts))
        return Workload(tuple(chosen))


def read_workload(files: Sequence[Path]) -> Workload:
    """Read files into one workload. Rollouts of one task meet, whichever file they stand in.

    Raises:
        WorkloadError: a file is not there, a line cannot be read, or a call has no endpoint here.
    """
    found: list[tuple[str, EnvironmentSpec, RecordedRollout]] = []
    for file in files:
        try:
            lines = file.read_bytes().splitlines()
        except OSError as error:
            raise WorkloadError(f"{file}: cannot be read: {error.strerror}. Name a JSONL file.") from error
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                found.append(parse_rollout(line, folder=file.resolve().parent))
            except WorkloadError as error:
                raise WorkloadError(f"{file}, line {number}: {error}") from error
    return gather(found)


def gather(found: Iterable[tuple[str, EnvironmentSpec, RecordedRollout]]) -> Workload:
    """Put rollouts under their tasks. A rollout name that comes again in its task gets `#2`, `#3` and so on.

    Raises:
        WorkloadError: two rollouts of one task name different environment specs.
    """
    specs: dict[str, EnvironmentSpec] = {}
    rollouts: dict[str, dict[str, RecordedRollout]] = {}
    for task, spec, rollout in found:
        if specs.setdefault(task, spec) != spec:
            raise WorkloadError(
                f"task {task!r}: its rollouts name different environment specs. All rollouts of a task start from one "
                "state: give the task one spec, or two tasks two names."
            )
        siblings = rollouts.setdefault(task, {})
        name, again = rollout.name, 1
        while name in siblings:
            again += 1
            name = f"{rollout.name}#{again}"
        siblings[name] = replace(rollout, name=name)
    return Workload(tuple(RecordedTask(name, specs[name], tuple(rollouts[name].values())) for name in specs))


def parse_rollout(line: bytes | str, *, folder: Path) -> tuple[str, EnvironmentSpec, RecordedRollout]:
    """Read one line: the task's name, its environment spec, and the rollout. Fixtures are relative to folder.

    Raises:
        WorkloadError: the line is not such an object, or one of its calls has no endpoint here.
    """
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise WorkloadError(f"not JSON: {error}. A workload has one JSON object a line.") from error
    task, rollout, calls = (_member(record, name, kind) for name, kind in _MEMBERS.items())
    requests = [request_of(call, index) for index, call in enumerate(calls)]
    kept = tuple(request for request in requests if request is not None)
    return task, _spec_of(record, folder), RecordedRollout(rollout, kept, skipped=len(requests) - len(kept))


def request_of(call: Any, index: int) -> WorkloadRequest | None:
    """Return the request that makes call, None if the agent's call never reached a tool.

    Raises:
        WorkloadError: call is not an object with `tool` and `args`, or no endpoint here takes its tool.
    """
    tool, args = _member(call, "tool", str), _member(call, "args", dict)
    to_request = ENDPOINTS.get(tool)
    if to_request is None:
        missing = "the sql endpoint" if tool == "sql" else f"an endpoint for the tool {tool!r}"
        raise WorkloadError(
            f"call {index} needs {missing}, which this version does not have: it replays calls of "
            f"{' and '.join(sorted(ENDPOINTS))}. Leave this file out, or keep only its shell rollouts."
        )
    return to_request(call, args, index)


def _shell_request(call: Mapping[str, Any], args: Mapping[str, Any], index: int) -> WorkloadRequest | None:
    command = _member(args, "command", str)
    if "argv" not in call:
        return WorkloadRequest(index, "shell/exec", args, command)
    if call["argv"] is None:
        return None
    argv = _member(call, "argv", list)
    if not argv or not all(isinstance(word, str) for word in argv):
        raise WorkloadError(f"call {index}: `argv` must be a list of words, or null for a call that was not parsed.")
    moves = command.startswith("cd") and argv[1:2] == ["-c"] and len(argv) > 2
    as_run = _moving(argv) if moves else shlex.join(argv)
    return WorkloadRequest(index, "shell/exec", {"command": as_run}, command)


def _moving(argv: Sequence[str]) -> str:
    """Return a command that runs argv as a process, and on success moves the session to where that process ended.

    Output and exit code are argv's own. The process says where it ended on descriptor 3, at its exit: running the
    command a second time in the session would run its other half twice, and a path read from its text is wrong as
    soon as the path is computed. The variable is gone afterwards, so a failed `cd` changes nothing.
    """
    shell, option, script, *rest = argv
    reporting = shlex.join([shell, option, f'trap "pwd >&3" EXIT; {script}', *rest])
    return (
        "{ forkpoint_cwd=$(" + reporting + ' 3>&1 >&4 4>&-); } 4>&1 && cd -- "$forkpoint_cwd"; '
        'eval "unset forkpoint_cwd; (exit $?)"'
    )


ENDPOINTS: Mapping[str, Callable[[Mapping[str, Any], Mapping[str, Any], int], WorkloadRequest | None]] = {
    "bash": _shell_request,
    "shell": _shell_request,
}
"""The tools of a recorded call that can be replayed, each with what makes its request. A new endpoint adds its line."""


def _spec_of(record: Mapping[str, Any], folder: Path) -> EnvironmentSpec:
    if "fixture" not in record:
        try:
            return EnvironmentSpec.model_validate(record.get("spec", {}))
        except ValidationError as error:
            raise WorkloadError(f"`spec` is not an environment spec: {error}") from error
    fixture = (folder / _member(record, "fixture", str)).resolve()
    if not fixture.exists():
        raise WorkloadError(f"the fixture {fixture} is not there. Keep the fixtures beside the workload.")
    return EnvironmentSpec(
        archives=(Archive(source=str(fixture)),),
        env=CONTAINER_ENV,
        workdir="/",
        limits=Limits(timeout_s=10.0),
    )


_MEMBERS: Mapping[str, type[Any]] = {"task": str, "rollout": str, "calls": list}


def _member(record: Any, name: str, kind: type[Any]) -> Any:
    value = record.get(name) if isinstance(record, dict) else None
    if not isinstance(value, kind):
        raise WorkloadError(f"`{name}` must be there and be a JSON {_JSON_KINDS[kind]}.")
    return value


_JSON_KINDS: Mapping[type[Any], str] = {str: "string", list: "list", dict: "object"}


def safe_name(name: str, suffix: str = "") -> str:
    """Return a name that the proxy's paths take: `[A-Za-z0-9][A-Za-z0-9._-]*`, at most 100 characters and suffix.

    Different names stay different: one that had to be changed carries a digest of what it was.
    """
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", name).lstrip("._-")
    if not safe or safe != name or len(safe) > SAFE_NAME_LENGTH:
        digest = hashlib.blake2b(name.encode(), digest_size=4).hexdigest()
        safe = f"{safe[: SAFE_NAME_LENGTH - 9]}-{digest}".lstrip("-")
    return safe + suffix
