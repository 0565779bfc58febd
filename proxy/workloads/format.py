"""Recorded workloads, read as requests to the endpoints of tasks.

A file has one JSON object per line, and each line is one rollout. There are three formats:

- Forkpoint's: `{"task", "rollout", "calls": [{"tool": "shell", "args": {"command": ...}}], "spec"?: {...}}`
- InterCode's: `fixture` (path of a tarball) or `db` (path of a SQLite database), relative to the file, replaces
  `spec`. Calls of a shell have the `argv` of the process that their container started.
- Calls of any tools with the fingerprints `state_before` and `state_after`: `simulated_api` answers them from the
  recording.
"""

import hashlib
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import orjson
from pydantic import ValidationError

from proxy.workloads.requests import WorkloadError, WorkloadRequest, member, request_of
from proxy.workloads.simulated_api import Recording, simulated_request
from sandboxes.spec import Archive, EnvironmentSpec, Limits

CONTAINER_ENV = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
}
SAFE_NAME_LENGTH = 100
"""Longest name without its suffix, in characters: the proxy's paths take 128."""


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


def read_workload(files: Sequence[Path], scratch: Path | None = None) -> Workload:
    """Read files into one workload. A task may have rollouts in several files.

    Args:
        files: The files.
        scratch: Folder for the archives of simulated APIs, which the proxy reads later; None refuses such calls.

    Raises:
        WorkloadError: A file or a line cannot be read, or a call uses an unknown tool.
    """
    lines = [(file, number, line) for file in files for number, line in _numbered(file)]
    recording = Recording()
    if scratch is not None:
        # The recording of a task is known when all of its rollouts have been read.
        for _, _, line in lines:
            recording.add(line)
    parsed: list[tuple[str, EnvironmentSpec, RecordedRollout]] = []
    archives: dict[str, Path] = {}
    for file, number, line in lines:
        try:
            task, spec, rollout = parse_rollout(line, folder=file.resolve().parent, simulated=recording.tasks)
        except WorkloadError as error:
            raise WorkloadError(f"{file}, line {number}: {error}") from error
        if scratch is not None and task in recording.tasks:
            archive = archives.get(task) or recording.write(task, scratch / f"{len(archives)}.tar")
            archives[task] = archive
            spec = EnvironmentSpec(archives=(Archive(source=str(archive)),))
        parsed.append((task, spec, rollout))
    return gather(parsed)


def _numbered(file: Path) -> list[tuple[int, bytes]]:
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise WorkloadError(f"{file}: cannot be read: {error.strerror}. Choose a JSONL file.") from error
    return [(number, line) for number, line in enumerate(lines, 1) if line.strip()]


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


def parse_rollout(
    line: bytes | str, *, folder: Path, simulated: Container[str] = ()
) -> tuple[str, EnvironmentSpec, RecordedRollout]:
    """Return the task's name, its environment and the rollout in a line.

    Args:
        line: The line.
        folder: Folder that paths of fixtures are relative to.
        simulated: Names of the tasks whose tools are simulated.

    Raises:
        WorkloadError: The line is malformed, or a call uses an unknown tool.
    """
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise WorkloadError(f"not JSON: {error}. A workload has one JSON object per line.") from error
    task, rollout, calls = (member(record, name, kind) for name, kind in _MEMBERS.items())
    read = simulated_request if task in simulated else request_of
    requests = [read(call, index) for index, call in enumerate(calls)]
    kept = tuple(request for request in requests if request is not None)
    return task, _spec_of(record, folder), RecordedRollout(rollout, kept, skipped=len(requests) - len(kept))


def _spec_of(record: Mapping[str, Any], folder: Path) -> EnvironmentSpec:
    if "db" in record:
        database = {"source": str(_beside(folder, record, "db"))}
        return EnvironmentSpec.model_validate({"driver": "sqlite", "databases": {"main": database}})
    if "fixture" not in record:
        try:
            return EnvironmentSpec.model_validate(record.get("spec", {}))
        except ValidationError as error:
            raise WorkloadError(f"`spec` is not an environment spec: {error}") from error
    return EnvironmentSpec(
        archives=(Archive(source=str(_beside(folder, record, "fixture"))),),
        env=CONTAINER_ENV,
        workdir="/",
        limits=Limits(timeout_s=10.0),
    )


def _beside(folder: Path, record: Mapping[str, Any], name: str) -> Path:
    path: Path = (folder / member(record, name, str)).resolve()
    if not path.exists():
        raise WorkloadError(f"the {name} {path} does not exist. Put the fixtures next to the workload.")
    return path


_MEMBERS: Mapping[str, type[Any]] = {"task": str, "rollout": str, "calls": list}


def safe_name(name: str, suffix: str = "") -> str:
    """Return a name that the proxy accepts in paths: `[A-Za-z0-9][A-Za-z0-9._-]*`, 100 characters and the suffix.

    Different names stay different: a changed name ends in a digest of the original.
    """
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", name).lstrip("._-")
    if not safe or safe != name or len(safe) > SAFE_NAME_LENGTH:
        digest = hashlib.blake2b(name.encode(), digest_size=4).hexdigest()
        safe = f"{safe[: SAFE_NAME_LENGTH - 9]}-{digest}".lstrip("-")
    return safe + suffix
