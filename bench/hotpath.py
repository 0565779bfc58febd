"""A hit compared with a bare ASGI echo on uvicorn, with the same client in the same run: `python -m bench.hotpath`.

Both receive a POST of 300 bytes and return about 2 kB. They are measured alternately, and ratios are medians over
pairs, so that other load on the machine affects both. A hit is a recorded read-only call at depths of 10 and 1,000
calls. A walk follows recorded calls that change the state, and moves by a node with each of them.
"""

import json
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import httpx

from bench.client import WRK, Measured, Server, measure, post, running, walk
from bench.machine import console, median, table
from forkpoint.ephemeral_proxy import ephemeral_proxy, free_port

CONNECTIONS = (1, 64)
REQUEST_BYTES = 300
READ_ONLY = "printf '%01950d' 7"
TASK = "hotpath"


@dataclass(frozen=True, slots=True)
class Contender:
    """A server to measure, with a request for each connection."""

    name: str
    server: Server
    requests: Sequence[bytes]


def echo() -> AbstractContextManager[Server]:
    port = free_port()
    command = [sys.executable, "-m", "uvicorn", "bench.echo:app", "--port", str(port), "--loop", "uvloop"]
    return running([*command, "--http", "httptools", "--no-access-log", "--log-level", "warning"], port)


def shell(server: Server, rollout: str, command: str) -> bytes:
    """Return a shell call as a request; a comment pads its body to 300 bytes."""
    body = json.dumps({"command": command})
    filled = json.dumps({"command": command + " #" + "." * max(0, REQUEST_BYTES - len(body) - 2)})
    return post(server, f"/t/{TASK}/r/{rollout}/shell/exec", filled.encode())


def steps(server: Server, rollout: str, depth: int) -> list[bytes]:
    """Return calls that change the session, so that each of them makes a node."""
    return [shell(server, rollout, f"x={number}") for number in range(depth)]


def standing_at(server: Server, depth: int, rollouts: int) -> Contender:
    """Walk a number of rollouts to a depth and record the read-only call there. Only the first rollout has misses."""
    names = [f"d{depth}-{number}" for number in range(rollouts)]
    for name in names:
        walk(server, [*steps(server, name, depth), shell(server, name, READ_ONLY)])
    return Contender(f"hit at depth {depth:,}", server, [shell(server, name, READ_ONLY) for name in names])


def through_e2b(server: Server, rollouts: int) -> Contender:
    """Create sandboxes by E2B's protocol, and start the same command in each. Only the first start is a miss."""
    process = {"cmd": "/bin/bash", "args": ["-l", "-c", "printf '%01450d' 7"]}
    message = json.dumps({"process": process}).encode()
    body = bytes(1) + len(message).to_bytes(4, "big") + message
    requests = []
    for _ in range(rollouts):
        created = httpx.post(f"{server.url}/t/{TASK}-e2b/e2b/sandboxes", json={}, trust_env=False).json()
        path, media_type = f"/t/{TASK}-e2b/e2b/process.Process/Start", "application/connect+json"
        headers = {"E2b-Sandbox-Id": created["sandboxID"], "E2b-Sandbox-Port": "49983"}
        sent = {**headers, "Content-Type": media_type}
        httpx.post(server.url + path, content=body, headers=sent, trust_env=False).raise_for_status()
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        requests.append(post(server, path, body, media_type, lines))
    return Contender("hit through E2B", server, requests)


def rounds(contenders: Sequence[Contender], count: int, seconds: float) -> dict[tuple[str, int], list[Measured]]:
    """Measure all contenders in turn, `count` times, at each number of connections."""
    results_of: dict[tuple[str, int], list[Measured]] = {}
    for _ in range(count):
        for connections in CONNECTIONS:
            for contender in contenders:
                result = measure(contender.server, contender.requests, connections=connections, seconds=seconds)
                results_of.setdefault((contender.name, connections), []).append(result)
    return results_of


def show(contenders: Sequence[Contender], results_of: dict[tuple[str, int], list[Measured]]) -> None:
    floor = contenders[0].name
    for connections in CONNECTIONS:
        title = f"A hit beside a bare-ASGI echo, connections: {connections}"
        shown = table(title, "", "req/s", "p50 µs", "server CPU µs", "req/s, echo = 1", "CPU, echo = 1")
        for contender in contenders:
            results, echoed = results_of[contender.name, connections], results_of[floor, connections]
            pairs = list(zip(results, echoed, strict=True))
            shown.add_row(
                contender.name,
                f"{median([result.per_s for result in results]):,.0f}",
                f"{median([result.p50_us for result in results]):,.0f}",
                f"{median([result.cpu_us for result in results]):,.0f}",
                f"{median([one.per_s / other.per_s for one, other in pairs]):.2f}",
                f"{median([one.cpu_us / other.cpu_us for one, other in pairs]):.2f}",
            )
        console.print(shown)
    console.print(f"Client: {'wrk' if WRK else 'bench/load.py; apt install wrk for a lighter one'}")


def show_walk(server: Server, depth: int) -> None:
    """Walk a new rollout along recorded calls: hits that move, each of them journalled before its answer."""
    walks = [walk(server, steps(server, f"walk-{number}", depth)) for number in range(5)]
    shown = table("A walk along recorded calls, one connection", "calls", "p50 µs")
    span = max(1, min(100, depth // 2))
    for name, part in ((f"the first {span}", slice(0, span)), (f"the last {span} of {depth:,}", slice(-span, None))):
        shown.add_row(name, f"{median([us for one in walks for us in one[part]]):,.0f}")
    console.print(shown)


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="duration of each measurement")
    parser.add_argument("--depth", type=int, default=1000, help="depth of the deep rollouts")
    options = parser.parse_args()
    with echo() as floor, ephemeral_proxy() as proxy:
        server = Server(proxy.url, proxy.pid)
        console.print(f"Recording {options.depth:,} calls, and walking {CONNECTIONS[-1]} rollouts along them …")
        deep, shallow = (standing_at(server, depth, CONNECTIONS[-1]) for depth in (options.depth, 10))
        e2b = through_e2b(server, CONNECTIONS[-1])
        contenders = [Contender("bare-ASGI echo", floor, [post(floor, "/", b"x" * REQUEST_BYTES)]), shallow, deep, e2b]
        show(contenders, rounds(contenders, options.rounds, options.seconds))
        show_walk(server, options.depth)


if __name__ == "__main__":
    main()
