"""Recorded workloads, read as requests to the shell endpoint.

A file has one JSON object per line, and each line is one rollout. There are two formats:

- Forkpoint's: `{"task", "rollout", "calls": [{"tool": "shell", "args": {"command": ...}}], "spec"?: {...}}`
- InterCode's: `fixture` (path of a tarball, relative to the file) replaces `spec`, and each call has the `argv` of the
  process that its container started.
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
"""Longest name without its suffix, in characters: the proxy's paths take 128."""


class WorkloadError(ValueError):
    """A workload cannot be read, or it uses an unknown tool. The text names the file and the line."""


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """The request of one recorded call.

    Attributes:
        index: Position of the call in the rollout, from 0; skipped calls count.
        path: Path below the rollout's URL, for POST.
        arguments: The JSON body.
        shown: The call as the agent wrote it.
    """

    index: int
    path: str
    arguments: Mapping[str, Any]
    shown: str


@dataclass(frozen=True, slots=True)
class RecordedRollout:
    """A recorded rollout.

    Attributes:
        name: Name of the rollout.
        requests: Its calls in order.
        skipped: Number of calls that never reached a tool, because they could not be parsed.
    """

    name: str
    requests: tuple[WorkloadRequest, ...]
    skipped: int = 0


@dataclass(frozen=True, slots=True)
class RecordedTask:
    """A task with its recorded rollouts.

    Attributes:
        name: Name of the task.
        spec: Its environment.
        rollouts: Its rollouts in file order.
    """

    name: str
    spec: EnvironmentSpec
    rollouts: tuple[RecordedRollout, ...]


@dataclass(frozen=True, slots=True)
class Workload:
    """The tasks of a workload, in file order."""

    tasks: tuple[RecordedTask, ...]

    @property
    def rollouts(self) -> int:
        """Number of rollouts."""
        return sum(len(task.rollouts) for task in self.tasks)

    @property
    def calls(self) -> int:
        """Number of calls that can be replayed."""
        return sum(len(rollout.requests) for task in self.tasks for rollout in task.rollouts)

    @property
    def skipped(self) -> int:
        """Number of calls that never reached a tool."""
        return sum(rollout.skipped for task in self.tasks for rollout in task.rollouts)

    def select(self, *, task: str | None = None, limit: int | None = None) -> "Workload":
        """Return a part of the workload.

        Args:
            task: Shell pattern that the names of tasks must match; None for all tasks.
            limit: Maximum number of rollouts; None for all of them.
        """
        remaining = self.rollouts if limit is None else limit
        chosen: list[RecordedTask] = []
        for candidate in self.tasks:
            if task is not None and not fnmatchcase(candidate.name, task):
                continue
            rollouts = candidate.rollouts[:remaining]
            remaining -= len(rollouts)
            if rollouts:
                chosen.append(replace(candidate, rollouts=rollouts))
        return Workload(tuple(chosen))


def read_workload(files: Sequence[Path]) -> Workload:
    """Read files into one workload. A task may have rollouts in several files.

    Raises:
        WorkloadError: A file or a line cannot be read, or a call uses an unknown tool.
    """
    parsed: list[tuple[str, EnvironmentSpec, RecordedRollout]] = []
    for file in files:
        try:
            lines = file.read_bytes().splitlines()
        except OSError as error:
            raise WorkloadError(f"{file}: cannot be read: {error.strerror}. Choose a JSONL file.") from error
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                parsed.append(parse_rollout(line, folder=file.resolve().parent))
            except WorkloadError as error:
                raise WorkloadError(f"{file}, line {number}: {error}") from error
    return gather(parsed)


def gather(parsed: Iterable[tuple[str, EnvironmentSpec, RecordedRollout]]) -> Workload:
    """Group rollouts by task. A rollout whose name is taken in its task becomes `name#2`, `name#3` and so on.

    Raises:
        WorkloadError: Rollouts of the same task have different environments.
    """
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


def parse_rollout(line: bytes | str, *, folder: Path) -> tuple[str, EnvironmentSpec, RecordedRollout]:
    """Return the task's name, its environment and the rollout in a line.

    Args:
        line: The line.
        folder: Folder that paths of fixtures are relative to.

    Raises:
        WorkloadError: The line is malformed, or a call uses an unknown tool.
    """
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise WorkloadError(f"not JSON: {error}. A workload has one JSON object per line.") from error
    task, rollout, calls = (_member(record, name, kind) for name, kind in _MEMBERS.items())
    requests = [request_of(call, index) for index, call in enumerate(calls)]
    kept = tuple(request for request in requests if request is not None)
    return task, _spec_of(record, folder), RecordedRollout(rollout, kept, skipped=len(requests) - len(kept))


def request_of(call: Any, index: int) -> WorkloadRequest | None:
    """Return the request of a recorded call; None if the call never reached a tool.

    Raises:
        WorkloadError: The call has no `tool` or `args`, or its tool is unknown.
    """
    tool, args = _member(call, "tool", str), _member(call, "args", dict)
    to_request = ENDPOINTS.get(tool)
    if to_request is None:
        missing = "the sql endpoint" if tool == "sql" else f"an endpoint for the tool {tool!r}"
        raise WorkloadError(
            f"call {index} needs {missing}, which a replay does not support. Supported tools: "
            f"{', '.join(sorted(ENDPOINTS))}. Remove the file, or keep only its shell rollouts."
        )
    return to_request(call, args, index)


def _shell_request(call: Mapping[str, Any], args: Mapping[str, Any], index: int) -> WorkloadRequest | None:
    command = _member(args, "command", str)
    if "argv" not in call:
        return WorkloadRequest(index, "shell/exec", args, command)
    if call["argv"] is None:
        return None
    argv = _member(call, "argv", list)
    if not argv or not all(isinstance(argument, str) for argument in argv):
        raise WorkloadError(
            f"call {index}: `argv` must be a list of strings, or null for a call that could not be parsed."
        )
    moves = command.startswith("cd") and argv[1:2] == ["-c"] and len(argv) > 2
    as_run = _moving(argv) if moves else shlex.join(argv)
    return WorkloadRequest(index, "shell/exec", {"command": as_run}, command)


def _moving(argv: Sequence[str]) -> str:
    """Return a command that runs a process, and on success moves the session to the process's last directory.

    The recording ran each command in a new process, and its container then moved to where a `cd` had led. Output and
    exit code are those of the process, which reports its directory on descriptor 3 when it exits. Running the command
    in the session too would repeat its other effects. Reading the path from the text would fail for computed paths. The
    variable is unset afterwards, so a failed `cd` changes nothing.
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
"""Makes the request of a recorded call, by its tool."""


def _spec_of(record: Mapping[str, Any], folder: Path) -> EnvironmentSpec:
    if "fixture" not in record:
        try:
            return EnvironmentSpec.model_validate(record.get("spec", {}))
        except ValidationError as error:
            raise WorkloadError(f"`spec` is not an environment spec: {error}") from error
    fixture = (folder / _member(record, "fixture", str)).resolve()
    if not fixture.exists():
        raise WorkloadError(f"the fixture {fixture} does not exist. Put the fixtures next to the workload.")
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
        raise WorkloadError(f"`{name}` is required and must be a JSON {_JSON_KINDS[kind]}.")
    return value


_JSON_KINDS: Mapping[type[Any], str] = {str: "string", list: "list", dict: "object"}


def safe_name(name: str, suffix: str = "") -> str:
    """Return a name that the proxy accepts in paths: `[A-Za-z0-9][A-Za-z0-9._-]*`, 100 characters and the suffix.

    Different names stay different: a changed name ends in a digest of the original.
    """
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", name).lstrip("._-")
    if not safe or safe != name or len(safe) > SAFE_NAME_LENGTH:
        digest = hashlib.blake2b(name.encode(), digest_size=4).hexdigest()
        safe = f"{safe[: SAFE_NAME_LENGTH - 9]}-{digest}".lstrip("-")
    return safe + suffix
