"""A WebSocket server for tests, of the standard library alone: it runs inside sandboxes, and beside Forkpoint."""

import base64
import hashlib
import json
import os
import random
import socketserver
import struct
import sys
import time
from typing import Any

shared: list[str] = []


class Handler(socketserver.StreamRequestHandler):
    """Each connection has memory of its own."""

    def handle(self) -> None:
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            line = self.rfile.readline()
            if not line:
                return
            head += line
        self.target = head.split(b" ")[1].decode()
        fields = {
            name.strip().lower(): value.strip()
            for name, _, value in (h.partition(":") for h in head.decode().split("\r\n")[1:])
        }
        if "sec-websocket-key" not in fields:
            self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok")
            return
        if self.target.startswith("/forbidden"):
            self.wfile.write(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            return
        self.fields = fields
        magic = fields["sec-websocket-key"].encode() + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        accept = base64.b64encode(hashlib.sha1(magic).digest()).decode()  # noqa: S324
        chosen = fields.get("sec-websocket-protocol", "").partition(",")[0].strip()
        more = f"Sec-WebSocket-Protocol: {chosen}\r\n" if chosen else ""
        self.wfile.write(
            (
                "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                f"Sec-WebSocket-Accept: {accept}\r\n{more}\r\n"
            ).encode()
        )
        self.said: list[str] = []
        while (frame := self.frame()) is not None:
            if not self.answer(*frame):
                return

    def frame(self) -> tuple[int, bytes] | None:
        head = self.rfile.read(2)
        if len(head) < 2:
            return None
        length = head[1] & 127
        if length == 126:
            (length,) = struct.unpack("!H", self.rfile.read(2))
        elif length == 127:
            (length,) = struct.unpack("!Q", self.rfile.read(8))
        mask = self.rfile.read(4)
        data = self.rfile.read(length)
        return head[0] & 15, bytes(byte ^ mask[n % 4] for n, byte in enumerate(data))

    def send(self, opcode: int, data: bytes, *, final: bool = True) -> None:
        length = len(data)
        long = b"\x7e" + struct.pack("!H", length) if length < 65536 else b"\x7f" + struct.pack("!Q", length)
        size = bytes([length]) if length < 126 else long
        self.wfile.write(bytes([opcode | (128 if final else 0)]) + size + data)

    def tell(self, value: Any) -> None:
        self.send(1, json.dumps(value).encode())

    def answer(self, opcode: int, data: bytes) -> bool:  # noqa: C901, PLR0912 - a table of cases
        """Answer one frame; False where the connection is over."""
        if opcode == 8:
            self.send(8, data)
            return False
        if opcode == 10:
            self.said.append("pong")
            return True
        if opcode == 2:
            self.send(2, data[::-1])
            return True
        text = data.decode()
        word, _, rest = text.partition(" ")
        match word:
            case "add":
                self.said.append(rest)
                shared.append(rest)
                self.tell({"said": self.said, "shared": shared})
            case "get":
                self.tell({"said": self.said, "shared": shared})
            case "draw":
                self.said.append(str(random.random()))  # noqa: S311
                self.tell({"drawn": self.said[-1]})
            case "many":
                for n in range(int(rest)):
                    self.tell(n)
            case "parts":
                self.send(1, b"one ", final=False)
                self.send(0, b"two")
            case "ping":
                self.send(9, b"x")
                frame = self.frame()
                self.tell({"pong": frame is not None and frame[0] == 10 and frame[1].decode() == "x"})
            case "head":
                self.tell({"target": self.target, "fields": self.fields})
            case "close":
                self.send(8, struct.pack("!H", int(rest)) + b"as asked")
                return False
            case "die":
                os._exit(1)
            case "cut":
                return False
            case "garbage":
                self.wfile.write(b"\xff\xff\xff\xff")
            case "silent":
                time.sleep(30)
            case "nothing":
                pass
            case "file":
                with open("/root/file", "a") as file:  # noqa: PTH123
                    file.write(rest)
                self.tell({})
            case "big":
                self.tell("x" * int(rest))
            case _:
                self.tell({"echo": text})
        return True


class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True


if __name__ == "__main__":
    Server(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
