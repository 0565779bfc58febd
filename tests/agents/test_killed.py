"""A proxy killed under the agents' own protocols: ids, places and processes are there again, and no call ran twice."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from proxy.compat.e2b import connect_rpc as connect
from tests.agents.test_e2b_wire import Client, calls, joined
from tests.agents.test_mcp import Agent
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
"""What the proxy is killed in: run again where it has run, it would tell so."""


@dataclass
class Killable:
    """A proxy of its own, and what came from it before it was killed."""

    machine: Proxy
    client: httpx.Client
    processes: set[Process] = field(default_factory=set)

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", self.machine.port

    def kill(self) -> None:
        """Kill it and start it again: what ran in its sandboxes ends with it."""
        here = self.machine.processes()
        self.machine.kill()
        assert here
        wait_until(lambda: not alive(here), f"{alive(here)} outlive the proxy", within_s=5)
        self.processes |= here
        self.machine.start()


@pytest.fixture(scope="module")
def proxy() -> Iterator[Killable]:
    """Serve; in the end nothing may be left of any of its lives."""
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
    """Return what a sandbox's client is told, and its calls but for looks at what runs: they come as output does."""
    client = Client(proxy, task, envVars={"TEAM": "blue"})
    client.run("mkfifo /root/gate; echo one >/root/log")
    with client.start("read -r line </root/gate; echo heard $line") as told:
        pid = next(told)["start"]["pid"]
        client.run("echo two >>/root/log")
    if kills:
        with cut(), client.start(ONCE) as told:
            assert "start" in next(told)
            assert "data" in next(told)
            proxy.kill()
            joined(told)
    said: list[Any] = [client.run(ONCE)]
    listed = client.call("process.Process/List").json()["processes"]
    assert [process["pid"] for process in listed] == [pid]
    with client.stream("process.Process/Connect", connect.envelope({"process": {"pid": pid}})) as told:
        assert next(told) == {"start": {"pid": pid}}
        said.append(client.run("echo go >/root/gate"))
        said.append(joined(told))
    said.append(client.run("cat /root/log /root/runs; echo $TEAM"))
    steps = calls(proxy, task, client.sandbox)
    return said, [step for step in steps if step[0] != "attend"]


def test_an_e2b_sandbox_and_its_processes_go_on_where_the_proxy_was_killed(proxy: Killable) -> None:
    whole = walk_e2b(proxy, "whole", kills=False)
    assert whole[0][0] == "begun\n1\n"
    assert walk_e2b(proxy, "killed", kills=True) == whole
    # What was recorded is all there for whoever comes the same way.
    again = walk_e2b(proxy, "killed", kills=False)
    assert (again[0], {outcome for _, outcome in again[1]}) == (whole[0], {"hit"})


def test_a_container_goes_on_where_the_proxy_was_killed(proxy: Killable) -> None:
    proxy.client.put("/api/v1/tasks/task", json={"driver": "local"}).raise_for_status()
    box = container(proxy, "a", Env=["X=7"])
    # The same rollout, as another protocol's client knows it.
    beside = Client(proxy, "task", sandbox="a")
    assert beside.control("POST", "/sandboxes/a/pause").status_code == 204
    assert proxy.client.post(f"/t/task/r/a/docker/containers/{box}/restart").status_code == 204
    assert start(proxy, "a", execution(proxy, "a", box, "echo $X >/root/f")) == (101, {})
    one = execution(proxy, "a", box, ONCE)

    def hear() -> None:
        # What an attached client is told of it: nothing, or half of it.
        with suppress(OSError, IndexError):
            start(proxy, "a", one)

    heard = threading.Thread(target=hear)
    heard.start()
    wait_until(lambda: "leased" in [box["state"] for box in proxy.machine.view("sandboxes")], "nothing runs")
    proxy.kill()
    heard.join()
    told = proxy.client.get(f"/t/task/r/a/docker/containers/{box[:12]}/json").json()
    assert (told["Id"], told["State"]["Status"]) == (box, "running")
    assert beside.control("GET", "/sandboxes/a").json()["state"] == "paused"
    # Instances are gone with the connections that had them, as they are when a daemon is killed.
    assert proxy.client.get(f"/t/task/r/a/docker/exec/{one}/json").status_code == 404
    assert start(proxy, "a", execution(proxy, "a", box, ONCE)) == (101, {1: b"begun\n1\n"})
    assert start(proxy, "a", execution(proxy, "a", box, "cat /root/f")) == (101, {1: b"7\n"})
    steps = proxy.client.get("/api/v1/tasks/task/rollouts/a").json()["steps"]
    assert [(step["call"]["tool"], step["outcome"]) for step in steps] == [("run", "miss")] * 4


def test_a_session_of_mcp_goes_on_where_the_proxy_was_killed(proxy: Killable) -> None:
    proxy.client.put("/api/v1/tasks/mcp", json={"driver": "local"}).raise_for_status()
    opened = [Agent(proxy, "/t/mcp/mcp").send("initialize", {"protocolVersion": "2025-06-18"}) for _ in range(3)]
    agent, idle, ended = (Agent(proxy, "/t/mcp/mcp", session=one.headers["mcp-session-id"]) for one in opened)
    assert agent.tool("exec", command="X=7; echo one >/root/f").status_code == 200
    assert proxy.client.delete(ended.path, headers=ended.headers).status_code == 204
    cuts: list[bool] = []

    def ask() -> None:
        with cut():
            agent.tool("exec", command=ONCE)
        cuts.append(True)

    asking = threading.Thread(target=ask)
    asking.start()
    wait_until(lambda: "leased" in [box["state"] for box in proxy.machine.view("sandboxes")], "nothing runs")
    proxy.kill()
    asking.join()
    assert cuts == [True]
    assert agent.tool("exec", command=ONCE).json()["result"]["structuredContent"]["stdout"] == "begun\n1\n"
    assert agent.tool("exec", command="echo $X; cat /root/f").json()["result"]["content"][0]["text"] == "7\none\n"
    # One that had asked for nothing is a rollout all the same; one that had ended stays so.
    assert idle.tool("exec", command="echo $X").json()["result"]["content"][0]["text"] == "\n"
    assert ended.tool("exec", command="echo $X").status_code == 404
