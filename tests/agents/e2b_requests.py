"""E2B's protocol by hand, for tests."""

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from proxy.compat.e2b import connect_rpc as connect
from tests.machine import Answering

START = "process.Process/Start"
ENDED = {"end": {"exitCode": 0, "exited": True, "status": "exit status 0"}}


class Client:
    """Sends what an SDK sends. Without a sandbox to continue with, one is created."""

    def __init__(self, proxy: Answering, task: str, sandbox: str = "", **create: Any) -> None:
        self.http, self.base = proxy.client, f"/t/{task}/e2b"
        self.sandbox = sandbox or self.control("POST", "/sandboxes", **create).json()["sandboxID"]
        self.headers = {"e2b-sandbox-id": self.sandbox}

    def control(self, method: str, path: str, **body: Any) -> httpx.Response:
        content = json.dumps(body).encode() if method == "POST" else b""
        return self.http.request(method, self.base + path, content=content)

    def call(self, method: str, **message: Any) -> httpx.Response:
        return self.http.post(f"{self.base}/{method}", json=message, headers=self.headers)

    @contextmanager
    def stream(self, method: str, body: bytes, **headers: str) -> Iterator[Iterator[dict[str, Any]]]:
        """Send a request on a connection of its own, which is closed at the end of the block."""
        all_headers = {**self.headers, "content-type": connect.STREAM, **headers}
        with httpx.Client(base_url=self.http.base_url, timeout=60, trust_env=False) as own:
            request = own.build_request("POST", f"{self.base}/{method}", content=body, headers=all_headers)
            response = own.send(request, stream=True)
            assert response.status_code == 200
            try:
                yield events(response)
            finally:
                response.close()

    def start(self, command: str, **headers: str) -> Any:
        process = {"cmd": "/bin/bash", "args": ["-c", command]}
        return self.stream(START, connect.envelope({"process": process}), **headers)

    def run(self, command: str, **headers: str) -> str:
        """Run a command that succeeds; return its output."""
        with self.start(command, **headers) as stream:
            printed, last = joined(stream)
        assert last == ENDED, last
        return printed


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """Yield the messages of a stream, the last one under `last`."""
    rest = b""
    for chunk in response.iter_raw():
        rest += chunk
        while len(rest) >= 5 and len(rest) >= 5 + (size := int.from_bytes(rest[1:5], "big")):
            value = json.loads(rest[5 : 5 + size])
            yield {"last": value} if rest[0] & 2 else value.get("event", value)
            rest = rest[5 + size :]


def joined(stream: Iterator[dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    """Return the output, and the last event that is not empty."""
    printed, last = b"", dict[str, Any]()
    for event in stream:
        printed += base64.b64decode(event.get("data", {}).get("stdout", ""))
        last = event if event != {"last": {}} else last
    return printed.decode(), last


def calls(proxy: Answering, task: str, rollout: str) -> list[tuple[str, str]]:
    """Return the tools that a rollout called, and the outcome of each call."""
    steps = proxy.client.get(f"/api/v1/tasks/{task}/rollouts/{rollout}").json()["steps"]["items"]
    return [(step["call"]["tool"], step["outcome"]) for step in steps]
