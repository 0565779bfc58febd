"""Requests are offered to a stand-in for the proxy at a fixed rate."""

import asyncio
import json
from pathlib import Path

from bench.workloads.open_loop import measure
from proxy.cli.replay.workload import Workload, read_workload
from tests.proxy.stub import stub_proxy


def a_workload(folder: Path, *commands: str) -> Workload:
    calls = [{"tool": "shell", "args": {"command": command}} for command in commands]
    file = folder / "workload.jsonl"
    file.write_text("".join(json.dumps({"task": "t", "rollout": name, "calls": calls}) + "\n" for name in "ab"))
    return read_workload([file])


def test_rates_are_offered_after_the_cached_run(tmp_path: Path) -> None:
    """Each offered rate makes all of its requests, with rollouts of their own that are finished."""
    with stub_proxy() as stub:
        rates = asyncio.run(measure(stub.url, a_workload(tmp_path, "ls", "pwd"), [40, 80], 0.5))
    assert [(rate.offered, rate.errors, rate.hit_rate) for rate in rates] == [(40, 0, 1), (80, 0, 1)]
    begun = [commands for (_, rollout), commands in stub.trajectories.items() if "-40-" in rollout or "-80-" in rollout]
    assert sum(map(len, begun)) == 20 + 40
    assert {tuple(commands) for commands in begun} <= {("ls", "pwd"), ("ls",)}
    assert len([path for path in stub.deleted if "-40-" in path or "-80-" in path]) == len(begun)


def test_rate_without_answers_has_errors(tmp_path: Path) -> None:
    with stub_proxy() as stub:
        (rate,) = asyncio.run(measure(stub.url, a_workload(tmp_path, "fail"), [20], 0.2))
    assert (rate.errors, rate.answered) == (4, 0)
