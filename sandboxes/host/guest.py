"""A sandbox as its calls see it: the link to its supervisor, and the steps before and after each call."""

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from sandboxes.driver import SETTLE_S
from sandboxes.errors import SandboxError
from sandboxes.host.defaults import LITTLE_ROOM
from sandboxes.host.guest_link import GuestLink
from sandboxes.ipc.channel import Channel
from sandboxes.ipc.codec import AnswerT, Envelope, IpcRequest
from sandboxes.ipc.messages import CallDone

_log = logging.getLogger(__name__)


@functools.lru_cache(maxsize=1)
def note_shortage(_minute: int) -> None:
    """Log, once a minute, why calls are no hits for others; see `linux.user_counts`."""
    _log.warning(
        "answers are their rollouts' own: the user of the sandboxes has no inotify instance, whole pipe or descriptor "
        "under way left. Raise fs.pipe-user-pages-soft or fs.inotify.max_user_instances, or lower max_sandboxes"
    )


class Guest:
    """A sandbox whose supervisor answers requests."""

    def __init__(
        self,
        name: str,
        channel: Channel,
        kill: Callable[[], None],
        after_call: Callable[[CallDone], "asyncio.Task[None] | None"],
        folder: Path,
    ) -> None:
        """Take over a channel. `after_call` begins what a call leaves to do; `folder` is for errors about its disk."""
        self.link = GuestLink(name, channel, kill)  # The link to the supervisor.
        # What the last call left to do; None if nothing is left. No request that begins a call runs beside it.
        self.pending: asyncio.Task[None] | None = None
        self._after_call, self._folder = after_call, folder
        # In the past: a sandbox without calls has nothing that is starting.
        self._stirred_at = self._settled_at = 0.0

    async def ask(
        self, request: IpcRequest[AnswerT], body: bytes, timeout_s: float, fds: Sequence[int] = ()
    ) -> Envelope[AnswerT]:
        """Send a request that begins a call, once everything that the last call left to do is done."""
        # The last call's seal or clean-up is still under way; a call beside it would change what it works on.
        await self.settle()
        return await self.link.call(request, body, timeout_s, fds)

    async def settle(self) -> None:
        """Wait for what the last call left to do."""
        if self.pending is not None:
            # Shielded: if the next call is cancelled, the move to the new layer must not stop halfway.
            await asyncio.shield(self.pending)
            self.pending = None

    def conclude(self, done: Envelope[CallDone]) -> Envelope[CallDone]:
        """Begin what a call leaves to do, and return its answer; SandboxError if the machine may be the cause."""
        if done.message.settling:
            self.begin_settling(SETTLE_S)
        # A full disk of the machine fails calls that would succeed elsewhere. Such a result must never be recorded. A
        # sandbox that holds all inotify instances of the machine ends here too.
        if done.message.host_full:
            self.link.die("the machine cannot hold what it does")
            raise SandboxError(
                f"sandbox {self.link.name} was ended: {LITTLE_ROOM} at {self._folder}, or it holds the inotify "
                "instances or sent descriptors that all sandboxes of this machine share"
            )
        if done.message.short:
            note_shortage(int(time.monotonic() // 60))
        # Begun and not awaited: the agent gets its answer, and the next call waits in `settle`.
        self.pending = self._after_call(done.message)
        return done

    @property
    def settle_s(self) -> float:
        """Seconds until the processes that a call left running count as started."""
        return max(0.0, self._settled_at - time.monotonic())

    def begin_settling(self, settle_s: float) -> None:
        """Note that processes were just started, which need `settle_s` seconds until they count as started."""
        # Of the monotonic clock: a clock that is set must not age processes.
        self._stirred_at = time.monotonic()
        self._settled_at = self._stirred_at + settle_s

    async def rest(self, dwell_s: float) -> None:
        """See `Resting.rest`."""
        # The shorter of two waits: what is missing to the recorded dwell time, and what is missing to "started".
        if (wait_s := min(dwell_s - (time.monotonic() - self._stirred_at), self.settle_s)) > 0:
            await asyncio.sleep(wait_s)
