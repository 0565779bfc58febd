"""Tasks in the shape of public sets, as directories, for `bench.public_tasks`.

task.toml                   `[metadata] needs`: programs that this machine must have; `[environment]`: as Harbor's
instruction.md              what the agent is asked to do
environment/forkpoint.json  the spec; else `docker_image` of task.toml, else `environment/Dockerfile`
solution/solve.sh           the oracle's solution: each paragraph is a call
tests/test.sh               exits with 0 if the task is solved; its last line is the verdict
"""

import glob
import re
import shutil
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forkpoint.compose_errors import ComposeFileError
from forkpoint.task_environment import environment_of

LOOKS = ("pwd; ls", "id -u; umask")
"""The calls of an agent that looks around first."""


@dataclass(frozen=True)
class TaskFolder:
    """A task.

    Attributes:
        name: Name of its directory.
        spec: Its environment; empty if `skipped` says something.
        calls: The agent's calls, without those of the tests.
        test: The script that decides.
        workdir: Where the calls begin.
        skipped: Why it cannot run here; empty if it can.
    """

    name: str
    spec: dict[str, Any]
    calls: tuple[str, ...]
    test: str
    workdir: str
    skipped: str = ""

    @property
    def on_host(self) -> bool:
        """Whether its files are those of this machine's own system."""
        return "image" not in self.spec


def read_tasks(folder: Path, names: list[str]) -> list[TaskFolder]:
    """Return the tasks of a directory, those of some names if there are any. Builds the images that are missing."""
    folders = sorted(path.parent for path in folder.glob("*/task.toml"))
    return [_read(path) for path in folders if not names or path.name in names]


def _read(folder: Path) -> TaskFolder:
    config = tomllib.loads((folder / "task.toml").read_text())
    environment = config.get("environment") or {}
    missing = [name for name in (config.get("metadata") or {}).get("needs", ()) if not _is_here(name)]
    spec, skipped = dict[str, Any](), f"{missing[0].lstrip('@')} is not installed" if missing else ""
    if not skipped:
        try:
            spec = environment_of(folder / "environment", environment)
        except ComposeFileError as error:
            skipped = str(error).splitlines()[0]
    script = (folder / "solution" / "solve.sh").read_text()
    test = (folder / "tests" / "test.sh").read_text()
    workdir = str(environment.get("workdir") or spec.get("workdir") or "/")
    return TaskFolder(folder.name, spec, (*LOOKS, *_paragraphs(script)), test, workdir, skipped)


def _is_here(program: str) -> bool:
    if program.startswith("@"):
        return bool(glob.glob(f"/usr/lib/{program[1:]}ql/*/bin"))  # noqa: PTH207 - a pattern from the root
    # What a sandbox finds: this machine's own directories, without those of a user.
    return shutil.which(program, path="/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin") is not None


def _paragraphs(script: str) -> list[str]:
    """Return the paragraphs of a script, each as a call; here-documents stay whole."""
    calls, lines, ends = list[str](), list[str](), ""
    for line in script.splitlines():
        if line.startswith("#!"):
            continue
        if not line.strip() and not ends:
            calls += ["\n".join(lines)] if lines else []
            lines = []
            continue
        lines.append(line)
        begins = re.search(r"<<-?\s*['\"]?(\w+)", line)
        ends = "" if ends and line.strip() == ends else ends or (begins[1] if begins else "")
    return calls + (["\n".join(lines)] if lines else [])
