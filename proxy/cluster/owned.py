"""A task that this member owns: its log, and the last steps of its rollouts."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

from proxy.cluster.lines import Kept, Line, encode
from proxy.cluster.postgres.connection import DatabaseError
from proxy.cluster.protocol import Floors, Outbox, Steps
from proxy.refusals import RefusalError
from sandboxes.task_owner import TaskOwner

Append = Callable[[str, int, bytes], Awaitable[bool]]


class DroppedError(RefusalError):
    """This member does not own the task any more. The ingress asks the next owner."""

    def __init__(self, task: str) -> None:
        super().__init__(503, "not-owner", f"this member does not own task {task!r} any more. Try again.")


class Owned:
    """One task from the moment this member owns it until it drops it."""

    def __init__(
        self, task: str, view: int, steps: Steps, append: Append, failed: Callable[["Owned", str], None]
    ) -> None:
        """Begin to own a task; no call is answered before `open`. `failed`, called when a row is lost, must drop it."""
        self.task, self.view, self.steps = task, view, steps
        self.is_dropped = False  # Whether this member owns it no more.
        self.floors = Floors()  # Which calls of other members are late copies.
        self.trees: dict[int, bytes | None] = {}  # For each tree in the log: the digest of its root state there.
        self.kept: dict[int, Kept] = {}  # The states that the store has, by node, as the log says.
        # About how many rows the log has beside those of owners, and how many lines the last compaction has left.
        self.rows = self.lines = 0
        # Called when the task is dropped: they end streams that would never end otherwise.
        self.cuts: set[Callable[[], None]] = set()
        self._noted: asyncio.Future[None] | None = None
        self._append, self._failed = append, failed
        self._outbox: Outbox[tuple[Sequence[Line], asyncio.Future[None] | None]] = Outbox(view)
        self._opened, self._sending, self._is_sending = asyncio.Event(), asyncio.Lock(), False
        self.tasks = TaskOwner()

    def forget(self) -> None:
        """Note that the task is deleted; its owner may create it again."""
        self.steps, self.trees = Steps(), {}
        # The store's objects go when no line names them.
        self.kept.clear()

    def require(self) -> None:
        """Check that the task is still owned. Raises DroppedError: it is not."""
        if self.is_dropped:
            raise DroppedError(self.task)

    def put(self, lines: Sequence[Line]) -> None:
        """Let the next row have lines, whenever it is written."""
        if not self.is_dropped:
            self._outbox.waiting.append((lines, None))

    def write(self, lines: Sequence[Line]) -> asyncio.Future[None]:
        """Write lines to the log, behind all lines that were written before; the future says when they are there."""
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # Not each caller waits, and an error that is not looked at is no defect.
        written.add_done_callback(lambda done: done.cancelled() or done.exception())
        if self.is_dropped:
            written.set_exception(DroppedError(self.task))
            return written
        self._outbox.waiting.append((lines, written))
        if not self._is_sending:
            self._is_sending = True
            self.tasks.spawn("task log", self._send())
        return written

    def note(self, lines: Sequence[Line]) -> asyncio.Future[None]:
        """Write lines, as `write` does, that every later answer depends on: `settled` waits for them."""
        # All earlier lines are in the log before these.
        self._noted = self.write(lines)
        return self._noted

    async def settled(self) -> None:
        """Wait until the lines that `note` has written are in the log. Raises DroppedError: they never will be."""
        noted = self._noted
        if noted is None:
            return
        await asyncio.shield(noted)
        # Another answer that waited may have been here first, and other lines may have been noted since.
        if self._noted is noted:
            self._noted = None

    @contextmanager
    def cutting(self, cut: Callable[[], None]) -> Iterator[None]:
        """Call `cut` if the task is dropped while the context lasts."""
        self.cuts.add(cut)
        try:
            yield
        finally:
            self.cuts.discard(cut)

    @contextmanager
    def ending(self, is_stream: Callable[[], bool] = lambda: True) -> Iterator[None]:
        """End the current task's block if the task is dropped while the block is a stream. See `cutting`."""
        serving, is_cut = asyncio.current_task(), False
        assert serving is not None

        def cut() -> None:
            nonlocal is_cut
            if is_stream():
                is_cut = True
                serving.cancel()

        try:
            with self.cutting(cut):
                yield
        except asyncio.CancelledError:
            if not is_cut:
                raise
            serving.uncancel()

    @asynccontextmanager
    async def holding_rows(self) -> AsyncIterator[None]:
        """Send no row to the log while the context lasts. It begins when no row is on its way."""
        async with self._sending:
            yield

    def fail(self, reason: str) -> None:
        """Own the task no more, because memory and log differ."""
        self._failed(self, reason)

    def open(self) -> None:
        """Let calls be answered: the positions of the log are in memory."""
        self._opened.set()

    @property
    def is_open(self) -> bool:
        """Whether calls are answered."""
        return self._opened.is_set() and not self.is_dropped

    async def opened(self) -> None:
        """Wait until calls are answered, or the task was dropped."""
        await self._opened.wait()

    def drop(self) -> None:
        """Own the task no more. Lines that are not in the log yet count as never written. Idempotent."""
        self.is_dropped = True
        lost = [*self._outbox.sent, *self._outbox.waiting]
        self._outbox.sent, self._outbox.waiting = [], []
        for _, written in lost:
            if written is not None and not written.done():
                written.set_exception(DroppedError(self.task))
        cuts, self.cuts = self.cuts, set()
        for cut in cuts:
            cut()
        self._opened.set()

    async def _send(self) -> None:
        try:
            while self._outbox.waiting:
                async with self._sending:
                    row = self._outbox.next_row()
                    # Without lines the task was dropped meanwhile.
                    if row is None or not await self._send_row(row):
                        return
        except BaseException:
            # Nothing else would write these lines, and calls would wait for them for ever.
            if not self.is_dropped:
                self.fail("its log could not be written")
            raise
        finally:
            self._is_sending = False

    async def _send_row(self, row: int) -> bool:
        """Write the lines that are on their way; return whether they are in the log and the task is still owned."""
        body = encode(line for lines, _ in self._outbox.sent for line in lines)
        try:
            is_written = await self._append(self.task, row, body)
            reason = "another member has taken it over"
        except DatabaseError as error:
            # It is unknown whether the row was written, so the log is read again.
            is_written, reason = False, str(error)
        if self.is_dropped:
            return False
        if not is_written:
            self.fail(reason)
            return False
        sent = self._outbox.sent
        self._outbox.written()
        self.rows += 1
        for _, written in sent:
            if written is not None and not written.done():
                written.set_result(None)
        return True
