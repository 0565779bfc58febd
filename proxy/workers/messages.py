"""What workers send each other: connections."""

from sandboxes.ipc.codec import IpcMessage


class GivenConnection(IpcMessage, op="given_connection", descriptors=(1, 1)):
    """A connection; the body is what the client has sent and got no answer to."""

    is_part: bool = False  # Whether its client is a worker, which asks for the receiver's part of a response.
