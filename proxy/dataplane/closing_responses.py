"""The responses of a connection that is closed: no application has seen its request."""


def _closing(status: bytes, text: bytes) -> bytes:
    head = b"HTTP/1.1 %b\r\ncontent-type: text/plain; charset=utf-8\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
    return head % (status, len(text)) + text


INVALID = _closing(b"400 Bad Request", b"Invalid HTTP request received.")
TOO_LARGE = _closing(
    b"431 Request Header Fields Too Large", b"A request's head may have 64 KiB and 256 headers. Send less."
)
TOO_SLOW = _closing(b"408 Request Timeout", b"The request took too long to arrive. Send it again, in one go.")
CROWDED = _closing(b"503 Service Unavailable", b"All connections of this proxy are in use (max_connections).")
