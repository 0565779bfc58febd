"""A stand-in for the proxy's wire, on a real socket: it keeps trajectories, and runs no command at all.

The answer to a command is the command itself, and how many came before it in the rollout. Some commands do more:
`random` answers with a number that never comes again, `fail` is an error, `busy` is refused once, `garbage` is no
shell result, `shared` says that it waited for another's run.
"""

import itertools
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit


@dataclass
class Stub:
    """The requests that the stand-in got, and what it knows."""

    url: str = ""
    specs: dict[str, dict[str, Any]] = field(default_factory=dict)
    trajectories: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    known: set[tuple[str, ...]] = field(default_factory=set)
    deleted: list[str] = field(default_factory=list)
    queries: list[dict[str, str]] = field(default_factory=list)
    totals: dict[str, float] = field(
        default_factory=lambda: {"replayed_calls": 3, "replayed_s": 0.1, "executed_s": 0.0, "saved_s": 0.0}
    )
    view: dict[str, Any] = field(default_factory=dict)
    refused: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def answer(self, task: str, rollout: str, command: str) -> tuple[int, dict[str, str], Any]:
        if command == "fail":
            return 503, {"Retry-After": "1"}, {"title": "The sandbox failed", "detail": "It died. Send the call again."}
        if command == "garbage":
            return 200, {}, ["?"]
        if command == "busy" and not self.refused:
            self.refused = True
            return 503, {"Retry-After": "0"}, {"type": "urn:forkpoint:overloaded", "title": "All sandboxes are busy"}
        before = self.trajectories.setdefault((task, rollout), [])
        before.append(command)
        key = (task, *before)
        if self.specs[task]["cache"] == "never":
            status = "forkpoint; fwd=bypass"
        elif command == "shared":
            status = "forkpoint; fwd=miss; collapsed"
        else:
            status = "forkpoint; hit" if key in self.known else "forkpoint; fwd=miss; stored"
        hit = status.endswith("hit")
        self.known.add(key)
        self.totals["saved_s" if hit else "executed_s"] += 0.5
        stdout = f"random {next(self.numbers)}" if command == "random" else f"{command} after {len(before) - 1}"
        headers = {"Cache-Status": status, "Server-Timing": f"tool;dur={0 if hit else 500}, restore;dur=1.5"}
        result = {"stdout": stdout, "stderr": "", "exit_code": 0, "timed_out": False, "truncated": False}
        return 200, {**headers, "X-Forkpoint-Node": f"n{len(before)}"}, result


@contextmanager
def stub_proxy() -> Iterator[Stub]:
    stub = Stub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # An answer in one packet: in two, the client's delayed acknowledgement would cost 40 ms a call.
        wbufsize = -1

        def log_message(self, *_: object) -> None: ...

        def do_PUT(self) -> None:
            body = self._body()
            stub.specs[self.path.rsplit("/", 1)[1]] = body
            self._send(200, {}, body)

        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            if parts.path == "/api/v1/stats":
                self._send(200, {}, stub.totals)
                return
            stub.queries.append(dict(parse_qsl(parts.query)))
            task = f"/api/v1/tasks/{stub.view.get('task')}"
            known = {f"{task}/tree": (200, stub.view), f"{task}/trees": (200, {"items": [], "total": 0, "next": None})}
            known["/api/v1/cluster"] = (200, stub.view)
            missing = {"title": "Unknown task", "detail": "No task has this name.\x1b[2J"}
            status, content = known.get(parts.path, (404, missing))
            self._send(status, {}, content)

        def do_DELETE(self) -> None:
            stub.deleted.append(self.path)
            self._send(204, {}, None)

        def do_POST(self) -> None:
            _, _, task, _, rollout, _, _ = self.path.split("/")
            command = self._body()["command"]
            with stub.lock:
                answer = stub.answer(task, rollout, command)
            self._send(*answer)

        def _body(self) -> Any:
            return json.loads(self.rfile.read(int(self.headers["Content-Length"])))

        def _send(self, status: int, headers: dict[str, str], body: Any) -> None:
            content = b"" if body is None else json.dumps(body).encode()
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    stub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield stub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
