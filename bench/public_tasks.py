"""Tasks in the shape of public sets, played through a proxy and in plain Docker: `python -m bench.public_tasks`.

Four rollouts of each task: one records the oracle's solution and the tests, one repeats them, one makes another change
in the middle, and one another call without effect. Where Docker runs, a container makes the same calls by `docker
exec`. Then every node of the first rollout is left by a fork. Prints verdicts, times, what is shared by calls and by
seconds, lost nodes, and what cannot be kept. `--quick` plays some tasks in less than a minute. Exits with 1 if a
verdict or an answer differs, or if the solution does not solve its task.
"""

import statistics
import sys
import time
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from bench.machine import console, table
from bench.plain_docker import docker_client, plain_container
from bench.task_folders import TaskFolder, read_tasks
from forkpoint.client import Client, Rollout
from forkpoint.ephemeral_proxy import ephemeral_proxy
from forkpoint.own_shell import line_of

if TYPE_CHECKING:
    import docker
    from rich.status import Status

FOLDER = Path(__file__).parent / "tasks"
"""The tasks that this project brings along."""
QUICK = ["background-server", "c-build", "git-rebase", "permissions", "python-package", "sqlite-wal"]
TEST = "/tests/test.sh"
DIFFERS = "echo another way > /tmp/other; echo other"
"""The call with which the third rollout leaves the others. Nothing reads the file: an agent's change leads further."""
LOOKS_UP = "cat /etc/os-release; echo look"
"""The call that the fourth rollout makes in addition. It changes nothing, as most calls of agents."""
CALL_S = 120
"""Longest time of a call."""
_SOLVED = "solved"


@dataclass
class Played:
    """What playing a task has shown.

    Attributes:
        calls: Calls of a rollout.
        verdicts: The verdict of the container and of each rollout, by its name.
        seconds: How long each of them took, as its agent sees it.
        hits: Hits of the second rollout.
        differing: Calls to which the second rollout got another answer.
        shared: Share of the third rollout's calls, and of its tool seconds, that were hits.
        looked: The same of the fourth rollout.
        nodes: How many nodes were left by a fork, were kept, and were lost.
        branches: Seconds of each fork and its call.
        reasons: Why states are not kept, with how many there are.
    """

    calls: int
    verdicts: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    hits: int = 0
    differing: list[str] = field(default_factory=list)
    shared: tuple[float, float] = (0.0, 0.0)
    looked: tuple[float, float] = (0.0, 0.0)
    nodes: tuple[int, int, int] = (0, 0, 0)
    branches: list[float] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)

    @property
    def is_right(self) -> bool:
        """Whether all have solved the task alike, and the second rollout got the first one's answers."""
        [verdict, *others] = set(self.verdicts.values())
        return verdict.startswith(_SOLVED) and not (others or self.differing)


def play(url: str, task: TaskFolder, daemon: "docker.DockerClient | None", say: Callable[[str], None]) -> Played:
    """Play a task. `say` gets what is being done."""
    played = Played(len(task.calls) + 2)
    middle = len(task.calls) // 2
    rollouts = {
        "first": task.calls, "again": task.calls, "other": (*task.calls[:middle], DIFFERS, *task.calls[middle:]),
        "look": (*task.calls[:middle], LOOKS_UP, *task.calls[middle:]),
    }  # fmt: skip
    answers: dict[str, list[tuple[int, str]]] = {}
    if daemon is not None:
        say("plain Docker")
        with plain_container(daemon, task) as container, _timed(played, "plain"):
            for command in task.calls:
                container.call(command)
            container.write(TEST, task.test)
            played.verdicts["plain"] = _verdict(*container.call(f"bash {TEST}"))
    with Client(url) as client, httpx.Client(base_url=f"{url}/api/v1/tasks/{task.name}", timeout=CALL_S * 2) as http:
        client.task(task.name).put(task.spec)
        for name, calls in rollouts.items():
            say(f"rollout {name!r}")
            with _timed(played, name):
                answers[name] = _answers(client.task(task.name).rollout(name), calls, task)
            played.verdicts[name] = _verdict(*answers[name][-1])
        pairs = zip((*task.calls, "the tests"), answers["first"], answers["again"], strict=True)
        played.differing = [command for command, one, two in pairs if one != two]
        steps = {name: _steps(http, name) for name in rollouts}
        played.hits = sum(step["outcome"] == "hit" for step in steps["again"])
        played.shared, played.looked = _shared(steps["other"]), _shared(steps["look"])
        _branch(http, steps["first"], played, say)
    return played


def _answers(rollout: Rollout, calls: tuple[str, ...], task: TaskFolder) -> list[tuple[int, str]]:
    with rollout:
        answers = [_call(rollout, command, task) for command in calls]
        rollout.write(TEST, task.test)
        return [*answers, _call(rollout, f"bash {TEST}", task)]


def _call(rollout: Rollout, command: str, task: TaskFolder) -> tuple[int, str]:
    result = rollout.exec(line_of(["bash", "-c", command], cwd=task.workdir), timeout_s=CALL_S)
    return result.exit_code, result.stdout


def _verdict(exit_code: int, output: str) -> str:
    return f"{_SOLVED if exit_code == 0 else 'failed'}: {(output.strip().splitlines() or [''])[-1]}"


@contextmanager
def _timed(played: Played, name: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    played.seconds[name] = time.perf_counter() - began


def _steps(http: httpx.Client, rollout: str) -> list[dict[str, Any]]:
    # The name may stand for later rollouts, so it is that of a list.
    items: list[dict[str, Any]] = http.get(f"/rollouts/{rollout}", params={"limit": 1000}).json()["steps"]["items"]
    return items


def _shared(steps: list[dict[str, Any]]) -> tuple[float, float]:
    hits = [step for step in steps if step["outcome"] == "hit"]
    total = sum(step["seconds"] for step in steps) or 1.0
    return len(hits) / len(steps), sum(step["seconds"] for step in hits) / total


def _branch(http: httpx.Client, steps: list[dict[str, Any]], played: Played, say: Callable[[str], None]) -> None:
    """Leave each node of a rollout by a fork with a small call."""
    nodes = list(dict.fromkeys(step["node"] for step in steps))
    kept = lost = 0
    for number, node in enumerate(nodes, 1):
        say(f"branch {number} of {len(nodes)}")
        shown = http.get(f"/nodes/{node}").json()
        kept += bool(shown.get("snapshot"))
        if not shown.get("snapshot") and shown.get("kept"):
            played.reasons[str(shown["kept"])[:200]] += 1
        began = time.perf_counter()
        status = http.post(f"/nodes/{node}/exec", json={"command": "echo other"}).status_code
        played.branches.append(time.perf_counter() - began)
        lost += status != 200
    played.nodes = (len(nodes), kept, lost)


def report(results: dict[str, Played]) -> None:
    """Print what playing the tasks has shown, a row for each."""
    shown = table(
        "Tasks: seconds of an agent", "task", "plain", "first", "again", "other", "hits", "shared", "time", "look",
        "kept", "lost", "fork",
    )  # fmt: skip
    for name, played in results.items():
        times = (f"{played.seconds[key]:.1f}" if key in played.seconds else "-" for key in _PLAYERS)
        nodes, kept, lost = played.nodes
        shown.add_row(
            name, *times, f"{played.hits}/{played.calls}", *(f"{share:.0%}" for share in played.shared),
            f"{played.looked[1]:.0%}", f"{kept}/{nodes}", str(lost), f"{statistics.median(played.branches):.2f}",
        )  # fmt: skip
    console.print(shown)
    console.print(
        "hits: of the second rollout. shared, time: calls and tool seconds that a rollout with another change shares.\n"
        "look: tool seconds that a rollout with another look shares. kept, lost: of the first rollout's nodes.\n"
        "fork: median seconds of a fork and its call."
    )
    for name, played in results.items():
        verdicts = {verdict: [key for key in played.verdicts if played.verdicts[key] == verdict] for verdict in
                    dict.fromkeys(played.verdicts.values())}  # fmt: skip
        said = next(iter(verdicts)) if len(verdicts) == 1 else f"[bold]verdicts differ[/bold]: {verdicts}"
        console.print(f"{name}: {said}" + "".join(f"\n  other answer: {call!r}" for call in played.differing))
    reasons: Counter[str] = Counter()
    for played in results.values():
        reasons += played.reasons
    for reason, count in reasons.most_common():
        console.print(f"not kept, {count} nodes: {reason}")


_PLAYERS = ("plain", "first", "again", "other")


def _show(status: "Status", head: str, what: str) -> None:
    status.update(f"{head}: {what}")


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="a directory with a directory for each task")
    parser.add_argument("--tasks", nargs="*", default=[], help="names of tasks; all without any")
    parser.add_argument("--quick", action="store_true", help="some tasks, in less than a minute")
    parser.add_argument("--no-docker", action="store_true", help="without plain containers beside")
    options = parser.parse_args()
    daemon = None if options.no_docker else docker_client()
    if daemon is None:
        console.print("No plain containers beside: no Docker daemon answers, or --no-docker was given.")
    tasks = read_tasks(options.folder, options.tasks or (QUICK if options.quick else []))
    results: dict[str, Played] = {}
    with ephemeral_proxy(settings={"drivers": ["local"]}) as proxy:
        for number, task in enumerate(tasks, 1):
            head = f"{number} of {len(tasks)}, {task.name}"
            if task.skipped:
                console.print(f"{head}: skipped, because {task.skipped}")
                continue
            with console.status(head) as status:
                results[task.name] = play(proxy.url, task, daemon, partial(_show, status, head))
            console.print(f"{head}: {'right' if results[task.name].is_right else 'WRONG'}")
    if results:
        report(results)
    sys.exit(0 if all(played.is_right for played in results.values()) else 1)


if __name__ == "__main__":
    main()
