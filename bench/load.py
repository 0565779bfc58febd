"""A light HTTP client for load: raw protocol on uvloop with prebuilt requests, in a separate process.

`python -m bench.load HOST PORT SECONDS` reads one JSON list of base64 requests from stdin and opens a connection for
each. SECONDS 0: one connection sends each request once, in order. Writes one JSON object: `sent`, `failed`, `seconds`,
and in µs `p50_us`, `p99_us` and (in order, of a walk) `walk_us`.
"""

import asyncio
import base64
import json
import statistics
import sys
import time
from collections.abc import Iterator
from functools import partial
from itertools import repeat
from typing import Any

import uvloop

PATIENCE_S = 120.0


class Client(asyncio.Protocol):
    """A connection that sends the next request after each complete response."""

    def __init__(self, requests: Iterator[bytes], deadline_ns: int, done: "asyncio.Future[None]") -> None:
        self.requests, self.deadline_ns, self.done = requests, deadline_ns, done
        self.latencies_ns: list[int] = []
        self.failed = 0
        self.buffer = b""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self._next(time.perf_counter_ns())

    def _next(self, now_ns: int) -> None:
        request = next(self.requests, None) if now_ns < self.deadline_ns else None
        if request is None:
            self.transport.close()
            return
        self.sent_ns = now_ns
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        self.buffer = answer = self.buffer + data if self.buffer else data
        end = answer.find(b"\r\n\r\n")
        if end < 0:
            return
        head = answer[:end].lower()
        at = head.index(b"content-length:") + 15
        stop = head.find(b"\r\n", at)
        length = int(head[at : stop if stop > 0 else end])
        if len(answer) < end + 4 + length:
            return
        now_ns = time.perf_counter_ns()
        self.latencies_ns.append(now_ns - self.sent_ns)
        self.failed += not head.startswith(b"http/1.1 200")
        self.buffer = b""
        self._next(now_ns)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the protocol's own signature
        if not self.done.done():
            self.done.set_result(None)


def _same(client: Client) -> Client:
    return client


async def load(host: str, port: int, seconds: float, requests: list[bytes]) -> dict[str, Any]:
    """Send requests for a number of seconds, each on its own connection; for 0, each once on one connection."""
    loop = asyncio.get_running_loop()
    started = time.perf_counter_ns()
    deadline = started + int((seconds or PATIENCE_S) * 1e9)
    streams = [repeat(request) for request in requests] if seconds else [iter(requests)]
    clients = [Client(stream, deadline, loop.create_future()) for stream in streams]
    for client in clients:
        await loop.create_connection(partial(_same, client), host, port)
    await asyncio.gather(*(client.done for client in clients))
    took = time.perf_counter_ns() - started
    latencies = [latency for client in clients for latency in client.latencies_ns]
    return {
        "sent": len(latencies),
        "failed": sum(client.failed for client in clients),
        "seconds": took / 1e9,
        "p50_us": statistics.median(latencies) / 1e3,
        "p99_us": sorted(latencies)[int(len(latencies) * 0.99)] / 1e3,
        "walk_us": [] if seconds else [latency / 1e3 for latency in latencies],
    }


def main() -> None:
    host, port, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    requests = [base64.b64decode(request) for request in json.load(sys.stdin)]
    json.dump(uvloop.run(load(host, port, seconds, requests)), sys.stdout)


if __name__ == "__main__":
    main()
