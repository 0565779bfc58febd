"""Reads the requests of a connection with httptools, and says where they begin and end. No I/O."""

from urllib.parse import unquote

import httptools

from proxy.http.asgi import Scope


class RequestReader:
    """Holds the request that is being read, and counts all requests of its connection.

    Attributes:
        begun: Requests of which the first byte was read.
        ended: Requests of which the last byte was read.
        has_head: Whether the head of the current request is complete.
        is_plain: Whether the client waits for one response on a connection that stays open: HTTP/1.1, keep-alive, and
            no `Expect`. Valid once the head is complete.
        expects_continue: Whether the client sends the body only after a `100 Continue`.
        is_refused: Whether `feed` raised because of a rule of ours; the bytes may be valid HTTP then.
        keeps_body: Whether the body of the current request is kept in `body`.
    """

    # httptools calls the methods `on_…` from within `feed_data`, so after `feed` the attributes are up to date.
    def __init__(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        self.begun = self.ended = 0
        self.has_head = self.is_plain = self.expects_continue = self.is_refused = False
        self.keeps_body = True
        self.url = self.body = b""
        self.headers: list[tuple[bytes, bytes]] = []

    def feed(self, data: bytes) -> None:
        """Read more bytes.

        Raises:
            httptools.HttpParserUpgrade: The request asks for another protocol. The argument is the offset in data
                where its head ends; a body, if it has one, was not read.
            httptools.HttpParserError: The bytes are not HTTP, or `is_refused`.
        """
        self._parser.feed_data(data)

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
        # Field names are case-insensitive (RFC 9110, 5.1), and ASGI promises lower case.
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Note what the head says about the connection.

        Raises:
            ValueError: The request line breaks a rule of ours; `feed` then raises HttpParserError.
        """
        version: str = self._parser.get_http_version()
        # The absolute form of a target is for forward proxies (RFC 9112, 3.2.2), and this server must not be used as
        # one. A request line without a version is HTTP/0.9, which has no status to report an error with.
        if not self.url.startswith(b"/") or version not in ("1.1", "1.0"):
            self.is_refused = True
            raise ValueError("the request line is not one of HTTP/1.1 to an origin server")
        self.expects_continue = any(name == b"expect" for name, _ in self.headers)
        keep_alive: bool = self._parser.should_keep_alive()
        self.is_plain = version == "1.1" and keep_alive and not self.expects_continue
        self.has_head = True

    def on_body(self, body: bytes) -> None:
        """Add a piece of the body."""
        # uvicorn collects the bodies of its own requests; a second copy of an upload would only cost memory.
        if self.keeps_body:
            self.body += body

    def on_message_complete(self) -> None:
        """Count a request that ends."""
        self.ended += 1
