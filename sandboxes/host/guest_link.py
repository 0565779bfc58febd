"""A sandbox's driver side talks to who runs its calls, pid 1 or a container's keeper; one that fails is dead."""

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

from sandboxes.errors import SandboxError
from sandboxes.host.pty import Pty
from sandboxes.ipc.channel import Channel, ChannelClosedError
from sandboxes.ipc.frames import Message

GRACE_S = 60.0
"""How long over its own time a call may keep the other side busy (killing, comparing files); then it counts as dead."""


class Talk:
    """What the sandboxes of both drivers have in common. `dead`: why it is, if it is."""

    def __init__(self, name: str, channel: Channel) -> None:
        self.id = name
        self._channel = channel
        self._dead: str | None = None
        self._stirred_at = self._grown_at = 0.0

    @property
    def young_s(self) -> float:
        """Seconds until what was left running here counts as started."""
        return max(0.0, self._grown_at - time.monotonic())

    def be_young(self, seconds: float) -> None:
        """Note that what lives here was just started: it takes so many seconds until it counts as such."""
        self._stirred_at = time.monotonic()
        self._grown_at = self._stirred_at + seconds

    async def rest(self, age_s: float) -> None:
        """See `Resting.rest`."""
        if (seconds := min(age_s - (time.monotonic() - self._stirred_at), self.young_s)) > 0:
            await asyncio.sleep(seconds)

    @property
    def alive(self) -> bool:
        return self._dead is None and self._channel.lost is None

    def _kill(self) -> None:
        """End all that runs in the sandbox, now."""
        raise NotImplementedError

    def _die(self, reason: str) -> None:
        self._dead = self._dead or reason
        self._kill()

    async def _run(self, fields: dict[str, Any], body: bytes, timeout_s: float, fds: list[int]) -> Message:
        """Send a call and return its answer. Cancelled, the sandbox is dead: nobody knows how far it came.

        Raises:
            SandboxError: it is dead, or silent for longer than the call may take.
        """
        try:
            return await self._talk(fields, body, fds, within_s=timeout_s + GRACE_S)
        except asyncio.CancelledError:
            self._die("its call was cancelled")
            raise

    async def _talk(
        self, fields: dict[str, Any], body: bytes = b"", fds: list[int] | None = None, *, within_s: float = GRACE_S
    ) -> Message:
        return await self._hear(self._channel.request(fields, body, fds or []), within_s)

    async def _open_terminal(self, columns: int, rows: int) -> Pty:
        """See `TerminalSandbox.open_terminal`."""
        told = await self._talk({"op": "terminal", "size": [columns, rows]})
        if not told.fds:
            raise SandboxError(f"sandbox {self.id}: {told.fields['failed']}")
        return Pty(told.fds[0])

    async def _listen(self) -> Message:
        """Return what the other side says unasked."""
        return await self._hear(self._channel.receive(), GRACE_S)

    async def _hear(self, coming: Coroutine[Any, Any, Message], within_s: float) -> Message:
        if self._dead is not None:
            coming.close()
            raise SandboxError(f"sandbox {self.id} died: {self._dead}")
        try:
            async with asyncio.timeout(within_s):
                answer = await coming
        except TimeoutError as error:
            self._die("it gave no answer in time")
            raise SandboxError(f"sandbox {self.id} gave no answer within {within_s:.0f} s") from error
        except ChannelClosedError as error:
            self._die(str(error))
            raise SandboxError(f"sandbox {self.id} died: {error}") from error
        if "error" in answer.fields:
            self._die(str(answer.fields["error"]))
            raise SandboxError(f"sandbox {self.id} died: {answer.fields['error']}")
        return answer
