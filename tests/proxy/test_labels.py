"""Labels of rollouts: every way to set them, what they do not change, and rollouts that nobody ends."""

import asyncio
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from proxy.storage.schema import CHECKSUM_FUNCTION, row_checksum
from sandboxes.calls import ToolCall
from tests.proxy.rig import ask, engine
from tests.proxy.serving import Running, serving


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[Running]:
    with serving(tmp_path) as running:
        yield running


def labels_of(proxy: Running, rollout: str) -> Any:
    return proxy.client.get(f"/api/v1/tasks/task/rollouts/{rollout}").raise_for_status().json()["labels"]


def call(proxy: Running, rollout: str, command: str = "ls", *, query: str = "", **headers: str) -> str:
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    answer = proxy.client.post(f"/t/task/r/{rollout}/shell/exec{query}", json={"command": command}, headers=sent)
    return answer.raise_for_status().headers["cache-status"]


def test_first_request_labels_its_rollout(proxy: Running) -> None:
    """The header counts before the query. Later requests of the rollout change nothing, hits and misses alike."""
    call(proxy, "a", query="?forkpoint-labels=run%3Dold%2Cgroup%3Dg%25201", x_forkpoint_labels="run=r7,step=03")
    assert labels_of(proxy, "a") == {"run": "r7", "group": "g 1", "step": 3}
    for command in ("ls", "echo x > f"):
        call(proxy, "a", command, x_forkpoint_labels="run=other,reward=1")
    assert labels_of(proxy, "a") == {"run": "r7", "group": "g 1", "step": 3}


def test_labels_are_no_part_of_a_call(proxy: Running) -> None:
    """Rollouts with other labels, in other places, make the same call."""
    assert "stored" in call(proxy, "a", query="?forkpoint-labels=run=1")
    assert call(proxy, "b", query="?forkpoint-labels=run=2") == "forkpoint; hit"
    assert call(proxy, "c", x_forkpoint_labels="run=3") == "forkpoint; hit"
    assert call(proxy, "a", query="?forkpoint-labels=run=1") == "forkpoint; hit"
    assert len(proxy.driver.executed) == 1


def test_malformed_labels_begin_no_rollout(proxy: Running) -> None:
    answer = proxy.client.post(
        "/t/task/r/a/shell/exec", json={"command": "ls"}, headers={"x-forkpoint-labels": "step=x"}
    )
    assert (answer.status_code, answer.json()["type"]) == (422, "urn:forkpoint:labels")
    call(proxy, "b")
    assert [each["rollout"] for each in proxy.client.get("/api/v1/tasks/task/rollouts").json()["items"]] == ["b"]


def test_rest_sets_changes_and_filters_labels(proxy: Running) -> None:
    """A reward is known after the end. A fork has its source's labels, and no reward."""
    at = "/api/v1/tasks/task/rollouts"
    begun = proxy.client.post(at, json={"rollout": "a", "labels": {"run": "r7", "step": 3, "note": "<b>"}}).json()
    assert begun["labels"] == {"run": "r7", "step": 3, "note": "<b>"}
    changed = proxy.client.patch(f"{at}/a/labels", json={"reward": 0.5, "note": None}).json()
    assert changed["labels"] == {"run": "r7", "step": 3, "reward": 0.5}
    forked = proxy.client.post(f"{at}/a/fork", json={"name": "b", "labels": {"step": 4}}).json()
    assert forked["labels"] == {"run": "r7", "step": 4}
    proxy.client.delete(f"{at}/a").raise_for_status()
    assert proxy.client.patch(f"{at}/a/labels", json={"reward": 1}).json()["labels"]["reward"] == 1.0
    for query, names in (("label=run=r7", ["a", "b"]), ("label=run=r7&label=step=04", ["b"]), ("label=run=x", [])):
        assert [each["rollout"] for each in proxy.client.get(f"{at}?{query}").json()["items"]] == names, query
    refused = [
        proxy.client.patch(f"{at}/a/labels", json={"bad name": 1}), proxy.client.get(f"{at}?label=run"),
        proxy.client.post(at, json={"rollout": "c", "labels": {"step": "x"}}),
    ]  # fmt: skip
    assert [answer.status_code for answer in refused] == [422, 422, 422]
    assert proxy.client.patch(f"{at}/none/labels", json={}).status_code == 404


def test_labels_survive_a_restart(tmp_path: Path) -> None:
    with serving(tmp_path) as proxy:
        call(proxy, "a", x_forkpoint_labels="run=r7")
    with serving(tmp_path) as proxy:
        assert labels_of(proxy, "a") == {"run": "r7"}


def test_token_of_a_rollout_changes_no_labels(tmp_path: Path) -> None:
    """It opens its rollout's tools only: an agent cannot give itself a reward, and none of another rollout."""
    token = "0123456789abcdef"
    with serving(tmp_path, token=token) as proxy:
        whole = {"x-forkpoint-token": token}
        at = "/api/v1/tasks/task/rollouts"
        own = proxy.client.post(at, json={"rollout": "a"}, headers=whole).json()["token"]
        for name in ("a", "b"):
            answer = proxy.client.patch(f"{at}/{name}/labels", json={"reward": 1}, headers={"x-forkpoint-token": own})
            assert answer.status_code == 401
        sent = {"x-forkpoint-token": own, "x-forkpoint-labels": "reward=1"}
        body = {"command": "ls"}
        proxy.client.post("/t/task/r/a/shell/exec", json=body, headers=sent).raise_for_status()
        assert proxy.client.post("/t/task/r/b/shell/exec", json=body, headers=sent).status_code == 401
        assert proxy.client.get(f"{at}/a", headers=whole).json()["labels"] == {}


def test_states_are_what_they_say(tmp_path: Path) -> None:
    """A rollout without a recent call is idle, also after a restart, and `idle_finish_s` ends it."""
    at = "/api/v1/tasks/task/rollouts"
    with serving(tmp_path) as proxy:
        for name in ("old", "new", "ended"):
            call(proxy, name)
        proxy.client.delete(f"{at}/ended").raise_for_status()
        states = {each["rollout"]: each["state"] for each in proxy.client.get(at).json()["items"]}
        assert states == {"old": "running", "new": "running", "ended": "finished"}
    age(tmp_path, "old", 3600.0)
    with serving(tmp_path) as proxy:
        states = {each["rollout"]: each["state"] for each in proxy.client.get(at).json()["items"]}
        assert states == {"old": "idle", "new": "running", "ended": "finished"}
        call(proxy, "old", "pwd")
        assert proxy.client.get(f"{at}/old").json()["state"] == "running"


@pytest.mark.parametrize("in_memory", [False, True])
def test_unused_rollouts_are_finished(tmp_path: Path, *, in_memory: bool) -> None:
    """Whether their task is in memory or not. A rollout with a call in flight is in use."""

    async def go() -> None:
        running, release = asyncio.Event(), asyncio.Event()

        async def gate(call: ToolCall) -> None:
            if call.arguments["command"] == "sleep 1":
                running.set()
                await release.wait()

        async with engine(tmp_path) as first:
            for name in ("old", "busy", "new"):
                await ask(first, await first.tasks.rollout("task", name), "ls")
        for name in ("old", "busy"):
            age(tmp_path, name, 3600.0)
        async with engine(tmp_path, gate=gate) as second:
            if in_memory:
                busy = await second.tasks.rollout("task", "busy")
                calling = asyncio.ensure_future(ask(second, busy, "sleep 1"))
                await running.wait()
            assert await second.tasks.rollouts.finish_unused(60.0) == (1 if in_memory else 2)
            if in_memory:
                release.set()
                await calling
            ended = {row["name"]: bool(row["finished"]) for row in second.store.rollouts.of_task("task")}
            assert ended == {"old": True, "busy": not in_memory, "new": False}
            assert await second.tasks.running("task", "old") is None

    asyncio.run(go())


def age(data: Path, rollout: str, by_s: float) -> None:
    """Make a rollout's last call older, as if the proxy had been away."""
    with closing(sqlite3.connect(data / "forkpoint.sqlite")) as store:
        store.create_function(CHECKSUM_FUNCTION, -1, row_checksum, deterministic=True)
        with store:
            store.execute("UPDATE rollouts SET used_at = ? WHERE name = ?", (time.time() - by_s, rollout))
