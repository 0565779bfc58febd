"""Reads the requests of a connection with httptools, and says where they begin and end. No I/O."""

from urllib.parse import unquote

import httptools

from proxy.http.asgi import Scope

END_OF_HEAD = b"\r\n\r\n"
"""The end of the head of a request or response."""
MAX_HEAD_BYTES = 64 << 10
"""Limits a request's head, and what a client may send within a body that is no body: trailers, extensions of chunks."""
MAX_HEADERS = 256
"""Limits the headers of a request; browsers and agents send less than 40."""


class RequestReader:
    """Holds the request that is being read, and counts all requests of its connection.

    `begun` counts first bytes, `ended` last bytes of requests, and `received_bytes` the bytes of all bodies. `is_plain`
    says that the client waits for one response on a connection that stays open (HTTP/1.1, keep-alive, no `Expect`); it
    is valid once `has_head`. With `expects_continue`, the client sends the body only after a `100 Continue`.
    `is_refused` says that `feed` raised because of a rule of ours (`is_too_large`: the size of the head); the bytes may
    be valid HTTP then. `keeps_body` says that the current request's body is kept in `body`.
    """

    # httptools calls the methods `on_…` from within `feed_data`, so after `feed` the attributes are up to date.
    def __init__(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        self.begun = self.ended = self.received_bytes = 0
        # Bytes since the last that ended a head, belonged to a body, or ended a request.
        self._fruitless_bytes = 0
        self.is_too_large = False
        self.has_head = self.is_plain = self.expects_continue = self.is_refused = False
        self.keeps_body = True
        self.url = self.body = b""
        self.headers: list[tuple[bytes, bytes]] = []

    def feed(self, data: bytes) -> None:
        """Read more bytes.

        Raises httptools.HttpParserUpgrade, with the offset of the head's end, if the request asks for another protocol;
        a body was not read then. Raises httptools.HttpParserError if the bytes are not HTTP, or `is_refused`.
        """
        self._fruitless_bytes += len(data)
        self._parser.feed_data(data)
        # The parser keeps an unfinished header itself, so only the bytes of the connection can be counted.
        if self._fruitless_bytes > MAX_HEAD_BYTES:
            self._refuse_size()

    def _refuse_size(self) -> None:
        self.is_refused = self.is_too_large = True
        raise httptools.HttpParserError("the head is too large")

    def scope(self, scheme: str) -> Scope | None:
        """Return what the hit path reads of an ASGI scope; None for a target that only uvicorn interprets."""
        # A fragment is not part of a request target (RFC 9112, 3.2). uvicorn decides what it makes of one.
        if not self.url.isascii() or b"#" in self.url:
            return None
        raw_path, _, query = self.url.partition(b"?")
        path = raw_path.decode("ascii")
        return {
            "type": "http",
            "scheme": scheme,
            "method": self._parser.get_method().decode("ascii"),
            "path": unquote(path) if "%" in path else path,
            "raw_path": raw_path,
            "query_string": query,
            "headers": self.headers,
        }

    def without_upgrade(self, body: bytes) -> bytes:
        """Return the current request as one that asks for no other protocol and closes its connection."""
        dropped = (b"connection", b"upgrade", b"content-length")
        lines = [b"%b %b HTTP/1.1" % (self._parser.get_method(), self.url)]
        lines += [b"%b: %b" % header for header in self.headers if header[0] not in dropped]
        # The body may have been cut to the limit, so its own length is announced.
        lines += [b"content-length: %d" % len(body), b"connection: close", b"", body]
        return b"\r\n".join(lines)

    @property
    def wants_websocket(self) -> bool:
        """Whether the request asks for the WebSocket protocol."""
        return any(name == b"upgrade" and value.strip().lower() == b"websocket" for name, value in self.headers)

    @property
    def content_length(self) -> int:
        """The length that the head announces; 0 if it announces none. The parser has checked that it is a number."""
        return int(next((value for name, value in self.headers if name == b"content-length"), b"0"))

    # -- called by the parser ----------------------------------------------------------------------------------------

    # Reset here and not at the end: the ended request stays readable until the next begins.
    def on_message_begin(self) -> None:
        """Count a request that begins."""
        self.begun += 1
        self.has_head = False
        self.url = self.body = b""
        self.headers = []

    def on_url(self, url: bytes) -> None:
        """Add a piece of the target."""
        # Several calls: a target may be cut in half by a packet.
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header."""
        if self.has_head:
            # A trailer (RFC 9110, 6.5) is no header: it must not pass for one.
            return
        # Field names are case-insensitive (RFC 9110, 5.1), and ASGI promises lower case.
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Note what the head says. A ValueError for a rule of ours makes `feed` raise HttpParserError."""
        version: str = self._parser.get_http_version()
        # The absolute form of a target is for forward proxies (RFC 9112, 3.2.2), and this server must not be used as
        # one. A request line without a version is HTTP/0.9, which has no status to report an error with.
        if not self.url.startswith(b"/") or version not in ("1.1", "1.0"):
            self.is_refused = True
            raise ValueError("the request line is not one of HTTP/1.1 to an origin server")
        if len(self.headers) > MAX_HEADERS or self._fruitless_bytes > MAX_HEAD_BYTES:
            # The head itself is measured: the bytes that were counted may hold a part of the body too.
            size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
            if len(self.headers) > MAX_HEADERS or size > MAX_HEAD_BYTES:
                self._refuse_size()
        self._fruitless_bytes = 0
        self.expects_continue = any(name == b"expect" for name, _ in self.headers)
        keep_alive: bool = self._parser.should_keep_alive()
        self.is_plain = version == "1.1" and keep_alive and not self.expects_continue
        self.has_head = True

    def on_body(self, body: bytes) -> None:
        """Add a piece of the body."""
        self._fruitless_bytes = 0
        self.received_bytes += len(body)
        # uvicorn collects the bodies of its own requests; a second copy of an upload would only cost memory.
        if self.keeps_body:
            self.body += body

    def on_message_complete(self) -> None:
        """Count a request that ends."""
        self._fruitless_bytes = 0
        self.ended += 1
