"""Docker's endpoint before the in-memory driver: one flight, faults of ours, and what is kept over a restart."""

import socket
import struct
from pathlib import Path
from typing import Any

from sandboxes.calls import ToolCall
from sandboxes.errors import SandboxError
from tests.machine import Answering
from tests.proxy.serving import Running, serving

UPGRADE = "Connection: Upgrade\r\nUpgrade: tcp\r\n"


def container(running: Answering, rollout: str, **body: Any) -> str:
    base = f"/t/task/r/{rollout}/docker"
    asked = {"Image": "any", "Cmd": ["sleep", "2h"], **body}
    made = running.client.post(f"{base}/containers/create", json=asked)
    assert made.status_code == 201, made.text
    number = str(made.json()["Id"])
    assert running.client.post(f"{base}/containers/{number}/start").status_code == 204
    return number


def execution(running: Answering, rollout: str, box: str, command: str, **body: Any) -> str:
    asked = {"Cmd": ["sh", "-c", command], "AttachStdout": True, "AttachStderr": True, **body}
    told = running.client.post(f"/t/task/r/{rollout}/docker/containers/{box}/exec", json=asked)
    assert told.status_code == 201, told.text
    return str(told.json()["Id"])


def start(running: Answering, rollout: str, one: str) -> tuple[int, dict[int, bytes]]:
    """Start an exec as the command line does; return the status, and what came on each stream."""
    body = b'{"Detach":false,"Tty":false}'
    head = f"POST /t/task/r/{rollout}/docker/exec/{one}/start HTTP/1.1\r\nHost: 127.0.0.1\r\n{UPGRADE}"
    with socket.create_connection(running.address, timeout=20) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        while chunk := connection.recv(65536):
            answer += chunk
    first, _, data = answer.partition(b"\r\n\r\n")
    return int(first.split()[1]), frames(data) if first.startswith(b"HTTP/1.1 101") else {0: data}


def frames(data: bytes) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    while data:
        kind, length = struct.unpack(">BxxxI", data[:8])
        found[kind] = found.get(kind, b"") + data[8 : 8 + length]
        data = data[8 + length :]
    return {kind: said for kind, said in found.items() if said}


def exit_code(running: Running, rollout: str, one: str) -> Any:
    return running.client.get(f"/t/task/r/{rollout}/docker/exec/{one}/json").json()["ExitCode"]


class Faults:
    """A gate at which a command fails as often as it is told to."""

    def __init__(self) -> None:
        self.left = 0

    async def __call__(self, call: ToolCall) -> None:
        if call.endpoint != "process":
            return
        if self.left:
            self.left -= 1
            raise SandboxError("the machine is on fire")


def test_a_command_of_several_rollouts_is_run_once_and_told_to_each(tmp_path: Path) -> None:
    with serving(tmp_path, any_image=True) as running:
        for rollout in ("a", "b", "c"):
            box = container(running, rollout, Env=["X=7"])
            one = execution(running, rollout, box, "echo $X > f; cat f; no-such-word")
            assert start(running, rollout, one) == (101, {1: b"7\n", 2: b"no-such-word: command not found\n"})
            assert exit_code(running, rollout, one) == 127
        assert running.driver.executed == ["echo $X > f; cat f; no-such-word"]


def test_trouble_of_ours_before_the_stream_is_503_in_dockers_form_and_nothing_is_recorded(tmp_path: Path) -> None:
    faults = Faults()
    with serving(tmp_path, gate=faults, any_image=True) as running:
        box = container(running, "a")
        faults.left = 1
        one = execution(running, "a", box, "echo hi")
        status, told = start(running, "a", one)
        assert (status, told[0]) == (503, b'{"message":"the machine is on fire"}\n')
        assert exit_code(running, "a", one) == 125
        # Whoever asks again is answered.
        again = execution(running, "a", box, "echo hi")
        assert start(running, "a", again) == (101, {1: b"hi\n"})
        steps = running.client.get("/api/v1/tasks/task/rollouts/a").json()["steps"]
        assert [step["outcome"] for step in steps] == ["miss"]


def test_trouble_after_the_streams_head_is_told_in_the_stream(tmp_path: Path) -> None:
    faults = Faults()
    with serving(tmp_path, gate=faults, any_image=True) as running:
        box = container(running, "a")
        faults.left = 1
        one = execution(running, "a", box, "echo hi", AttachStdin=True)
        assert start(running, "a", one) == (101, {2: b"forkpoint: the machine is on fire\n"})
        assert exit_code(running, "a", one) == 125


def test_containers_of_one_url_are_rollouts_beside_one_another(tmp_path: Path) -> None:
    with serving(tmp_path, any_image=True) as running:
        first, second = container(running, "a"), container(running, "a")
        told = running.client.get("/api/v1/tasks/task/rollouts").json()
        assert sorted(one["rollout"] for one in told) == ["a", "a~2"]
        for box, text in ((first, "1"), (second, "2")):
            start(running, "a", execution(running, "a", box, f"echo {text} > f"))
        assert start(running, "a", execution(running, "a", first, "cat f"))[1] == {1: b"1\n"}
        base = "/t/task/r/a/docker/containers"
        assert running.client.delete(f"{base}/{first}").status_code == 409
        assert running.client.delete(f"{base}/{first}?force=1").status_code == 204
        # Its name is free: the next one begins at the root.
        third = container(running, "a")
        assert start(running, "a", execution(running, "a", third, "cat f"))[1][2].startswith(b"cat: f: No such file")


def test_containers_are_there_after_a_restart_where_they_were(tmp_path: Path) -> None:
    with serving(tmp_path, any_image=True) as running:
        box = container(running, "a", Env=["X=7"], Labels={"kept": "yes"})
        start(running, "a", execution(running, "a", box, "echo $X > f"))
        gone = container(running, "b")
        running.client.delete(f"/t/task/r/b/docker/containers/{gone}?force=1")
    with serving(tmp_path, any_image=True) as running:
        told = running.client.get(f"/t/task/r/a/docker/containers/{box[:12]}/json").json()
        assert (told["Id"], told["State"]["Status"], told["Config"]["Labels"]) == (box, "running", {"kept": "yes"})
        assert start(running, "a", execution(running, "a", box, "cat f")) == (101, {1: b"7\n"})
        assert running.client.get(f"/t/task/r/b/docker/containers/{gone}/json").status_code == 404


def test_a_finished_rollout_is_a_container_no_more(tmp_path: Path) -> None:
    with serving(tmp_path, any_image=True) as running:
        box = container(running, "a")
        one = execution(running, "a", box, "echo hi")
        assert running.client.delete("/api/v1/tasks/task/rollouts/a").is_success
        assert start(running, "a", one)[0] == 404
        assert running.client.get(f"/t/task/r/a/docker/containers/{box}/json").status_code == 404
