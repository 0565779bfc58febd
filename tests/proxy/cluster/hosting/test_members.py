"""Members as processes: sandboxes of a full member run on another one, which may die at any time."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from tests.machine import require_sandboxes, until, wait_until
from tests.proxy.cluster.nodes import PATIENT, Agent, Node, Truth, check_log, nodes, put_task
from tests.proxy.cluster.test_nodes import meanwhile

BUDGET = 3
"""Sandboxes of each member. The fourth one of a task runs elsewhere."""


@contextmanager
def hosting(
    folder: Path, dsn: str, names: str, driver: str, *, module: str = "forkpoint", **options: str
) -> Iterator[list[Node]]:
    """Run members that run sandboxes for each other."""
    drivers = {"FORKPOINT_DRIVERS": f'["{driver}"]', "FORKPOINT_MAX_SANDBOXES": str(BUDGET)}
    with nodes(folder, dsn, names, module=module, FORKPOINT_HOSTING="on", **drivers, **options) as members:
        yield list(members.values())


def run(node: Node, rollout: str, command: str, task: str = "t") -> str:
    """Return what a command printed. A call whose sandbox was lost is made again, as agents do."""
    answers: list[httpx.Response] = []

    def is_answered() -> bool:
        url = f"{node.url}/t/{task}/r/{rollout}/shell/exec"
        answers.append(httpx.post(url, json={"command": command, "timeout_s": 600}, timeout=600))
        assert answers[-1].status_code in (200, 503), answers[-1].text
        return answers[-1].status_code == 200

    wait_until(is_answered, "the call is not answered", within_s=60)
    return str(answers[-1].json()["stdout"])


def metric(node: Node, name: str) -> float:
    page = httpx.get(f"{node.url}/metrics", timeout=30).text
    return float(next(line for line in page.splitlines() if line.startswith(f"forkpoint_{name} ")).split()[1])


def sandboxes(node: Node) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = httpx.get(f"{node.url}/api/v1/sandboxes", timeout=30).json()["items"]
    return items


def test_full_member_runs_sandboxes_elsewhere(dsn: str, data_dir: Path) -> None:
    """Five rollouts need five sandboxes: two run on the other member, and are made again when it is killed."""
    require_sandboxes()
    with hosting(data_dir, dsn, "ab", "local", module=PATIENT, FORKPOINT_WARM_SANDBOXES="0") as (a, b):
        rollouts = [str(number) for number in range(5)]
        for rollout in rollouts:
            assert run(a, rollout, f"echo {rollout} > own; cd /tmp; cat /root/own") == f"{rollout}\n"
        away = [each for each in sandboxes(a) if each["id"].startswith("b/")]
        assert len(away) == 2
        assert {each["why"] for each in sandboxes(b)} == {"run for another member of the cluster"}
        assert (metric(a, "sandboxes"), metric(a, "sandboxes_elsewhere")) == (BUDGET, 2)
        assert metric(b, "sandboxes_for_others") == 2
        shown = httpx.get(f"{a.url}/api/v1/cluster", timeout=30).json()["members"]
        counts = [(each["sandboxes"]["elsewhere"], each["sandboxes"]["for_others"]) for each in shown]
        assert counts == [(2, 0), (0, 2)]
        for rollout in rollouts:
            assert run(a, rollout, "pwd; cat /root/own; echo more >> /root/own") == f"/tmp\n{rollout}\n"
        b.kill()
        for rollout in rollouts:
            assert run(a, rollout, "cat /root/own; pwd") == f"{rollout}\nmore\n/tmp\n"


def test_own_calls_get_the_room_of_idle_sandboxes_of_others(dsn: str, data_dir: Path) -> None:
    """Two sandboxes of another member are idle here. A call of this member needs their room, and does not wait long."""
    require_sandboxes()
    with hosting(data_dir, dsn, "ab", "local", module=PATIENT, FORKPOINT_WARM_SANDBOXES="0") as (a, b):
        rollouts = [str(number) for number in range(5)]
        for rollout in rollouts:
            assert run(a, rollout, f"echo {rollout} > own; cat own") == f"{rollout}\n"
        assert metric(b, "sandboxes_for_others") == 2
        with ThreadPoolExecutor(1) as threads:
            # The only room that is left: no other sandbox of its own can be closed for the next call.
            long = threads.submit(run, b, "1", "sleep 300", "u")
            try:
                wait_until(lambda: any(each["state"] == "leased" and each["task"] for each in sandboxes(b)), "no call")
                assert run(b, "2", "echo two", "u") == "two\n"
                assert not long.done()
                assert metric(b, "sandboxes_for_others") < 2
                for rollout in rollouts:
                    assert run(a, rollout, "cat /root/own") == f"{rollout}\n"
            finally:
                b.kill()
                with suppress(httpx.TransportError):
                    long.result()


def test_kill_of_a_host(dsn: str, tmp_path: Path) -> None:
    """The host of most sandboxes is killed while agents make calls. No answer is wrong, and each is in the log once."""
    truth = Truth()
    with hosting(tmp_path, dsn, "ab", "sqlite") as (a, b):
        put_task(a, "t")
        agents = [Agent(str(number), "t", [a], truth, seed=number // 2) for number in range(8)]

        async def kill() -> None:
            await until(lambda: metric(a, "sandboxes_placed_total") > BUDGET)
            before = metric(a, "sandboxes_placed_total")
            await asyncio.to_thread(b.kill)
            seen = {agent.name: agent.answers for agent in agents}
            await until(lambda: all(agent.answers > seen[agent.name] for agent in agents))
            await asyncio.to_thread(b.start)
            await until(lambda: metric(a, "sandboxes_placed_total") > before)

        asyncio.run(meanwhile(agents, kill))
    assert truth.wrong == []
    check_log(dsn, truth)
