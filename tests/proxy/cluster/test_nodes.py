"""Whole members as processes: agents' answers are compared with a model, and the log with the answers."""

import asyncio
import itertools
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import orjson

from proxy.transfer.backup import restore
from tests.machine import Served, served, until, wait_until
from tests.proxy.cluster.nodes import MORTAL, PATIENT, Agent, Node, Truth, check_log, nodes, put_task, until_answered
from tests.proxy.cluster.relay import Relay
from tests.proxy.workers.test_workers import workers
from tests.sandboxes.postgres_cluster import Cluster

UNLIMITED = httpx.Limits(max_connections=None)


def call(node: Served, rollout: str, value: str, task: str = "t") -> httpx.Response:
    sql = f"INSERT INTO entry VALUES ('{value}'); SELECT group_concat(value, '') FROM entry"
    return httpx.post(f"{node.url}/t/{task}/r/{rollout}/sql/script", json={"sql": sql}, timeout=60)


def history(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return str(response.json()["rows"][0][0])


async def meanwhile(agents: list[Agent], fault: Callable[[], Awaitable[None]]) -> None:
    """Let agents make calls until a fault is over and each of them has been answered after it."""
    stop = asyncio.Event()
    async with httpx.AsyncClient() as client:
        running = [asyncio.create_task(agent.run(client, stop)) for agent in agents]
        await fault()
        before = {id(agent): agent.answers for agent in agents}
        await until(lambda: all(agent.answers > before[id(agent)] for agent in agents) or bool(agents[0].truth.wrong))
        stop.set()
        await asyncio.gather(*running)


def test_any_node_answers(dsn: str, tmp_path: Path) -> None:
    """A task belongs to the node that was asked first; rollouts of both nodes share its tree and may change nodes.

    Their links use IPv6 where the machine has it.
    """
    link = "[::1]:0" if socket.has_dualstack_ipv6() else "127.0.0.1:0"
    with nodes(tmp_path, dsn, "ab", module=PATIENT, FORKPOINT_LINK=link) as members:
        a, b = members.values()
        put_task(a, "t")
        assert history(call(a, "1", "x")) == "x"
        hit = call(b, "2", "x")
        assert history(hit) == "x"
        assert hit.headers["cache-status"] == "forkpoint; hit"
        assert history(call(b, "2", "y")) == "xy"
        assert history(call(b, "1", "y")) == "xy"
        assert history(call(a, "1", "z")) == "xyz"
        assert httpx.get(f"{b.url}/api/v1/tasks/t/rollouts/1").json()["calls"] == 3
        begun = httpx.post(f"{b.url}/api/v1/tasks/t/rollouts", json={"rollout": "3"})
        assert begun.status_code == 201, begun.text
        labelled = httpx.patch(f"{b.url}/api/v1/tasks/t/rollouts/1/labels", json={"reward": 1.0})
        assert labelled.status_code == 200, labelled.text
        # A reward comes when its rollout has ended, and the owner may be another one by then.
        assert httpx.delete(f"{b.url}/api/v1/tasks/t/rollouts/3").status_code == 204
        assert httpx.patch(f"{b.url}/api/v1/tasks/t/rollouts/3/labels", json={"note": "x"}).status_code == 200
        put_task(a, "deleted")
        assert history(call(b, "1", "x", task="deleted")) == "x"
        assert httpx.delete(f"{b.url}/api/v1/tasks/deleted").status_code == 204
        # The owner hands its task over, and takes no new one over.
        command = [sys.executable, "-m", "forkpoint", "cluster", "drain", "a", "--url", b.url]
        drained = subprocess.run(command, check=False, capture_output=True, text=True)
        assert drained.stdout == "Tasks handed over: 2. Tasks kept: 0. a accepts no more tasks.\n", drained
        assert history(call(a, "2", "z")) == "xyz"
        assert httpx.get(f"{a.url}/api/v1/tasks/t/rollouts/1").json()["labels"] == {"reward": 1.0}
        rewarded = httpx.patch(f"{a.url}/api/v1/tasks/t/rollouts/3/labels", json={"reward": 0.5})
        assert rewarded.status_code == 200, rewarded.text
        # The owner before has steps of the same rollouts, which count once.
        for node in (a, b):
            rows = httpx.get(f"{node.url}/api/v1/report?by=task", timeout=60).json()["rows"]
            (row,) = (row for row in rows if row["group"] == "t")
            assert [row[name] for name in ("rollouts", "calls", "rewarded", "reward")] == [2, 6, 1, 1.0]
        assert httpx.get(f"{a.url}/api/v1/tasks/deleted").status_code == 404
        put_task(a, "deleted")
        assert history(call(a, "1", "y", task="deleted")) == "y"
        put_task(a, "u")
        assert history(call(a, "1", "x", task="u")) == "x"
        shown = httpx.get(f"{a.url}/api/v1/cluster", timeout=30).json()["members"]
        assert all(each["link"].startswith(link[:-1]) for each in shown)
        assert [(each["name"], each["alive"], each["tasks"]) for each in shown] == [("a", True, 0), ("b", True, 3)]
        refused = httpx.post(f"{b.url}/api/v1/cluster/nobody/drain", timeout=30)
        assert refused.status_code == 404
        # Both stop in order: another start of one finds what the log has.
        a.stop()
        b.stop()
        b.start()
        wait_until(lambda: call(b, "4", "x").status_code == 200, "the task is not taken over")
        labels = httpx.get(f"{b.url}/api/v1/tasks/t/rollouts/3").json()["labels"]
        assert labels == {"note": "x", "reward": 0.5}
        assert {each["rollout"] for each in httpx.get(f"{b.url}/api/v1/tasks/t/rollouts").json()["items"]} == {
            "1",
            "2",
            "3",
            "4",
        }


def rollouts(node: Served) -> list[dict[str, Any]]:
    """Return the trajectories of all tasks."""
    lines = map(orjson.loads, httpx.get(f"{node.url}/api/v1/trajectories", timeout=60).text.splitlines())
    return [{key: line[key] for key in ("task", "rollout", "node", "complete", "calls")} for line in lines]


def test_rest_works_through_any_member(dsn: str, tmp_path: Path) -> None:
    """What changes a task goes to its owner, and what shows all tasks comes from all members."""
    with nodes(tmp_path, dsn, "ab", module=PATIENT) as members:
        a, b = members.values()
        for owner, task in ((a, "of-a"), (b, "of-b")):
            put_task(owner, task)
            assert history(call(owner, "1", "x", task)) == "x"
            assert history(call(owner, "2", "x", task)) == "x"
            assert history(call(owner, "1", "y", task)) == "xy"
        task = f"{b.url}/api/v1/tasks/of-a"
        last = httpx.get(f"{task}/rollouts/1").json()["node"]
        assert httpx.post(f"{task}/nodes/{last}/pin").status_code == 200
        assert httpx.put(f"{task}/audit/masks", json={"masks": ["dates"]}).json()["masks"]["masks"] == ["dates"]
        exported = httpx.get(f"{task}/export").content
        assert httpx.delete(f"{task}/nodes/{last}").json() == {"nodes": 1, "rollouts": [], "going_on": ["1"]}
        assert history(call(b, "2", "y", "of-a")) == "xy"
        for node in (a, b):
            shown = httpx.get(f"{node.url}/api/v1/tasks").json()
            assert ([each["task"] for each in shown["items"]], shown["total"]) == (["of-a", "of-b"], 2)
            lines = httpx.get(f"{node.url}/api/v1/trajectories").text.splitlines()
            assert [(line["task"], line["rollout"]) for line in map(orjson.loads, lines)] == [
                ("of-a", "1"), ("of-a", "2"), ("of-b", "1"), ("of-b", "2"),
            ]  # fmt: skip
            assert httpx.get(f"{node.url}/api/v1/stats").json()["calls"] == 7
            assert httpx.get(f"{node.url}/api/v1/events?task=of-a&limit=1").status_code == 200
        # An upload goes to the owner as it comes.
        put_task(a, "other")
        call(a, "1", "x", "other")
        assert httpx.delete(f"{b.url}/api/v1/tasks/of-a").status_code == 204
        put_task(a, "of-a")
        imported = httpx.post(f"{task}/import", content=iter([exported[:100], exported[100:]]), timeout=60)
        assert (imported.status_code, imported.json()["records"]) == (201, 2), imported.text
        # The tasks of a member that has left are in the lists too, and so are all steps of their rollouts.
        put_task(a, "listed")
        before = [line for line in rollouts(b) if line["task"] == "other"]
        assert [(line["complete"], len(line["calls"])) for line in before] == [(True, 1)]
        a.stop()
        shown = httpx.get(f"{b.url}/api/v1/tasks", timeout=60).json()
        assert [each["task"] for each in shown["items"]] == ["listed", "of-a", "of-b", "other"]
        assert [line for line in rollouts(b) if line["task"] == "other"] == before
        listed = rollouts(b)
        # What the members' stores have takes no part: the tasks of one that is away are in the backup too.
        b.stop()
        a.start()
        backup = httpx.get(f"{a.url}/api/v1/backup", timeout=60)
        assert backup.headers["content-type"] == "application/vnd.sqlite3"
        (tmp_path / "backup").write_bytes(backup.content)
        owned = {each["name"]: each["tasks"] for each in httpx.get(f"{a.url}/api/v1/cluster").json()["members"]}
        assert owned == {"a": 0, "b": 4}, "the backup moves no task"
    restored = restore(tmp_path / "backup", tmp_path / "restored" / "data")
    assert (restored.tasks, restored.lost_rollouts) == (4, 3)
    with served(tmp_path / "restored", drivers='["sqlite"]') as alone:
        # Rollouts that ran are lost, as after each restore.
        assert rollouts(alone) == [line | {"complete": False} for line in listed]
        # The task goes on with its tree, although others have one of the same environment.
        answers = [call(alone, "new", value, "of-b") for value in "xy"]
        assert [history(answer) for answer in answers] == ["x", "xy"]
        known = {line["rollout"]: line["node"] for line in listed if line["task"] == "of-b"}
        assert [answer.headers["x-forkpoint-node"] for answer in answers] == [known["2"], known["1"]]


def test_a_member_that_leaves_takes_no_position_along(dsn: str, tmp_path: Path) -> None:
    """Rollouts of a member that was drained and killed, or stopped, go on at another member at once."""
    with nodes(tmp_path, dsn, "abc", module=PATIENT) as members:
        a, b, c = members.values()
        for owner, task in ((a, "of-a"), (b, "of-b")):
            put_task(owner, task)
            # The second rollout's answers are hits.
            for rollout in ("1", "2"):
                assert history(call(a, rollout, "x", task)) == "x"
                assert history(call(a, rollout, "y", task)) == "xy"
        drained = httpx.post(f"{c.url}/api/v1/cluster/a/drain", timeout=60)
        assert drained.json() == {"name": "a", "handed": 1, "kept": 0}
        a.kill()
        assert history(call(b, "1", "z", "of-a")) == "xyz"
        # It is the owner of both tasks, and the ingress of one rollout.
        b.stop()
        assert history(call(c, "1", "z", "of-a")) == "xyzz"
        assert history(call(c, "2", "z", "of-a")) == "xyz"
        assert history(call(c, "1", "z", "of-b")) == "xyz"
        assert history(call(c, "2", "z", "of-b")) == "xyz"


def test_a_killed_ingress_takes_no_position_along(dsn: str, tmp_path: Path) -> None:
    """Its rollouts go on at any other member at once, behind the hits that only it has passed on."""
    with nodes(tmp_path, dsn, "abc", module=PATIENT) as members:
        a, b, c = members.values()
        put_task(a, "t")
        for rollout in ("1", "2", "3"):
            assert history(call(b, rollout, "x")) == "x"
            assert history(call(b, rollout, "y")) == "xy"
        b.kill()
        assert history(call(a, "1", "z")) == "xyz"
        assert history(call(c, "2", "z")) == "xyz"
        assert history(call(a, "2", "z")) == "xyzz"


def test_what_an_audit_withholds_stays_withheld_after_a_takeover(dsn: str, tmp_path: Path) -> None:
    """The next owner has never audited the record, and its agents do not get the answer either."""

    def drawn(node: Node, rollout: str) -> str:
        url = f"{node.url}/t/t/r/{rollout}/sql/query"
        return history(httpx.post(url, json={"sql": "SELECT hex(randomblob(8))"}, timeout=60))

    with nodes(tmp_path, dsn, "ab", FORKPOINT_AUDIT_SHARE="1", **MORTAL) as members:
        a, b = members.values()
        put_task(a, "t", volatile="once")
        first, numbers = drawn(a, "1"), itertools.count(2)
        assert drawn(b, "again") == first
        # Each hit is audited soon. The answer to the first call that is no hit is behind the finding in the log.
        wait_until(lambda: drawn(b, str(next(numbers))) != first, "the audit finds nothing")
        a.kill()
        wait_until(lambda: call(b, "writer", "x").status_code == 200, "the task is not taken over", within_s=60)
        assert drawn(b, "last") != first


def test_kill_of_owner_and_ingress(dsn: str, tmp_path: Path) -> None:
    """A node is killed while agents of all nodes make calls. No answer is wrong, and each is in the log once."""
    truth = Truth()
    with nodes(tmp_path, dsn, "abc") as members:
        a, b, c = members.values()
        put_task(a, "t")
        put_task(b, "u")
        homes = [[a], [b], [c], [a], [b], [b, c]]
        agents = [Agent(str(n), "tu"[n % 2], home, truth, seed=n // 4) for n, home in enumerate(homes)]

        async def kill() -> None:
            await until(lambda: all(agent.answers for agent in agents))
            # The owner of one task, and an ingress of the other.
            await asyncio.to_thread(a.kill)
            others = [agent for agent in agents if a not in agent.nodes]
            await until_answered(others)
            await asyncio.to_thread(a.start)

        asyncio.run(meanwhile(agents, kill))
    assert truth.wrong == []
    check_log(dsn, truth)


def test_kills_of_workers_that_are_members(dsn: str, tmp_path: Path) -> None:
    """A worker, which is a member of its own, is killed and started again by its parent; then all of a machine are."""
    truth = Truth()
    with nodes(tmp_path, dsn, "ab", "--workers", "2") as members:
        a, b = members.values()
        for task in "tuv":
            put_task(a, task)
        homes = [[a], [b], [a, b]]
        agents = [Agent(f"{n}", task, home, truth, seed=n) for task in "tuv" for n, home in enumerate(homes)]

        async def kill() -> None:
            await until(lambda: all(agent.answers for agent in agents))
            for _ in range(2):
                await asyncio.to_thread(os.kill, workers(a)[0], signal.SIGKILL)
                await until_answered(agents)
            await asyncio.to_thread(a.kill)
            await asyncio.to_thread(a.start)

        asyncio.run(meanwhile(agents, kill))
        shown = httpx.get(f"{b.url}/api/v1/cluster", timeout=30).json()["members"]
        assert [each["name"] for each in shown] == ["a-0", "a-1", "b-0", "b-1"]
    assert truth.wrong == []
    check_log(dsn, truth)


def test_without_database_503(server: Cluster, dsn: str, tmp_path: Path) -> None:
    """A member without the database answers 503 with Retry-After, and goes on when the database is back."""
    with nodes(tmp_path, dsn, "a") as members:
        (node,) = members.values()
        put_task(node, "t")
        assert history(call(node, "1", "x")) == "x"
        server.kill()
        try:
            refused = call(node, "1", "y")
            assert refused.status_code == 503, refused.text
            assert refused.headers["retry-after"] == "1"
            # In the form that the client's SDK reads.
            refused = httpx.get(f"{node.url}/t/t/docker/containers/json", timeout=60)
            assert (refused.status_code, "no member" in refused.json()["message"]) == (503, True)
        finally:
            server.start()
        wait_until(lambda: call(node, "1", "y").status_code == 200, "the call is not answered")


def test_a_silent_database_503(server: Cluster, dsn: str, tmp_path: Path) -> None:
    """The database accepts connections and says nothing. Forty calls of a task get 503 in the time of one."""

    async def run() -> None:
        async with Relay(server.port).running() as relay, httpx.AsyncClient(timeout=40, limits=UNLIMITED) as client:

            async def calls(value: str) -> list[httpx.Response]:
                """Let forty rollouts write something different each."""
                return await asyncio.gather(
                    *(
                        client.post(
                            f"{node.url}/t/t/r/{number}/sql/script",
                            json={"sql": f"INSERT INTO entry VALUES ('{value}{number}')"},
                        )
                        for number in range(40)
                    )
                )

            with ExitStack() as stack:
                members = await asyncio.to_thread(stack.enter_context, nodes(tmp_path, relay.dsn(dsn), "a"))
                (node,) = members.values()
                await asyncio.to_thread(put_task, node, "t")
                relay.left_bytes = 0
                refused = await calls("x")
                assert {each.status_code for each in refused} == {503}
                assert {each.headers["retry-after"] for each in refused} == {"1"}
                relay.left_bytes = None
                ending = asyncio.get_running_loop().time() + 60
                while {each.status_code for each in await calls("x")} != {200}:
                    assert asyncio.get_running_loop().time() < ending, "calls are not answered again"

    asyncio.run(run())
