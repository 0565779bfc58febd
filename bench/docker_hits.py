"""The cost of a hit over Docker's API: the five requests of `docker exec`, and the `docker` command line itself.

    uv run python -m bench.docker_hits [commands]

The three requests that run a command (create an exec, start it on a connection of its own, ask for its exit code) are
compared with three of a bare echo, on as many connections. The command line is measured if it is installed.
"""

import http.client
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from bench.client import Server
from bench.hotpath import echo
from bench.machine import cpu_seconds
from forkpoint.ephemeral_proxy import ephemeral_proxy

BASE = "/t/bench/r/{}/docker"
UPGRADE = "Connection: Upgrade\r\nUpgrade: tcp\r\n"


class Agent:
    """A rollout that sends the same requests as the command line."""

    def __init__(self, address: tuple[str, int], rollout: str) -> None:
        self._address, self._base = address, BASE.format(rollout)
        self._connection = http.client.HTTPConnection(*address)
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
        self.execute(text, lap)
        return took | {"all five": sum(took.values())}

    def execute(self, text: str, lap: Callable[[str], object] = lambda _: None) -> None:
        """Run a command by three requests."""
        body = {"Cmd": ["sh", "-c", text], "AttachStdout": True, "AttachStderr": True}
        instance = self.json("POST", f"/v1.44/containers/{self.box}/exec", body)["Id"]
        lap("exec create")
        assert b"same" in self.start(instance)
        lap("exec start")
        assert self.json("GET", f"/v1.44/exec/{instance}/json")["ExitCode"] == 0
        lap("exec inspect")


def three_echoes(address: tuple[str, int], connection: http.client.HTTPConnection) -> None:
    """Send three requests of about the same sizes, the second on a connection of its own."""
    for body in (b"x" * 90, b""):
        connection.request("POST", "/", body, {"Content-Type": "application/json"})
        connection.getresponse().read()
    with socket.create_connection(address) as own:
        own.sendall(b"POST / HTTP/1.1\r\nHost: h\r\nConnection: close\r\nContent-Length: 28\r\n\r\n" + b"x" * 28)
        while own.recv(1 << 16):
            pass


def cpu_us(server: Server, send: Callable[[], object], count: int) -> float:
    """Return the CPU microseconds that a server spends for each of some sendings."""
    before = cpu_seconds(server.pid)
    for _ in range(count):
        send()
    return (cpu_seconds(server.pid) - before) / count * 1e6


def command_line(address: tuple[str, int], count: int) -> list[float]:
    """Return the milliseconds of `docker exec` for a hit."""
    own = {"PATH": os.environ["PATH"], "HOME": "/nonexistent"}
    host = f"tcp://{address[0]}:{address[1]}{BASE.format('cli')}"
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
    with echo() as floor, ephemeral_proxy(settings={"any_image": True}) as proxy:
        server = Server(proxy.url, proxy.pid)
        Agent(server.address, "first").command("echo same")
        agent = Agent(server.address, "second")
        # Its first answer waits until the way to the state of the first rollout is kept.
        agent.execute("echo same")
        beside = http.client.HTTPConnection(*floor.address)
        three_echoes(floor.address, beside)
        ratios = [
            cpu_us(floor, lambda: three_echoes(floor.address, beside), count)
            / cpu_us(server, lambda: agent.execute("echo same"), count)
            for _ in range(3)
        ]
        print(f"three requests of a bare echo take {statistics.median(ratios):.2f} of the CPU of a hit's three")
        rows = [agent.command("echo same") for _ in range(count)]
        for name in rows[0]:
            show(name, [row[name] for row in rows])
        if shutil.which("docker"):
            show("docker exec", command_line(server.address, min(count, 50)))


def show(name: str, took: list[float]) -> None:
    cuts = statistics.quantiles(took, n=20)
    print(f"{name:14} p50 {statistics.median(took):7.3f} ms   p95 {cuts[18]:7.3f} ms")


if __name__ == "__main__":
    main()
