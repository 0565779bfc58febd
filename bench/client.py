"""Puts load on a server, with wrk if it is installed (Debian: `apt install wrk`), or else with `bench.load`."""

import base64
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from bench.machine import cpu_seconds

WRK = shutil.which("wrk")
SCRIPT = """
local requests = { %s }
local at = 0
request = function() at = at %% #requests + 1; return requests[at] end
done = function(summary, latency, _)
  local failed = summary.errors.status + summary.errors.connect + summary.errors.read + summary.errors.timeout
  io.write(string.format('\\n{"sent": %%d, "failed": %%d, "seconds": %%f, "p50_us": %%d}',
    summary.requests, failed, summary.duration / 1e6, latency:percentile(50)))
end
"""


@dataclass(frozen=True, slots=True)
class Server:
    """A server under load: its address and its process."""

    url: str
    pid: int

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        return str(parts.hostname), int(parts.port or 80)


@contextmanager
def running(command: Sequence[str], port: int, path: str = "") -> Iterator[Server]:
    """Run a server on a port, and wait until it answers `GET path`."""
    process = subprocess.Popen(command)
    try:
        url = f"http://127.0.0.1:{port}"
        for _ in range(200):
            try:
                httpx.get(url + path, trust_env=False)
                break
            except httpx.TransportError:
                time.sleep(0.05)
        yield Server(url, process.pid)
    finally:
        process.terminate()
        process.wait()


@dataclass(frozen=True, slots=True)
class Measured:
    """The result of a measurement. cpu_us: CPU time of the server per request, which does not depend on the client."""

    per_s: float
    p50_us: float
    cpu_us: float


def post(server: Server, path: str, body: bytes, media_type: str = "application/json", headers: str = "") -> bytes:
    """Return one POST request as bytes. Each of the further `headers` ends its line."""
    host, port = server.address
    head = f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: {media_type}\r\n{headers}"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def measure(server: Server, requests: Sequence[bytes], *, connections: int, seconds: float) -> Measured:
    """Send requests for a number of seconds, over at least as many connections as there are requests.

    Raises:
        RuntimeError: The status of a response was not 200.
    """
    before = cpu_seconds(server.pid)
    used = [requests[number % len(requests)] for number in range(connections)]
    result = _by_wrk(server, used, seconds) if WRK else by_own(server, used, seconds)
    cpu_s = cpu_seconds(server.pid) - before
    if result["failed"]:
        raise RuntimeError(f"{result['failed']} of {result['sent']} answers of {server.url} were not 200")
    return Measured(result["sent"] / result["seconds"], result["p50_us"], cpu_s / result["sent"] * 1e6)


def walk(server: Server, requests: Sequence[bytes]) -> list[float]:
    """Send each request once, in order, on one connection of `bench.load`; return the times in µs.

    Raises:
        RuntimeError: The status of a response was not 200.
    """
    result = by_own(server, requests, 0)
    if result["failed"] or result["sent"] != len(requests):
        raise RuntimeError(f"{result['failed']} of {result['sent']} answers of {server.url} were not 200")
    return list(result["walk_us"])


def by_own(server: Server, requests: Sequence[bytes], seconds: float) -> dict[str, Any]:
    """Put load on a server with `bench.load`, and return its results."""
    host, port = server.address
    given = json.dumps([base64.b64encode(request).decode() for request in requests])
    command = [sys.executable, "-m", "bench.load", host, str(port), str(seconds)]
    return dict(json.loads(subprocess.run(command, input=given, capture_output=True, text=True, check=True).stdout))


def _by_wrk(server: Server, requests: Sequence[bytes], seconds: float) -> dict[str, Any]:
    literals = ", ".join('"' + "".join(f"\\{byte:03d}" for byte in request) + '"' for request in requests)
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "requests.lua"
        script.write_text(SCRIPT % literals)
        command = [str(WRK), "-t1", f"-c{len(requests)}", f"-d{max(1, round(seconds))}s", "-s", str(script), server.url]
        run = subprocess.run(command, capture_output=True, text=True, check=True)
    return dict(json.loads(run.stdout.rsplit("\n", 1)[1]))
