"""The docker endpoint with the in-memory driver: shared executions, failures, and restarts."""

import socket
import struct
from pathlib import Path
from typing import Any

import pytest

from proxy.execution.errors import StateLostError
from sandboxes.calls import ToolCall
from sandboxes.errors import SandboxError
from tests.machine import Answering
from tests.proxy.serving import Running, serving

UPGRADE = "Connection: Upgrade\r\nUpgrade: tcp\r\n"


def container(running: Answering, rollout: str, **body: Any) -> str:
    """Create and start a container; return its ID."""
    base = f"/t/task/r/{rollout}/docker"
    create = {"Image": "any", "Cmd": ["sleep", "2h"], **body}
    response = running.client.post(f"{base}/containers/create", json=create)
    assert response.status_code == 201, response.text
    container_id = str(response.json()["Id"])
    assert running.client.post(f"{base}/containers/{container_id}/start").status_code == 204
    return container_id


def execution(running: Answering, rollout: str, container_id: str, command: str, **body: Any) -> str:
    """Create an exec instance; return its ID."""
    create = {"Cmd": ["sh", "-c", command], "AttachStdout": True, "AttachStderr": True, **body}
    response = running.client.post(f"/t/task/r/{rollout}/docker/containers/{container_id}/exec", json=create)
    assert response.status_code == 201, response.text
    return str(response.json()["Id"])


def start(running: Answering, rollout: str, exec_id: str, more: str = "") -> tuple[int, dict[int, bytes]]:
    """Start an exec with an upgrade and further headers; return the status and the output by stream."""
    body = b'{"Detach":false,"Tty":false}'
    head = f"POST /t/task/r/{rollout}/docker/exec/{exec_id}/start HTTP/1.1\r\nHost: 127.0.0.1\r\n{UPGRADE}{more}"
    with socket.create_connection(running.address, timeout=30) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        while chunk := connection.recv(65536):
            answer += chunk
    first, _, data = answer.partition(b"\r\n\r\n")
    return int(first.split()[1]), frames(data) if first.startswith(b"HTTP/1.1 101") else {0: data}


def frames(data: bytes) -> dict[int, bytes]:
    """Return the output in frames, by stream."""
    streams: dict[int, bytes] = {}
    while data:
        kind, length = struct.unpack(">BxxxI", data[:8])
        streams[kind] = streams.get(kind, b"") + data[8 : 8 + length]
        data = data[8 + length :]
    return {kind: output for kind, output in streams.items() if output}


def exit_code(running: Running, rollout: str, exec_id: str) -> Any:
    return running.client.get(f"/t/task/r/{rollout}/docker/exec/{exec_id}/json").json()["ExitCode"]


class Faults:
    """A gate of the in-memory driver at which the next `remaining` commands fail."""

    def __init__(self, error: Exception | None = None) -> None:
        self.remaining, self.error = 0, error or SandboxError("the machine is on fire")

    async def __call__(self, call: ToolCall) -> None:
        if call.endpoint != "process":
            return
        if self.remaining:
            self.remaining -= 1
            raise self.error


def test_equal_commands_run_once(tmp_path: Path) -> None:
    """Three rollouts start the same command in containers of their own; it runs once, and all get its output."""
    with serving(tmp_path, any_image=True) as running:
        for rollout in ("a", "b", "c"):
            container_id = container(running, rollout, Env=["X=7"])
            exec_id = execution(running, rollout, container_id, "echo $X > f; cat f; no-such-word")
            assert start(running, rollout, exec_id) == (101, {1: b"7\n", 2: b"no-such-word: command not found\n"})
            assert exit_code(running, rollout, exec_id) == 127
        assert running.driver.executed == ["echo $X > f; cat f; no-such-word"]


def test_failure_before_stream_is_503(tmp_path: Path) -> None:
    """A sandbox failure before the stream opens is an error response in Docker's form, and is not recorded."""
    faults = Faults()
    with serving(tmp_path, gate=faults, any_image=True) as running:
        container_id = container(running, "a")
        faults.remaining = 1
        exec_id = execution(running, "a", container_id, "echo hi")
        status, output = start(running, "a", exec_id)
        assert (status, output[0]) == (503, b'{"message":"the machine is on fire"}\n')
        assert exit_code(running, "a", exec_id) == 125
        # A retry succeeds.
        retry = execution(running, "a", container_id, "echo hi")
        assert start(running, "a", retry) == (101, {1: b"hi\n"})
        steps = running.client.get("/api/v1/tasks/task/rollouts/a").json()["steps"]["items"]
        assert [step["outcome"] for step in steps] == ["miss"]


def test_failure_after_head_is_sent_in_stream(tmp_path: Path) -> None:
    """An exec with stdin has its stream open before it runs, so its failure is reported as stderr."""
    faults = Faults()
    with serving(tmp_path, gate=faults, any_image=True) as running:
        container_id = container(running, "a")
        faults.remaining = 1
        exec_id = execution(running, "a", container_id, "echo hi", AttachStdin=True)
        assert start(running, "a", exec_id) == (101, {2: b"forkpoint: the machine is on fire\n"})
        assert exit_code(running, "a", exec_id) == 125


@pytest.mark.parametrize("agent", ["Docker-Client/28.2.2 (linux)", "compose/2.26.1"])
def test_command_line_gets_errors_in_the_stream(tmp_path: Path, agent: str) -> None:
    """Of another response it would show only that the upgrade failed. Its exit code is that of a failed daemon."""
    faults = Faults()
    with serving(tmp_path, gate=faults, any_image=True) as running:
        container_id = container(running, "a")
        faults.remaining = 1
        exec_id = execution(running, "a", container_id, "echo hi")
        told = start(running, "a", exec_id, f"User-Agent: {agent}\r\n")
        assert told == (101, {2: b"forkpoint: the machine is on fire\n"})
        assert exit_code(running, "a", exec_id) == 125
        # What is no exec has no exit code to ask for.
        assert start(running, "a", "no-such-exec", f"User-Agent: {agent}\r\n")[0] == 404


def test_container_whose_state_is_lost_has_ended(tmp_path: Path) -> None:
    """Harnesses notice it as the death of a container: inspection, waiting, and the next exec say so, and why."""
    faults = Faults(StateLostError("the replay reaches another state"))
    base = "/t/task/r/a/docker/containers"
    with serving(tmp_path, gate=faults, any_image=True) as running:
        container_id = container(running, "a")
        first = execution(running, "a", container_id, "echo hi")
        faults.remaining = 1
        status, output = start(running, "a", first)
        assert (status, output[0]) == (409, b'{"message":"the replay reaches another state"}\n')
        state = running.client.get(f"{base}/{container_id}/json").json()["State"]
        assert (state["Running"], state["Status"], state["ExitCode"]) == (False, "exited", 137)
        assert state["Error"] == "the replay reaches another state"
        assert running.client.post(f"{base}/{container_id}/wait").json()["StatusCode"] == 137
        why = f"Container {container_id} is not running: the replay reaches another state"
        for path in ("exec", "archive?path=/x"):
            refused = running.client.request("GET" if "?" in path else "POST", f"{base}/{container_id}/{path}", json={})
            assert (refused.status_code, refused.json()["message"]) == (409, why)
        assert running.client.get(f"{base}/json").json() == []
        assert running.client.delete(f"{base}/{container_id}").status_code == 204
        # The rollout's name is free again.
        assert start(running, "a", execution(running, "a", container(running, "a"), "echo hi")) == (101, {1: b"hi\n"})


def test_containers_of_one_url_are_separate_rollouts(tmp_path: Path) -> None:
    """A second container below the same URL is a rollout of its own, with its own files."""
    with serving(tmp_path, any_image=True) as running:
        first, second = container(running, "a"), container(running, "a")
        rollouts = running.client.get("/api/v1/tasks/task/rollouts").json()["items"]
        assert sorted(rollout["rollout"] for rollout in rollouts) == ["a", "a~2"]
        for container_id, text in ((first, "1"), (second, "2")):
            start(running, "a", execution(running, "a", container_id, f"echo {text} > f"))
        assert start(running, "a", execution(running, "a", first, "cat f"))[1] == {1: b"1\n"}
        base = "/t/task/r/a/docker/containers"
        assert running.client.delete(f"{base}/{first}").status_code == 409
        assert running.client.delete(f"{base}/{first}?force=1").status_code == 204
        # The rollout's name is free again, so the next container begins at the root.
        third = container(running, "a")
        assert start(running, "a", execution(running, "a", third, "cat f"))[1][2].startswith(b"cat: f: No such file")


def test_containers_outlive_a_restart(tmp_path: Path) -> None:
    """After a restart a container has its state, its labels and its place in the tree; a removed one stays removed."""
    with serving(tmp_path, any_image=True) as running:
        container_id = container(running, "a", Env=["X=7"], Labels={"kept": "yes"})
        start(running, "a", execution(running, "a", container_id, "echo $X > f"))
        gone = container(running, "b")
        running.client.delete(f"/t/task/r/b/docker/containers/{gone}?force=1")
    with serving(tmp_path, any_image=True) as running:
        details = running.client.get(f"/t/task/r/a/docker/containers/{container_id[:12]}/json").json()
        shown = details["Id"], details["State"]["Status"], details["Config"]["Labels"]
        assert shown == (container_id, "running", {"kept": "yes"})
        assert start(running, "a", execution(running, "a", container_id, "cat f")) == (101, {1: b"7\n"})
        assert running.client.get(f"/t/task/r/b/docker/containers/{gone}/json").status_code == 404


def test_a_log_is_of_the_container_s_own_command(tmp_path: Path) -> None:
    """Also after a restart. Another rollout has run the same command, which this container has not been started for."""
    base, command = "/t/task/r/{}/docker/containers", ["echo", "hi"]
    with serving(tmp_path, any_image=True) as running:
        ran = container(running, "a", Cmd=command)
        assert running.client.post(f"{base.format('a')}/{ran}/wait").json()["StatusCode"] == 0
        created = running.client.post(f"{base.format('b')}/create", json={"Image": "any", "Cmd": command}).json()["Id"]
    with serving(tmp_path, any_image=True) as running:
        for rollout, container_id, log in (("a", ran, {1: b"hi\n"}), ("b", created, {})):
            shown = running.client.get(f"{base.format(rollout)}/{container_id}/logs?stdout=1&stderr=1")
            assert frames(shown.content) == log


def test_project_outlives_a_restart_once_it_has_begun(tmp_path: Path) -> None:
    """Before its first call a project is only a plan, which a restart forgets."""
    labels = {"com.docker.compose.project": "p", "com.docker.compose.service": "main"}
    with serving(tmp_path, any_image=True) as running:
        begun = container(running, "a", Labels=labels)
        assert running.client.get("/api/v1/tasks/task/rollouts").json()["items"] == []
        start(running, "a", execution(running, "a", begun, "echo 7 > f"))
        planned = container(running, "b", Labels=labels)
    with serving(tmp_path, any_image=True) as running:
        assert start(running, "a", execution(running, "a", begun, "cat f")) == (101, {1: b"7\n"})
        refused = running.client.post(f"/t/task/r/a/docker/containers/{begun}/stop")
        again = running.client.post(f"/t/task/r/a/docker/containers/{begun}/start")
        assert (refused.status_code, again.status_code) == (204, 409)
        assert running.client.get(f"/t/task/r/b/docker/containers/{planned}/json").status_code == 404
        assert running.client.delete(f"/t/task/r/a/docker/containers/{begun}").status_code == 204
        assert running.client.get("/api/v1/tasks/task/rollouts").json()["items"][0]["state"] == "finished"


def test_finished_rollout_removes_container(tmp_path: Path) -> None:
    """A rollout that is finished through the control plane is no container any more."""
    with serving(tmp_path, any_image=True) as running:
        container_id = container(running, "a")
        exec_id = execution(running, "a", container_id, "echo hi")
        assert running.client.delete("/api/v1/tasks/task/rollouts/a").is_success
        assert start(running, "a", exec_id)[0] == 404
        assert running.client.get(f"/t/task/r/a/docker/containers/{container_id}/json").status_code == 404
