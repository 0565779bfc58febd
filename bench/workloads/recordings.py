"""Recordings of other projects as a workload: `python -m bench.workloads.recordings FILE... --out FOLDER`.

Writes `workload.jsonl`, which `forkpoint replay` reads, and the archives that it names. Two formats are read:

- InterCode's: `fixture` (path of a tarball) or `db` (path of a SQLite database), relative to the file, replaces
  `spec`. Calls of a shell have the `argv` of the process that their container started, or null if the agent's text
  could not be parsed: these are skipped and counted. Calls of SQL have a `query`, and a `sqlite_query` where SQLite
  needs another one.
- Calls of any tools with their `recorded_output` and the fingerprints `state_before` and `state_after`:
  `simulated_api` answers them from the recording.

Everything else is kept as it is.
"""

import shlex
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from bench.workloads.simulated_api import Recording, command_of
from proxy.cli.replay.workload import WorkloadError, member

CONTAINER = {
    "env": {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": "/root",
        "LANG": "C.UTF-8",
        "TERM": "dumb",
    },
    "workdir": "/",
    "limits": {"timeout_s": 10.0},
}
"""The spec of a recording with a fixture, beside its archive."""


def convert(files: Sequence[Path], folder: Path) -> tuple[Path, int]:
    """Write a workload and its archives to a folder; return its path, and how many calls were skipped."""
    records = [(file, orjson.loads(line)) for file in files for line in file.read_bytes().splitlines() if line.strip()]
    recording = Recording()
    # The recording of a task is known when all of its rollouts have been read.
    for _, record in records:
        recording.add(record)
    archives = {
        task: str(recording.write(task, folder.resolve() / f"{number}.tar"))
        for number, task in enumerate(recording.tasks)
    }
    skipped, lines = 0, []
    for file, record in records:
        task, calls = member(record, "task", str), member(record, "calls", list)
        if task in archives:
            spec: Any = {"archives": [{"source": archives[task]}]}
            kept = [{"tool": "shell", "args": {"command": command_of(call)}} for call in calls]
        else:
            spec = spec_of(record, file.resolve().parent)
            kept = [call for call in map(plain_call, calls) if call is not None]
        skipped += len(calls) - len(kept)
        lines.append(orjson.dumps({"task": task, "rollout": record["rollout"], "calls": kept, "spec": spec}))
    path = folder / "workload.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path, skipped


def spec_of(record: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the environment of a rollout; its files are relative to the folder."""
    if "db" in record:
        return {"driver": "sqlite", "databases": {"main": {"source": _beside(folder, record, "db")}}}
    if "fixture" in record:
        return {"archives": [{"source": _beside(folder, record, "fixture")}], **CONTAINER}
    spec: dict[str, Any] = record.get("spec", {})
    return spec


def plain_call(call: Any) -> Any:
    """Return a call as a replay reads it; None if it never reached a tool."""
    args = call.get("args") if isinstance(call, dict) else None
    if isinstance(args, dict) and call.get("tool") == "sql" and "sql" not in args:
        return {"tool": "sql", "args": {"sql": call.get("sqlite_query") or member(args, "query", str)}}
    if not isinstance(args, dict) or "argv" not in call:
        return call
    argv, command = call["argv"], member(args, "command", str)
    if argv is None:
        return None
    moves = command.startswith("cd") and argv[1:2] == ["-c"] and len(argv) > 2
    return {"tool": "shell", "args": {"command": _moving(argv) if moves else shlex.join(argv)}}


def _beside(folder: Path, record: dict[str, Any], name: str) -> str:
    path = (folder / member(record, name, str)).resolve()
    if not path.exists():
        raise WorkloadError(f"the {name} {path} does not exist. Put the fixtures next to the workload.")
    return str(path)


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


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", type=Path, nargs="+", help="JSONL files next to their fixtures")
    parser.add_argument("--out", type=Path, required=True, help="folder for the workload and its archives")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    path, skipped = convert(options.files, options.out)
    print(f"{path}: {skipped} calls were skipped, because they never reached a tool")


if __name__ == "__main__":
    main()
