"""What workers send each other: connections, and requests for views that show the tasks of all workers."""

from dataclasses import dataclass

from sandboxes.ipc.codec import IpcMessage, IpcRequest


@dataclass(frozen=True)
class GivenConnection(IpcMessage, op="given_connection", descriptors=(1, 1)):
    """A client's connection; the body is what the client has sent and got no answer to."""


@dataclass(frozen=True)
class ViewAnswer(IpcMessage, op="view_answer"):
    """A worker's response; its body is the body.

    Attributes:
        status: The HTTP status.
        headers: Names and values.
    """

    status: int
    headers: list[list[str]]


@dataclass(frozen=True)
class ViewRequest(IpcRequest[ViewAnswer], op="view_request"):
    """A request that a client has sent to another worker, for this worker's part of the response.

    Attributes:
        method: The HTTP method.
        path: The path.
        query: The query string.
        headers: Names and values.
    """

    method: str
    path: str
    query: str
    headers: list[list[str]]
