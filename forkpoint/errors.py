"""The exceptions of the client."""


class ForkpointError(Exception):
    """The proxy refused a request, or could not carry it out. Nothing was recorded, and the rollout has not moved.

    Attributes:
        status: The HTTP status; 0 if there was no response.
        slug: The kind of the error, such as `overloaded` or `no-such-task`; empty if the response names none.
        detail: What was wrong, and what to do.
    """

    def __init__(self, status: int, slug: str, detail: str) -> None:
        super().__init__(f"{status} {slug}: {detail}" if status else detail)
        self.status, self.slug, self.detail = status, slug, detail


class UnreachableError(ForkpointError):
    """The connection to the proxy failed. If it failed after the request was sent, the call may have run."""

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(
            0, "", f"no proxy answers at {url} ({reason}). Start one with `forkpoint serve`, or name another URL."
        )
