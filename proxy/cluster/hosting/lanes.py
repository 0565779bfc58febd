"""The messages of a host in two lanes: the units of a state that travels, and all else.

A call may run while the state before it still travels, so messages about both arrive in any order.
"""

import asyncio
from collections import deque

from proxy.cluster.hosting.messages import Conversation, HostingError, LargeUnit, SmallUnit, UnitEnd
from sandboxes.ipc.codec import Envelope, IpcMessage

MAX_WAITING = 4
"""Most messages of a lane that wait to be read. The messages behind them wait in the channel, whose window limits them.
Doubled, a stream that its client does not read takes twice the memory. With 1, each message waits for two tasks."""
_OF_UNITS = (SmallUnit, LargeUnit, UnitEnd)


class Lane(Conversation):
    """A conversation that receives some of the messages only. One task may read from it."""

    def __init__(self, whole: Conversation) -> None:
        super().__init__(whole.channel, whole.open_data)
        self._waiting: deque[Envelope[IpcMessage]] = deque()
        self._changed, self._is_over = asyncio.Event(), False

    async def put(self, envelope: Envelope[IpcMessage]) -> None:
        """Add a message as soon as there is room for it."""
        while len(self._waiting) >= MAX_WAITING and not self._is_over:
            await self._changed.wait()
        self._waiting.append(envelope)
        self._note_change()

    async def receive(self) -> Envelope[IpcMessage] | None:
        """Return the next message; None if none follows."""
        while not self._waiting:
            if self._is_over:
                return None
            await self._changed.wait()
        envelope = self._waiting.popleft()
        self._note_change()
        return envelope

    def end(self) -> None:
        """Note that no message follows."""
        self._is_over = True
        self._note_change()

    def _note_change(self) -> None:
        # A new event for the next change. A task that waits holds the old one, which stays set.
        self._changed.set()
        self._changed = asyncio.Event()


async def split(whole: Conversation, answers: Lane, units: Lane) -> None:
    """Bring each message to its lane, until none follows. What is no message ends both lanes."""
    try:
        while (envelope := await whole.receive()) is not None:
            await (units if isinstance(envelope.message, _OF_UNITS) else answers).put(envelope)
    except HostingError:
        whole.channel.abort()
    finally:
        answers.end()
        units.end()
