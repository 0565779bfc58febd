"""The part of a machine sandbox that calls of all kinds need: a link, and steps before and after each call."""

from collections.abc import Sequence
from typing import Protocol

from sandboxes.host.guest_link import GuestLink
from sandboxes.ipc.codec import AnswerT, Envelope, IpcRequest
from sandboxes.ipc.messages import CallDone


class Guest(Protocol):
    """A sandbox whose supervisor, at the other end of the link, answers requests."""

    @property
    def link(self) -> GuestLink:
        """The link to the supervisor."""

    async def ask(
        self, request: IpcRequest[AnswerT], body: bytes, timeout_s: float, fds: Sequence[int] = ()
    ) -> Envelope[AnswerT]:
        """Send a request that begins a call, once everything that the last call left to do is done.

        Raises SandboxError if the sandbox is dead, or the supervisor was silent for too long.
        """

    def conclude(self, done: Envelope[CallDone]) -> Envelope[CallDone]:
        """Begin what a call leaves to do, and return its answer.

        Raises SandboxError if the machine may be the reason for the call's result.
        """
