"""What workers send each other: connections, and requests for views that show the tasks of all workers."""

from sandboxes.ipc.codec import IpcMessage, IpcRequest


class GivenConnection(IpcMessage, op="given_connection", descriptors=(1, 1)):
    """A client's connection; the body is what the client has sent and got no answer to."""


class ViewAnswer(IpcMessage, op="view_answer"):
    """The head of a worker's response; its body follows with the answers to `PieceRequest`."""

    status: int
    headers: list[list[str]]  # Names and values.


class Piece(IpcMessage, op="piece"):
    """The next piece of a response, which is the body; without a body the response is complete."""


class PieceRequest(IpcRequest[Piece], op="piece_request"):
    """A request for the next piece of the response that a `ViewRequest` began on this channel."""


class ViewRequest(IpcRequest[ViewAnswer], op="view_request"):
    """A request that a client has sent to another worker, for this worker's part of the response."""

    method: str
    path: str
    query: str
    headers: list[list[str]]  # Names and values.
