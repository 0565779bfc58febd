"""The proxy is killed during calls of several protocols: IDs, states and processes return, and no call runs twice."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from proxy.compat.e2b import connect_rpc as connect
from tests.agents.e2b_requests import Client, calls, joined
from tests.agents.mcp_requests import Agent
from tests.machine import (
    Process,
    Proxy,
    alive,
    assert_nothing_left,
    data_directory,
    require_sandboxes,
    served,
    wait_until,
)
from tests.proxy.compat.docker.test_endpoint import container, execution, start

ONCE = "echo ran >>/root/runs; echo begun; sleep 2; wc -l </root/runs"
"""The command during which the proxy is killed. Its output counts how often it has run in this state."""


@dataclass
class Killable:
    """A proxy that can be killed, and the processes of its earlier lives."""

    machine: Proxy
    client: httpx.Client
    processes: set[Process] = field(default_factory=set)

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", self.machine.port

    def kill(self) -> None:
        """Kill the proxy and start it again. The processes in its sandboxes must end with it."""
        assert self.machine.process is not None
        # The call during which it is killed must not end while its processes are looked for.
        self.machine.process.send_signal(signal.SIGSTOP)
        processes_before = self.machine.processes()
        self.machine.kill()
        assert processes_before
        wait_until(lambda: not alive(processes_before), f"{alive(processes_before)} outlive the proxy")
        self.processes |= processes_before
        self.machine.start()


@pytest.fixture(scope="module")
def proxy() -> Iterator[Killable]:
    """Serve, and check at the end that no process and no control group is left."""
    require_sandboxes()
    with data_directory() as folder, served(folder) as running:
        with httpx.Client(base_url=running.url, timeout=60, trust_env=False) as client:
            killable = Killable(running, client)
            yield killable
        killable.processes |= running.processes()
        groups = running.groups()
        running.stop()
        assert_nothing_left(running, killable.processes, groups)


@contextmanager
def cut() -> Iterator[None]:
    with pytest.raises(httpx.TransportError):
        yield


def walk_e2b(proxy: Killable, task: str, *, kills: bool) -> tuple[list[Any], list[tuple[str, str]]]:
    """Return a client's answers and its steps, without polls, which depend on timing."""
    client = Client(proxy, task, envVars={"TEAM": "blue"})
    client.run("mkfifo /root/gate; echo one >/root/log")
    with client.start("read -r line </root/gate; echo heard $line") as stream:
        pid = next(stream)["start"]["pid"]
        client.run("echo two >>/root/log")
    if kills:
        with cut(), client.start(ONCE) as stream:
            assert "start" in next(stream)
            assert "data" in next(stream)
            proxy.kill()
            joined(stream)
    answers: list[Any] = [client.run(ONCE)]
    processes = client.call("process.Process/List").json()["processes"]
    assert [process["pid"] for process in processes] == [pid]
    with client.stream("process.Process/Connect", connect.envelope({"process": {"pid": pid}})) as stream:
        assert next(stream) == {"start": {"pid": pid}}
        answers.append(client.run("echo go >/root/gate"))
        answers.append(joined(stream))
    answers.append(client.run("cat /root/log /root/runs; echo $TEAM"))
    steps = calls(proxy, task, client.sandbox)
    return answers, [step for step in steps if step[0] != "attend"]


def test_e2b_sandbox_outlives_a_killed_proxy(proxy: Killable) -> None:
    """A sandbox and its background process continue after a kill; the retried call runs once."""
    whole = walk_e2b(proxy, "whole", kills=False)
    assert whole[0][0] == "begun\n1\n"
    assert walk_e2b(proxy, "killed", kills=True) == whole
    # Everything that was recorded answers the next rollout.
    again = walk_e2b(proxy, "killed", kills=False)
    assert (again[0], {outcome for _, outcome in again[1]}) == (whole[0], {"hit"})


def test_container_outlives_a_killed_proxy(proxy: Killable) -> None:
    """A container continues after a kill; its exec instances are gone, as after a daemon's restart."""
    proxy.client.put("/api/v1/tasks/task", json={"driver": "local"}).raise_for_status()
    container_id = container(proxy, "a", Env=["X=7"])
    # The same rollout is also visible through E2B's API.
    e2b_client = Client(proxy, "task", sandbox="a")
    assert e2b_client.control("POST", "/sandboxes/a/pause").status_code == 204
    assert proxy.client.post(f"/t/task/r/a/docker/containers/{container_id}/restart").status_code == 204
    assert start(proxy, "a", execution(proxy, "a", container_id, "echo $X >/root/f")) == (101, {})
    exec_id = execution(proxy, "a", container_id, ONCE)

    def start_exec() -> None:
        # The attached client receives nothing, or half of the output.
        with suppress(OSError, IndexError):
            start(proxy, "a", exec_id)

    starting = threading.Thread(target=start_exec)
    starting.start()
    wait_until(
        lambda: "leased" in [container_id["state"] for container_id in proxy.machine.view("sandboxes")["items"]],
        "nothing runs",
    )
    proxy.kill()
    starting.join()
    details = proxy.client.get(f"/t/task/r/a/docker/containers/{container_id[:12]}/json").json()
    assert (details["Id"], details["State"]["Status"]) == (container_id, "running")
    assert e2b_client.control("GET", "/sandboxes/a").json()["state"] == "paused"
    # Exec instances are kept in memory, as by Docker's daemon.
    assert proxy.client.get(f"/t/task/r/a/docker/exec/{exec_id}/json").status_code == 404
    assert start(proxy, "a", execution(proxy, "a", container_id, ONCE)) == (101, {1: b"begun\n1\n"})
    assert start(proxy, "a", execution(proxy, "a", container_id, "cat /root/f")) == (101, {1: b"7\n"})
    steps = proxy.client.get("/api/v1/tasks/task/rollouts/a").json()["steps"]["items"]
    assert [(step["call"]["tool"], step["outcome"]) for step in steps] == [("run", "miss")] * 4


def test_mcp_sessions_outlive_a_killed_proxy(proxy: Killable) -> None:
    """MCP sessions continue after a kill, an unused one too; an ended one stays ended."""
    proxy.client.put("/api/v1/tasks/mcp", json={"driver": "local"}).raise_for_status()
    responses = [Agent(proxy, "/t/mcp/mcp").send("initialize", {"protocolVersion": "2025-06-18"}) for _ in range(3)]
    agent, idle, ended = (
        Agent(proxy, "/t/mcp/mcp", session=response.headers["mcp-session-id"]) for response in responses
    )
    assert agent.tool("exec", command="X=7; echo one >/root/f").status_code == 200
    assert proxy.client.delete(ended.path, headers=ended.headers).status_code == 204
    cut_calls: list[bool] = []

    def call_tool() -> None:
        with cut():
            agent.tool("exec", command=ONCE)
        cut_calls.append(True)

    calling = threading.Thread(target=call_tool)
    calling.start()
    wait_until(
        lambda: "leased" in [sandbox["state"] for sandbox in proxy.machine.view("sandboxes")["items"]], "nothing runs"
    )
    proxy.kill()
    calling.join()
    assert cut_calls == [True]
    assert agent.tool("exec", command=ONCE).json()["result"]["structuredContent"]["stdout"] == "begun\n1\n"
    assert agent.tool("exec", command="echo $X; cat /root/f").json()["result"]["content"][0]["text"] == "7\none\n"
    # A session without calls is a rollout too; an ended session stays ended.
    assert idle.tool("exec", command="echo $X").json()["result"]["content"][0]["text"] == "\n"
    assert ended.tool("exec", command="echo $X").status_code == 404
