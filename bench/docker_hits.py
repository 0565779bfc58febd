"""The cost of a hit over Docker's API: the five requests of `docker exec`, and the `docker` command line itself.

    uv run python -m bench.docker_hits [commands]

The proxy uses the in-memory driver, so only its own work is measured. The command line is measured if it is installed.
"""

import http.client
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.proxy.serving import Running, serving

BASE = "/t/bench/r/{}/docker"
UPGRADE = "Connection: Upgrade\r\nUpgrade: tcp\r\n"


class Agent:
    """A rollout that sends the same requests as the command line."""

    def __init__(self, running: Running, rollout: str) -> None:
        self._address, self._base = running.address, BASE.format(rollout)
        self._connection = http.client.HTTPConnection(*running.address)
        body = {"Image": "any", "Cmd": ["sleep", "2h"]}
        self.box = self.json("POST", "/v1.44/containers/create", body)["Id"]
        self.send("POST", f"/v1.44/containers/{self.box}/start")

    def send(self, method: str, path: str, body: Any = None) -> bytes:
        content = None if body is None else json.dumps(body)
        self._connection.request(method, self._base + path, content, {"Content-Type": "application/json"})
        return self._connection.getresponse().read()

    def json(self, method: str, path: str, body: Any = None) -> Any:
        return json.loads(self.send(method, path, body))

    def start(self, one: str) -> bytes:
        body = b'{"Detach":false,"Tty":false}'
        head = f"POST {self._base}/v1.44/exec/{one}/start HTTP/1.1\r\nHost: 127.0.0.1\r\n{UPGRADE}"
        with socket.create_connection(self._address) as connection:
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            connection.shutdown(socket.SHUT_WR)
            answer = b""
            while chunk := connection.recv(1 << 16):
                answer += chunk
        return answer

    def command(self, text: str) -> dict[str, float]:
        """Run a command; return the milliseconds of each request."""
        took, at = {}, time.perf_counter()

        def lap(name: str) -> None:
            nonlocal at
            took[name], at = (time.perf_counter() - at) * 1e3, time.perf_counter()

        self.send("HEAD", "/_ping")
        lap("ping")
        self.send("GET", f"/v1.44/containers/{self.box}/json")
        lap("inspect")
        body = {"Cmd": ["sh", "-c", text], "AttachStdout": True, "AttachStderr": True}
        instance = self.json("POST", f"/v1.44/containers/{self.box}/exec", body)["Id"]
        lap("exec create")
        assert b"same" in self.start(instance)
        lap("exec start")
        assert self.json("GET", f"/v1.44/exec/{instance}/json")["ExitCode"] == 0
        lap("exec inspect")
        return took | {"all five": sum(took.values())}


def command_line(running: Running, count: int) -> list[float]:
    """Return the milliseconds of `docker exec` for a hit."""
    own = {"PATH": os.environ["PATH"], "HOME": "/nonexistent"}
    host = f"tcp://{running.address[0]}:{running.address[1]}{BASE.format('cli')}"
    docker = ["docker", "-H", host]
    subprocess.run(
        [*docker, "run", "-d", "--name", "box", "any", "sleep", "2h"], env=own, check=True, capture_output=True
    )
    took = []
    for _ in range(count):
        began = time.perf_counter()
        subprocess.run([*docker, "exec", "box", "sh", "-c", "echo same"], env=own, check=True, capture_output=True)
        took.append((time.perf_counter() - began) * 1e3)
    return took


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 500
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder), any_image=True) as running:
        Agent(running, "first").command("echo same")
        agent = Agent(running, "second")
        rows = [agent.command("echo same") for _ in range(count)]
        for name in rows[0]:
            show(name, [row[name] for row in rows])
        if shutil.which("docker"):
            show("docker exec", command_line(running, min(count, 50)))


def show(name: str, took: list[float]) -> None:
    cuts = statistics.quantiles(took, n=20)
    print(f"{name:14} p50 {statistics.median(took):7.3f} ms   p95 {cuts[18]:7.3f} ms")


if __name__ == "__main__":
    main()
