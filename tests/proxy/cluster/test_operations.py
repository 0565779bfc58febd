"""Tasks move between members: what the operation refuses and bounds, and whole members while they are killed."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from proxy.cluster.messages import DrainAnswer, HandQuestion, LoadAnswer, Message
from proxy.cluster.operations import Operations
from proxy.cluster.postgres.database import Peer
from proxy.refusals import RefusalError
from tests.machine import until
from tests.proxy.cluster.nodes import Agent, Node, Truth, check_log, nodes, put_task, until_answered
from tests.proxy.cluster.test_nodes import meanwhile

PATH = "/api/v1/cluster/rebalance"


class Cluster:
    """The first of several members, and the answers of the others.

    Attributes:
        loads: What each member says of its load; None for one that does not answer.
        handed: The tasks that were handed over.
        most: How many were on their way at once, at most.
    """

    def __init__(self, *loads: LoadAnswer | None) -> None:
        self.loads, self.handed, self.most = loads, list[str](), 0
        self._under_way = 0
        self.database = SimpleNamespace(members=self.members)
        self.operations = Operations(cast("Any", self), cast("Any", None))

    async def members(self) -> list[tuple[Peer, int]]:
        return [(Peer(at, 1, f"m{at}", "", alive=True), 0) for at, _ in enumerate(self.loads, 1)]

    async def ask(self, number: int, question: Message) -> Message | None:
        if not isinstance(question, HandQuestion):
            return self.loads[number - 1]
        self._under_way += 1
        self.most = max(self.most, self._under_way)
        await asyncio.sleep(0)
        self._under_way -= 1
        self.handed.append(question.task)
        return DrainAnswer(int(question.task != "stays"), int(question.task == "stays"))

    def rebalance(self, query: str = "") -> dict[str, Any]:
        return asyncio.run(self.operations.answer("POST", PATH, query))


def load(*tasks: str, is_leaving: bool = False) -> LoadAnswer:
    return LoadAnswer(is_leaving, dict.fromkeys(tasks, 1))


@pytest.mark.parametrize("order", [1, -1])
def test_as_many_tasks_move_at_once_as_allowed(order: int) -> None:
    """The member that is asked moves its own tasks, or lets others move theirs; what did not move is said."""
    cluster = Cluster(*[load(*"abcdefg", "stays"), load()][::order])
    answer = cluster.rebalance("max=2")
    assert (len(cluster.handed), cluster.most) == (4, 2)
    assert sorted(each["after"] for each in answer["members"]) == [4, 4] if "stays" not in cluster.handed else [3, 5]
    assert [move["task"] for move in answer["moves"] if move["moved"]] == [t for t in cluster.handed if t != "stays"]


def test_a_dry_run_moves_nothing() -> None:
    """It returns the moves, and what the loads would be."""
    cluster = Cluster(load(*"abc"), load("d"))
    answer = cluster.rebalance("dry_run=true")
    assert cluster.handed == []
    assert answer["members"] == [{"name": "m1", "before": 3, "after": 2}, {"name": "m2", "before": 1, "after": 2}]
    assert answer["moves"] == [{"task": "a", "from": "m1", "to": "m2", "load": 1, "moved": False}]


@pytest.mark.parametrize(
    ("cluster", "query", "status", "why"),
    [
        (Cluster(load("a")), "", 409, "only one member takes tasks over."),
        (Cluster(load("a"), load(is_leaving=True)), "", 409, "m2 hands its tasks over"),
        (Cluster(load("a"), None), "", 503, "member 'm2' does not say which tasks it owns"),
        (Cluster(load("a"), load()), "max=0", 422, "max is a number"),
        (Cluster(load("a"), load()), "max=x", 422, "max is a number"),
        (Cluster(load("a"), load()), f"max={'9' * 5000}", 422, "max is a number"),
        (Cluster(load("a"), load()), "dry_run=1", 422, "dry_run is true or false"),
    ],
)
def test_what_cannot_be_done_is_refused_with_a_sentence(cluster: Cluster, query: str, status: int, why: str) -> None:
    with pytest.raises(RefusalError) as refused:
        cluster.rebalance(query)
    assert refused.value.status == status
    assert why in str(refused.value)
    assert cluster.handed == []


def rebalance(node: Node) -> None:
    """Let tasks move, one at a time. It is refused while a member that was killed has its lease."""
    answer = httpx.post(f"{node.url}{PATH}?max=1", timeout=120)
    assert answer.status_code in (200, 409, 503), answer.text


def tasks_of(node: Node) -> dict[str, int]:
    """Return how many tasks each member owns that has any."""
    shown = httpx.get(f"{node.url}/api/v1/cluster", timeout=30).json().get("members", ())
    return {each["name"]: each["tasks"] for each in shown if each["tasks"]}


def test_kills_while_tasks_move(dsn: str, tmp_path: Path) -> None:
    """The member that takes tasks over is killed while they move, then one that hands them over. No answer is wrong."""
    truth, tasks = Truth(), "rstuvw"
    with nodes(tmp_path, dsn, "abc") as members:
        a, b, c = members.values()
        for task in tasks:
            put_task(c, task)
        # Between the calls of an agent, its task is quiet for a moment.
        agents = [Agent("1", task, [a], truth, seed=at // 2, pause_s=1.0) for at, task in enumerate(tasks)]

        async def move_until(is_reached: Callable[[dict[str, int]], bool]) -> asyncio.Task[None]:
            moving = asyncio.create_task(asyncio.to_thread(rebalance, a))
            async with asyncio.timeout(120):
                while not is_reached(await asyncio.to_thread(tasks_of, a)):
                    if moving.done():
                        moving = asyncio.create_task(asyncio.to_thread(rebalance, a))
                    await asyncio.sleep(0.1)
            return moving

        async def kill_while_moving(victim: Node) -> None:
            moving = await move_until(lambda owned: "b" in owned)
            await asyncio.to_thread(victim.kill)
            await moving
            await until_answered(agents)

        async def kill() -> None:
            await until(lambda: all(agent.answers for agent in agents))
            await kill_while_moving(b)
            await (await move_until(lambda owned: owned == {"a": 3, "c": 3}))
            await asyncio.to_thread(b.start)
            await kill_while_moving(c)
            await (await move_until(lambda owned: owned == {"a": 3, "b": 3}))

        asyncio.run(meanwhile(agents, kill))
    assert truth.wrong == []
    check_log(dsn, truth)
