"""Calls of an API that is not there are answered from their recording, at the state that they were recorded at."""

import json
import shlex
import subprocess
import tarfile
from pathlib import Path
from typing import Any

from bench.workloads.recordings import convert
from bench.workloads.simulated_api import FOLDER
from proxy.cli.replay.workload import RecordedTask, read_workload


def recorded(tool: str, before: str, after: str, output: str, **args: Any) -> dict[str, Any]:
    return {"tool": tool, "args": args, "state_before": before, "state_after": after, "recorded_output": output}


def converted(folder: Path, *rollouts: list[dict[str, Any]]) -> RecordedTask:
    rows = [json.dumps({"task": "t", "rollout": f"r{n}", "calls": calls}) for n, calls in enumerate(rollouts)]
    (folder / "w.jsonl").write_text("\n".join(rows))
    (task,) = read_workload([convert([folder / "w.jsonl"], folder)[0]]).tasks
    return task


READ, BOOK = recorded("get", "s/0", "s/0", "free\n", id=1), recorded("book", "s/0", "s/1", "it's booked", id=1)
AFTER = recorded("get", "s/1", "s/1", "taken", id=1)
OTHER = recorded("get", "s/0", "s/0", "another recording of the same call", id=1)


def test_answers_follow_the_recorded_states(tmp_path: Path) -> None:
    task = converted(tmp_path, [READ, BOOK, AFTER], [OTHER, AFTER])
    with tarfile.open(task.spec.archives[0].source) as archive:
        archive.extractall(tmp_path / "root", filter="data")

    def run(command: str) -> tuple[str, int]:
        words = shlex.split(command)
        assert words[0] == f"/{FOLDER}/call"
        done = subprocess.run([f"{tmp_path}/root{words[0]}", words[1]], capture_output=True, text=True, check=False)
        return done.stdout, done.returncode

    first, second = ([request.arguments["command"] for request in rollout.requests] for rollout in task.rollouts)
    assert run(second[0]) == ("free\n", 0)
    assert [run(command) for command in first] == [("free\n", 0), ("it's booked", 0), ("taken", 0)]
    assert run(first[1])[1] == 127, "booked already: this was never recorded"


def test_calls_without_states_are_not_simulated(tmp_path: Path) -> None:
    call = {**READ, "tool": "shell", "args": {"command": "ls"}, "argv": ["ls"]}
    task = converted(tmp_path, [call])
    assert task.rollouts[0].requests[0].arguments == {"command": "ls"}
    assert task.spec.archives == ()
