"""`forkpoint serve --workers 2` with real sandboxes: one port, and each task's calls answered by its own worker."""

import json
import os
import re
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy import app
from proxy.settings import Settings
from proxy.shares import Share
from proxy.storage.data_dir import workers_of
from proxy.transfer.backup import restore
from proxy.workers.division import claim
from tests.machine import Proxy, Served, alive, children, data_directory, require_sandboxes, served, wait_until

TASKS = [f"task-{number}" for number in range(4)]
"""Two of each worker, by `Share`."""
CALLS, KILLS = 30, 3


@pytest.fixture(scope="module")
def proxy() -> Iterator[Proxy]:
    require_sandboxes()
    with data_directory() as folder, served(folder, workers="2") as running:
        yield running


def call(client: httpx.Client, task: str, rollout: str, command: str) -> httpx.Response:
    return client.post(f"/t/{task}/r/{rollout}/shell/exec", json={"command": command})


def workers(proxy: Served) -> list[int]:
    """Return the pids of the workers, the one that was started last behind the others."""
    assert proxy.process is not None
    return children(proxy.process.pid)


def test_names_are_of_both_workers() -> None:
    assert {Share(0, 2).worker_of(task) for task in TASKS} == {0, 1}


def test_one_connection_reaches_all_tasks(proxy: Proxy) -> None:
    """It goes from worker to worker with each request of another task, hits and misses alike."""
    with httpx.Client(base_url=proxy.url, timeout=60, limits=httpx.Limits(max_connections=1)) as client:
        for rollout in ("1", "2"):
            for turn in range(3):
                for task in TASKS:
                    answer = call(client, task, rollout, f"X={turn}$X; echo {task} $X").raise_for_status()
                    digits = "".join(map(str, range(turn, -1, -1)))
                    assert answer.json()["stdout"] == f"{task} {digits}\n"
                    assert ("hit" in answer.headers["cache-status"]) == (rollout == "2")
        assert [client.get(f"/api/v1/tasks/{task}").json()["task"] for task in TASKS] == TASKS


def test_large_bodies_go_along(proxy: Proxy) -> None:
    """A body that comes in many pieces is read by the worker that has the task."""
    content = os.urandom(3 << 20)
    with httpx.Client(base_url=proxy.url, timeout=60) as client:
        for task in TASKS:
            path = f"/t/{task}/r/files/shell/files/tmp/large"
            client.put(path, content=content).raise_for_status()
            assert client.get(path).raise_for_status().content == content


def test_pipelined_request_of_another_worker_is_misdirected(proxy: Proxy) -> None:
    """It is refused, and not answered by a worker that has another tree of its task."""
    first = next(task for task in TASKS if Share(0, 2).has(task))
    other = next(task for task in TASKS if not Share(0, 2).has(task))
    body = b'{"command": "true"}'

    def request(task: str, more: bytes) -> bytes:
        head = f"POST /t/{task}/r/p/shell/exec HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
        return head.encode() + more + b"\r\n" + body

    with socket.create_connection(("127.0.0.1", proxy.port), 30) as connection:
        connection.sendall(request(first, b"") + request(other, b"connection: close\r\n"))
        answers = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    assert re.findall(rb"HTTP/1.1 (\d+)", answers) == [b"200", b"421"]


def test_token_alone_finds_its_worker(proxy: Proxy) -> None:
    with httpx.Client(base_url=proxy.url, timeout=60) as client:
        for task in TASKS:
            begun = client.post(f"/api/v1/tasks/{task}/rollouts", json={"rollout": "token"}).raise_for_status().json()
            headers = {"authorization": f"Bearer {begun['token']}"}
            answer = client.post("/e/shell/exec", json={"command": "echo here"}, headers=headers)
            assert answer.raise_for_status().json()["stdout"] == "here\n"


def test_views_show_all_workers(proxy: Proxy) -> None:
    """Lists come in pages with cursors, as those of one process do."""
    with httpx.Client(base_url=proxy.url, timeout=60) as client:
        before = client.get("/api/v1/stats").json()["calls"]
        for number, task in enumerate(TASKS):
            for _ in range(number + 1):
                call(client, task, "views", "echo view").raise_for_status()
        for sort in ("task", "-task", "-created_at"):
            shown, cursor = list[dict[str, Any]](), None
            while True:
                query = {"sort": sort, "limit": "1"} | ({"cursor": cursor} if cursor else {})
                page = client.get("/api/v1/tasks", params=query).raise_for_status().json()
                assert (len(page["items"]), page["total"]) == (1, len(TASKS))
                shown.append(page["items"][0])
                if (cursor := page["next"]) is None:
                    break
            key = sort.removeprefix("-")
            keys = [item[key] for item in shown]
            assert sorted(item["task"] for item in shown) == TASKS
            assert keys == sorted(keys, reverse=sort.startswith("-"))
        assert client.get("/api/v1/stats").json()["calls"] == before + 10
        metrics = client.get("/metrics").text
        assert all(f'forkpoint_calls_total{{worker="{number}",outcome="hit"}}' in metrics for number in range(2))
        for path in ("/api/v1/sandboxes", "/api/v1/snapshots", "/api/v1/videos", "/api/v1/timeline", "/readyz"):
            client.get(path).raise_for_status()
        for path in ("/api/v1/system/history", "/api/v1/system/warnings", "/api/v1/system/wrong-answers"):
            client.get(path).raise_for_status()
        assert client.post("/api/v1/gc").raise_for_status().json()["evicted"] == 0
        assert client.get("/api/v1/tasks", params={"sort": "none"}).status_code == 422
        assert client.get("/api/v1/tasks", params={"cursor": "e30"}).status_code == 422


def test_trajectories_show_all_workers(proxy: Proxy) -> None:
    """Lines are those of each task, in the order in which the rollouts were created."""
    with httpx.Client(base_url=proxy.url, timeout=60) as client:
        for task in reversed(TASKS):
            call(client, task, "trajectories", "echo trajectory").raise_for_status()
        ways = [f"/api/v1/tasks/{task}/trajectories" for task in TASKS]
        own = [line for way in ways for line in client.get(way).raise_for_status().text.splitlines()]
        response = client.get("/api/v1/trajectories").raise_for_status()
        lines = response.text.splitlines()
        times = [json.loads(line)["created_at"] for line in lines]
        assert (sorted(lines), times) == (sorted(own), sorted(times))
        assert response.headers["x-forkpoint-total"] == str(len(lines))
        some = client.get("/api/v1/trajectories", params={"label": "none=0"}).raise_for_status()
        assert (some.text, some.headers["x-forkpoint-total"]) == ("", "0")


@pytest.mark.parametrize("snapshots", [False, True])
def test_backup_has_all_workers(proxy: Proxy, tmp_path: Path, snapshots: bool) -> None:
    with httpx.Client(base_url=proxy.url, timeout=60) as client:
        for task in TASKS:
            call(client, task, "kept", f"echo {task} > kept").raise_for_status()
        backup = client.get("/api/v1/backup", params={"snapshots": snapshots}).raise_for_status()
    (tmp_path / "backup").write_bytes(backup.content)
    restored = restore(tmp_path / "backup", tmp_path / "data")
    assert (restored.tasks, backup.headers["content-type"]) == (len(TASKS), "application/x-tar")
    assert workers_of(tmp_path / "data") == 2


@pytest.mark.parametrize(("by", "groups"), [("task", TASKS), ("run", [None]), ("endpoint", ["shell"])])
def test_a_report_shows_all_workers(proxy: Proxy, by: str, groups: list[str | None]) -> None:
    """Sums are those of all tasks' reports, and medians are made of all calls."""
    with httpx.Client(base_url=proxy.url, timeout=60) as client:
        for task in TASKS:
            call(client, task, f"report-{by}", "echo report").raise_for_status()
        one = [client.get(f"/api/v1/tasks/{task}/report", params={"by": "task"}).json() for task in TASKS]
        whole = client.get("/api/v1/report", params={"by": by, "price": "2"}).raise_for_status().json()
        for name in ("calls", "rollouts", "executed_s", "saved_s"):
            assert whole["total"][name] == pytest.approx(sum(each["total"][name] for each in one))
        executed = [
            sum(executed) for executed in zip(*([arm["executed"] for arm in each["arms"]] for each in one), strict=True)
        ]
        assert [arm["executed"] for arm in whole["arms"]] == executed
        assert [row["group"] for row in whole["rows"]] == groups
        times = [row["p50_s"] for row in whole["rows"]]
        assert min(times) <= whole["total"]["p50_s"] <= max(times)
        assert client.get("/api/v1/report", params={"price": "-1"}).status_code == 422


def test_address_is_found_by_the_directory(proxy: Proxy) -> None:
    assert (proxy.data / "address").read_text().strip() == proxy.url


def test_another_number_of_workers_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' own logs stay as they are set up."""
    monkeypatch.setattr(app, "setup", lambda *_, **__: None)
    claim(tmp_path, 2)
    with pytest.raises(app.StartError, match="divided between 2 workers"):
        app.run(Settings(data=tmp_path, port=0))


def test_kills_under_load_lose_no_answer(proxy: Proxy) -> None:
    """Whenever a worker is killed, each answer is that of the rollout's own count of calls.

    A call whose connection broke may have been executed, and the proxy then shows it. One that got 503 was not.
    """
    answered, faults, changed = [0], list[BaseException](), threading.Condition()

    def walk(task: str) -> None:
        try:
            with httpx.Client(base_url=proxy.url, timeout=60) as client:
                turn = 0
                while turn < CALLS:
                    with suppress(httpx.TransportError):
                        view = client.get(f"/api/v1/tasks/{task}/rollouts/killed?limit=1")
                        assert view.status_code in (200, 404, 503), view.text
                        if view.status_code == 503:
                            continue
                        turn = view.json()["calls"] if view.status_code == 200 else 0
                        if turn == CALLS:
                            break
                        answer = call(client, task, "killed", "N=$((N+1)); echo $N >> log; wc -l < log; echo $N")
                        if answer.status_code != 503:
                            assert answer.raise_for_status().json()["stdout"] == f"{turn + 1}\n{turn + 1}\n"
                        else:
                            assert answer.headers["retry-after"] == "1"
                    with changed:
                        answered[0] += 1
                        changed.notify_all()
        except BaseException as fault:  # noqa: BLE001 - the test's thread reports it
            with changed:
                faults.append(fault)
                changed.notify_all()

    threads = [threading.Thread(target=walk, args=(task,)) for task in TASKS]
    for thread in threads:
        thread.start()
    for kill in range(1, KILLS + 1):
        with changed:
            # All calls together are many more, so that each kill meets some of them.
            assert changed.wait_for(lambda kill=kill: bool(faults) or answered[0] >= 8 * kill, 180)  # type: ignore[misc]
        wait_until(lambda: len(workers(proxy)) == 2, "the worker was not started again")
        with suppress(ProcessLookupError):
            os.kill(workers(proxy)[kill % 2], signal.SIGKILL)
    for thread in threads:
        thread.join(300)
    assert not faults, faults
    assert not any(thread.is_alive() for thread in threads)


def test_killed_parent_leaves_nothing(proxy: Proxy) -> None:
    """The workers end in order, with their sandboxes. It is the last test of this proxy."""
    with httpx.Client(base_url=proxy.url, timeout=60) as client:
        for task in TASKS:
            call(client, task, "left", "sleep 1000 &").raise_for_status()
    processes = proxy.processes()
    proxy.kill()
    wait_until(lambda: not alive(processes), "a process of the proxy goes on", within_s=60)
