"""The responses of a connection that is closed: no application has seen its request."""

from http import HTTPStatus

from proxy.refusals import Problem


def closing_response(problem: Problem) -> bytes:
    """Return a problem as the whole response of a connection that is closed behind it."""
    body = problem.body()
    headers = [*problem.headers(), (b"content-length", b"%d" % len(body)), (b"connection", b"close")]
    status = b"HTTP/1.1 %d %b" % (problem.status, HTTPStatus(problem.status).phrase.encode())
    return b"\r\n".join([status, *map(b": ".join, headers), b"", body])


def _closing(status: HTTPStatus, slug: str, detail: str) -> bytes:
    return closing_response(Problem(status, slug, status.phrase, detail))


INVALID = _closing(HTTPStatus.BAD_REQUEST, "not-http", "Invalid HTTP request received.")
TOO_LARGE = _closing(
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
    "head-too-large",
    "A request's head may have 64 KiB and 256 headers. Send less.",
)
TOO_SLOW = _closing(
    HTTPStatus.REQUEST_TIMEOUT, "too-slow", "The request took too long to arrive. Send it again, in one go."
)
CROWDED = _closing(
    HTTPStatus.SERVICE_UNAVAILABLE,
    "too-many-connections",
    "All connections of this proxy are in use (max_connections).",
)
