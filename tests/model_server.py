"""A model endpoint with OpenAI's API over real HTTP; it remembers its requests and can simulate failures."""

import base64
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

import orjson

Mood = Literal["well", "down", "busy once", "refuses", "not json", "no choices", "empty", "short", "silent"]


class ModelServer(ThreadingHTTPServer):
    """Answers from what it is shown: equal questions get equal answers, each seed another one. salt: other weights."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.mood: Mood = "well"
        self.salt = ""
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.keys: list[str] = []
        self.gate = threading.Event()
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def chats(self) -> list[dict[str, Any]]:
        return [body for path, body in self.asked if path.endswith("/chat/completions")]

    def answer(self, path: str, body: dict[str, Any], key: str) -> tuple[int, bytes]:
        with self._lock:
            self.asked.append((path, body))
            self.keys.append(key)
            mood = self.mood
            if mood == "busy once":
                self.mood = "well"
        if mood == "silent":
            self.gate.wait(30)
        if mood in ("down", "busy once", "refuses"):
            return {"down": 500, "busy once": 429, "refuses": 404}[mood], b'{"error": "no"}'
        if mood == "not json":
            return 200, b"<html>gateway</html>"
        if mood == "no choices":
            return 200, b'{"choices": []}'
        if path.endswith("/embeddings"):
            return 200, orjson.dumps(_embedded(body, short=mood == "short"))
        text = " " if mood == "empty" else _said(body, self.salt)
        # Tokens by a rule of its own: a word each, and one for each kilobyte of the question.
        used = len(text.split()) + len(orjson.dumps(body)) // 1000
        message = {"message": {"role": "assistant", "content": text}}
        return 200, orjson.dumps({"choices": [message], "usage": {"total_tokens": used}})


class _Handler(BaseHTTPRequestHandler):
    server: ModelServer

    def do_POST(self) -> None:
        body = orjson.loads(self.rfile.read(int(self.headers["content-length"])))
        status, answer = self.server.answer(self.path, body, self.headers.get("authorization", ""))
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


def _said(body: dict[str, Any], salt: str) -> str:
    parts = body["messages"][0]["content"]
    digest = sha256(orjson.dumps([parts, body["seed"], body["temperature"], salt])).hexdigest()[:6]
    pictures = sum(part["type"] == "image_url" for part in parts)
    if "Objects:" in parts[0]["text"]:
        return f"A thing called {digest} is seen.\nObjects: square, Thing {digest[:2]}"
    return f"answer {digest} with seed {body['seed']} from {pictures} pictures"


def _embedded(body: dict[str, Any], *, short: bool) -> dict[str, Any]:
    texts = body.get("input") or [body["messages"][0]["content"][0]["image_url"]["url"]]
    rows = [{"index": n, "embedding": _vector(text)} for n, text in enumerate(texts)]
    # Out of order on purpose: the index gives the order.
    return {"data": rows[1:] if short else rows[::-1]}


def _vector(text: str) -> list[float]:
    data = base64.b64decode(text.partition(",")[2]) if text.startswith("data:") else text.lower().encode()
    return [byte / 255 for byte in sha256(data).digest()[:8]]


@contextmanager
def model_server() -> Iterator[ModelServer]:
    """Serve on a free port in a thread."""
    server = ModelServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.gate.set()
        server.shutdown()
        thread.join()
        server.server_close()
