"""A tool server for tests, of the standard library alone: it runs inside sandboxes, and beside Forkpoint to compare."""

import json
import os
import random
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

memory: dict[str, str] = {}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # An answer in one packet: in two, the client's delayed acknowledgement would cost 40 ms a call.
    wbufsize = -1

    def log_message(self, *_: object) -> None: ...

    def do_GET(self) -> None:  # noqa: C901, PLR0912 - a table of cases
        """Read, and more: `touch` writes a file all the same, and some fail in ways of their own."""
        parts = urlsplit(self.path)
        match parts.path:
            case "/get":
                self._json({"value": memory.get(dict(parse_qsl(parts.query))["key"])})
            case "/echo" | "/a%2Fb/c":
                self._json({"method": self.command, "target": self.path, "headers": self.headers.items()})
            case "/touch":
                with open("/root/touched", "a") as file:  # noqa: PTH123
                    file.write("x")
                self._json({})
            case "/redirect":
                self._send(307, b"", {"Location": dict(parse_qsl(parts.query))["to"]})
            case "/cookie":
                self._send(200, b"", {"Set-Cookie": "s=1; Path=/; Domain=localhost"})
            case "/stream":
                self._stream(int(dict(parse_qsl(parts.query))["n"]))
            case "/endless":
                self.send_response(200)
                self.send_header("Connection", "close")
                self.end_headers()
                while True:
                    self.wfile.write(b".")
                    self.wfile.flush()
                    time.sleep(0.1)
            case "/big":
                self._send(200, os.urandom(1 << 16) * (int(dict(parse_qsl(parts.query))["mb"]) * 16))
            case "/nothing":
                self._send(204, b"")
            case "/teapot":
                self._send(418, b"short and stout", {"X-B": "1", "X-A": "2", "Content-Type": "text/plain"})
            case "/random":
                self._json({"value": random.random()})  # noqa: S311
            case "/die":
                os._exit(1)
            case "/half":
                self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf")
                self.wfile.flush()
                os._exit(1)
            case "/garbage":
                self.wfile.write(b"This is not HTTP at all\r\n\r\n")
                self.close_connection = True
            case "/silent":
                time.sleep(60)
            case _:
                self._json({"error": "there is no such thing"}, 404)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        match urlsplit(self.path).path:
            case "/put":
                memory.update(json.loads(body))
                self._json(memory)
            case "/draw":
                memory["drawn"] = str(random.random())  # noqa: S311
                self._json(memory)
            case "/length":
                self._json({"length": len(body)})
            case "/fail":
                self._json({"error": "as asked"}, 500)
            case _:
                self._json({"error": "there is no such thing"}, 404)

    def _stream(self, chunks: int) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for n in range(chunks):
            data = f"data: {n}\n\n".encode()
            self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
            self.wfile.flush()
            # The test opens the gate when it has seen what came before.
            while n == 0 and os.path.exists("/root/gate"):  # noqa: PTH110
                time.sleep(0.01)
        self.wfile.write(b"0\r\nX-Trailer: dropped\r\n\r\n")

    def _json(self, value: Any, status: int = 200) -> None:
        self._send(status, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
