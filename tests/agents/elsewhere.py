"""A server outside Forkpoint's care, for tests: it lives in the test's own process, and tells what it was asked."""

import gzip
import json
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit


@dataclass
class Elsewhere:
    """asked: method and path of each request. sessions: what each holds, by the name that the server gave it."""

    port: int = 0
    asked: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    sessions: dict[str, list[str]] = field(default_factory=dict)
    fails: int = 0
    reached: threading.Event = field(default_factory=threading.Event)
    gate: threading.Event = field(default_factory=threading.Event)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1
    state: Elsewhere

    def log_message(self, *_: object) -> None: ...

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except ConnectionError:
            self.close_connection = True

    def do_GET(self) -> None:
        self._serve(b"")

    def do_DELETE(self) -> None:
        self._serve(b"")

    def do_POST(self) -> None:
        self._serve(self.rfile.read(int(self.headers.get("Content-Length", 0))))

    def _serve(self, raw: bytes) -> None:
        state = self.state
        state.asked.append(f"{self.command} {self.path}")
        state.headers.append({name.lower(): value for name, value in self.headers.items()})
        path = urlsplit(self.path).path.removeprefix("/api")
        match path:
            case "/fail":
                return self._say({"error": "as asked"}, state.fails or 500)
            case "/half":
                self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf")
                self.close_connection = True
                return None
            case "/silent":
                state.reached.set()
                state.gate.wait(30)
                self.close_connection = True
                return None
            case "/away":
                self.send_response(307)
                self.send_header("Location", json.loads(raw)["to"])
                self.send_header("Content-Length", "0")
                self.end_headers()
                return None
            case "/stream":
                return self._stream()
            case "/length":
                return self._say({"length": len(raw), "sum": sum(raw[:1000])})
            case "/big":
                return self._big(int(urlsplit(self.path).query))
            case "/events":
                return self._events(int(urlsplit(self.path).query))
        body = json.loads(raw) if raw else {}
        if path.startswith("/session/") and self.command == "DELETE":
            state.sessions.pop(path.removeprefix("/session/"))
            return self._say({})
        return self._session(path, body)

    def _session(self, path: str, body: dict[str, Any]) -> None:
        """Sessions by a name in bodies, which the server gives; and by a cookie, signed again with each answer."""
        sessions = self.state.sessions
        if path == "/open":
            name = f"s{random.randrange(1 << 40)}"  # noqa: S311
            sessions[name] = []
            return self._say({"session": name, "note": f"as {name}"}, cookie=name)
        if path in ("/add", "/list"):
            cookie = self.headers.get("Cookie", "").partition("who=")[2].partition(".")[0]
            name = body.get("session") or cookie
            if name not in sessions:
                return self._say({"error": f"no session {name}"}, 404)
            if path == "/add":
                sessions[name].append(body["word"])
            return self._say({"session": name, "words": sessions[name]}, cookie=name)
        return self._say({"echo": body, "path": self.path})

    def _stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for n in range(3):
            data = f"data: {n}\n\n".encode()
            self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
            self.wfile.flush()
            # The test opens the gate when it has seen what came before.
            self.state.gate.wait(10)
        self.wfile.write(b"0\r\n\r\n")

    def _big(self, megabytes: int) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(megabytes << 20))
        self.end_headers()
        for _ in range(megabytes):
            self.wfile.write(random.randbytes(1 << 20))  # noqa: S311

    def _events(self, count: int) -> None:
        """As many as come in an hour, without its pauses."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        for n in range(count):
            self.wfile.write(f"id: {n}\ndata: {'x' * 200}\n\n".encode())
        self.close_connection = True

    def _say(self, value: Any, status: int = 200, cookie: str = "") -> None:
        data = json.dumps(value).encode()
        # As the middleware of many servers does it.
        compressed = status == 200 and "gzip" in self.headers.get("Accept-Encoding", "")
        data = gzip.compress(data) if compressed else data
        self.send_response(status)
        if compressed:
            self.send_header("Content-Encoding", "gzip")
        if cookie:
            self.send_header("Set-Cookie", f"who={cookie}.{random.random()}; Path=/")  # noqa: S311
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def elsewhere() -> Iterator[Elsewhere]:
    """Serve on a free port."""
    state = Elsewhere()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"state": state}))
    state.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield state
    finally:
        state.gate.set()
        server.shutdown()
        thread.join()
        server.server_close()
