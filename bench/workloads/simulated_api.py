"""Recorded calls of APIs that are not there: a small simulator answers them from the recording.

Theory of operation:

1. A recorded call names the fingerprints of the API's state before and after it. The recordings of all rollouts of a
   task make a table: state and call lead to an output and the next state.
2. The table is an archive of files, and the simulator a shell script beside them. The task's sandboxes unpack both, so
   the state is a file: Forkpoint observes which calls change it, as it does for any program.
3. The first recording of a state and a call counts. A rollout whose call was recorded at another state gets exit
   code 127.
"""

import io
import shlex
import tarfile
from collections import defaultdict
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from proxy.cli.replay.workload import member

FOLDER = "opt/recorded-api"
"""Where a sandbox has the simulator."""
_SCRIPT = b"""#!/bin/sh
cd "$(dirname "$0")" || exit 126
answer=answers/$(cat state)-$(printf %s "$1" | sha256sum | cut -c1-32)
[ -e "$answer" ] || { echo "this call was not recorded at this state" >&2; exit 127; }
cat "$answer"
[ ! -e "$answer.next" ] || cat "$answer.next" >state
"""
"""Only changed states are written, so a call that reads changes nothing."""
_NEEDED = ("recorded_output", "state_before", "state_after")


class _Answer(NamedTuple):
    output: str
    state: str


class Recording:
    """The tables of all tasks whose calls are simulated.

    Attributes:
        tasks: For each task, its first state, and the answers by state and call.
    """

    def __init__(self) -> None:
        self.tasks: dict[str, dict[tuple[str, str], _Answer]] = defaultdict(dict)
        self._first: dict[str, str] = {}

    def add(self, record: dict[str, Any]) -> None:
        """Add the calls of a rollout, if all of them are recorded with states."""
        calls = member(record, "calls", list)
        known = [call for call in calls if "argv" not in call and all(call.get(name) is not None for name in _NEEDED)]
        if not known or len(known) < len(calls):
            return
        for call in known:
            answer = _Answer(str(call["recorded_output"]), str(call["state_after"]))
            self.tasks[record["task"]].setdefault((str(call["state_before"]), text_of(call)), answer)
        self._first.setdefault(record["task"], str(known[0]["state_before"]))

    def write(self, task: str, path: Path) -> Path:
        """Write the archive of a task's simulator, and return its path."""
        files = {f"{FOLDER}/state": _digest(self._first[task]).encode(), f"{FOLDER}/call": _SCRIPT}
        for (state, text), answer in self.tasks[task].items():
            # States are names of files here, so they are digested like calls.
            name = f"{FOLDER}/answers/{_digest(state)}-{_digest(text)}"
            files[name] = answer.output.encode()
            if answer.state != state:
                files[f"{name}.next"] = _digest(answer.state).encode()
        with tarfile.open(path, "w") as archive:
            for name, data in sorted(files.items()):
                entry = tarfile.TarInfo(name)
                entry.size, entry.mode = len(data), 0o755 if data is _SCRIPT else 0o644
                archive.addfile(entry, io.BytesIO(data))
        return path


def command_of(call: Any) -> str:
    """Return the command that stands for a call whose tool is simulated."""
    return f"/{FOLDER}/call {shlex.quote(text_of(call))}"


def text_of(call: Any) -> str:
    """Return a call as one text: the tool and its arguments, the same for the same call.

    Raises:
        WorkloadError: The call has no tool or arguments.
    """
    args = orjson.dumps(member(call, "args", dict), option=orjson.OPT_SORT_KEYS).decode()
    return f"{member(call, 'tool', str)} {args}"


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:32]
