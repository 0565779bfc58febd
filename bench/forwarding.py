"""The overhead of a miss that is forwarded to a tool server: `python -m bench.forwarding`.

The same server, from Python's standard library, runs beside Forkpoint and in its sandbox. Each request is new, and both
ways open a connection to the server for each request. Then bodies of 10 MB and a long stream are forwarded, while the
proxy's memory is measured.
"""

import http.client
import itertools
import json
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import httpx

from bench.client import Server, running
from bench.machine import console, median, table
from forkpoint.ephemeral_proxy import ephemeral_proxy, free_port

PROGRAM = Path(__file__).parents[1] / "tests" / "agents" / "tool_server.py"
MB = 1 << 20


def direct() -> AbstractContextManager[Server]:
    port = free_port()
    return running([sys.executable, str(PROGRAM), str(port)], port, "/echo")


class Client:
    """A client of the server. keep: whether a connection serves several requests."""

    def __init__(self, server: Server, prefix: str, *, keep: bool) -> None:
        self.address, self.prefix, self.keep = server.address, prefix, keep
        self.connection = http.client.HTTPConnection(*self.address)

    def ask(self, method: str, path: str, body: bytes | None = None) -> bytes:
        """Send a request and return the body of the response.

        Raises:
            RuntimeError: The status was not 200.
        """
        self.connection.request(method, self.prefix + path, body, {"Content-Type": "application/json"})
        answer = self.connection.getresponse()
        data = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"{method} {path}: {answer.status} {data[:300]!r}")
        if not self.keep:
            self.connection.close()
        return data


def timed(act: Callable[[], object]) -> float:
    """Return the duration of an action in milliseconds."""
    start = time.perf_counter()
    act()
    return (time.perf_counter() - start) * 1000


def rss_mb(pid: int, field: str = "VmRSS") -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith(field))) / 1024


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=400)
    options = parser.parse_args()
    numbers = itertools.count()
    with direct() as server, ephemeral_proxy() as proxy:
        spec = {
            "files": {"/srv.py": PROGRAM.read_text()},
            "servers": {"api": {"command": "exec python3 /srv.py 9000", "port": 9000}},
        }
        httpx.put(f"{proxy.url}/api/v1/tasks/bench", json=spec, trust_env=False, timeout=60).raise_for_status()
        through = Client(Server(proxy.url, proxy.pid), "/t/bench/r/1/api", keep=True)
        beside = Client(server, "", keep=False)

        def put(client: Client) -> float:
            body = json.dumps({"key": next(numbers)}).encode()
            return timed(lambda: client.ask("POST", "/put", body))

        def get(client: Client) -> float:
            number = next(numbers)
            return timed(lambda: client.ask("GET", f"/get?key={number}"))

        shown = table("A forwarded miss, one client", "", "direct p50 ms", "through p50 ms", "added p50 ms")
        for name, act in (("POST that changes", put), ("GET that reads", get)):
            for client in (through, beside):
                for _ in range(20):
                    act(client)
            pairs = [(act(beside), act(through)) for _ in range(options.calls)]
            alone, via = (median(way) for way in zip(*pairs, strict=True))
            shown.add_row(name, f"{alone:.2f}", f"{via:.2f}", f"{via - alone:.2f}")
        console.print(shown)
        before = rss_mb(proxy.pid)
        shown = table("Large bodies and a stream", "", "s", "proxy RSS MB", "peak so far MB")
        works: tuple[tuple[str, Callable[[], object]], ...] = (
            ("10 answers of 10 MB", lambda: [through.ask("GET", f"/big?mb=10&n={n}") for n in range(10)]),
            ("1 answer of 200 MB", lambda: through.ask("GET", "/big?mb=200")),
            ("5 uploads of 10 MB", lambda: [through.ask("POST", "/length", bytes([n]) * 10 * MB) for n in range(5)]),
            ("a stream of 200,000 events", lambda: through.ask("GET", "/stream?n=200000")),
        )
        for name, work in works:
            seconds = timed(work) / 1000
            shown.add_row(name, f"{seconds:.1f}", f"{rss_mb(proxy.pid):.0f}", f"{rss_mb(proxy.pid, 'VmHWM'):.0f}")
        console.print(shown)
        console.print(f"RSS before: {before:.0f} MB")


if __name__ == "__main__":
    main()
