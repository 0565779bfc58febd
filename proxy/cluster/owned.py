"""A task that this member owns: its log, and what is known of its rollouts and of the calls that were taken."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from proxy.cluster.lines import Kept, Line, encode
from proxy.cluster.link.frames import Hello
from proxy.cluster.postgres.connection import DatabaseError
from proxy.cluster.protocol import CopyKind, Outbox, OwnedTask, TakenCalls
from proxy.refusals import RefusalError
from sandboxes.task_owner import TaskOwner

Append = Callable[[str, int, bytes], Awaitable[bool]]
"""Writes a row of a task's log; returns False if the task has another owner."""


class DroppedError(RefusalError):
    """This member does not own the task any more. The ingress asks the next owner."""

    def __init__(self, task: str) -> None:
        super().__init__(503, "not-owner", f"this member does not own task {task!r} any more. Try again.")


@dataclass(slots=True, eq=False)
class TakenCall:
    """A call of a peer that was taken.

    Attributes:
        link: Greeting of the link that brought the latest copy of it.
        known: Its answer as the content of a frame (`proxy.cluster.hits.calls`), if the tree had it; None for a call
            that runs or has run.
        answer: The message that answers any other call.
    """

    link: Hello
    known: bytes | None = None
    answer: asyncio.Future[bytes] | None = None


class IngressCalls:
    """The calls of one start of an ingress.

    Attributes:
        rules: Which calls were taken.
        answers: Those whose answer the ingress may still ask for, by number.
    """

    def __init__(self, boot: int) -> None:
        self.rules = TakenCalls(boot)
        self.answers: dict[int, TakenCall] = {}

    def take(self, number: int, *, oldest: int) -> CopyKind:
        """Take a call, and forget the answers that the ingress has; see `TakenCalls.take`. O(1) amortised."""
        # In the order in which they were taken. Numbers that came late wait until those before them are forgotten.
        answers = self.answers
        while answers and (first := next(iter(answers))) < oldest:
            del answers[first]
        return self.rules.take(number, oldest=oldest)


class Owned:
    """One task from the moment this member owns it until it drops it.

    Attributes:
        task: Name of the task.
        rules: Positions and ingresses of its rollouts.
        is_ready: Whether the positions of the log are in memory; no call is answered before.
        is_dropped: Whether this member owns it no more.
        unlogged: For each record whose line is not in the log yet, by number: completed when it is there.
        trees: For each tree in the log: the digest of its root state there.
        kept: The states that the store has, by node, as the log says.
        rows: About how many rows the log has that do not say who owns the task.
        lines: How many lines the last compaction has left; 0 before one.
        calls: The calls of peers that were taken, by ingress.
        tasks: What runs for it.
        cuts: Called when the task is dropped: they end streams that would never end otherwise.
    """

    def __init__(self, task: str, rules: OwnedTask, append: Append, failed: Callable[["Owned", str], None]) -> None:
        """Begin to own a task.

        Args:
            task: Its name.
            rules: What the log and the own ingress know.
            append: Writes rows.
            failed: Called when a row could not be written, with the reason. It must call `drop`.
        """
        self.task, self.rules = task, rules
        self.is_ready = self.is_dropped = False
        self.unlogged: dict[int, asyncio.Future[None]] = {}
        self.trees: dict[int, bytes | None] = {}
        self.kept: dict[int, Kept] = {}
        self.rows = self.lines = 0
        self.calls: dict[int, IngressCalls] = {}
        self.cuts: set[Callable[[], None]] = set()
        self._noted: asyncio.Future[None] | None = None
        self._append, self._failed = append, failed
        self._outbox: Outbox[tuple[Sequence[Line], int, asyncio.Future[None]]] = Outbox(rules.view)
        self._changed, self._sending = asyncio.Event(), asyncio.Lock()
        self.tasks = TaskOwner()

    def calls_of(self, ingress: int, boot: int) -> IngressCalls | None:
        """Return the calls of a start of an ingress; None if a later start is known."""
        calls = self.calls.get(ingress)
        if calls is None or calls.rules.boot < boot:
            calls = self.calls[ingress] = IngressCalls(boot)
        return calls if calls.rules.boot == boot else None

    def require(self) -> None:
        """Check that the task is still owned.

        Raises:
            DroppedError: It is not.
        """
        if self.is_dropped:
            raise DroppedError(self.task)

    def write(self, lines: Sequence[Line], record: int = 0) -> asyncio.Future[None]:
        """Write lines to the log, behind all lines that were written before; the future says when they are there.

        Args:
            lines: The lines.
            record: Number of the record among them, which counts as logged from then on; 0 for none.
        """
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # Not each caller waits, and an error that is not looked at is no defect.
        written.add_done_callback(lambda done: done.cancelled() or done.exception())
        if self.is_dropped:
            written.set_exception(DroppedError(self.task))
            return written
        if record:
            self.unlogged[record] = written
        idle = not self._outbox.waiting and not self._outbox.sent
        self._outbox.waiting.append((lines, record, written))
        if idle:
            self.tasks.spawn("task log", self._send())
        return written

    def note(self, lines: Sequence[Line]) -> asyncio.Future[None]:
        """Write lines, as `write` does, that every later answer depends on: `settled` waits for them."""
        written = self.write(lines)
        self.note_written(written)
        return written

    def note_written(self, written: asyncio.Future[None]) -> None:
        """Let `settled` wait for lines that were written; all earlier ones are in the log before them."""
        self._noted = written

    async def settled(self) -> None:
        """Wait until the lines that `note` has written are in the log.

        Raises:
            DroppedError: They never will be.
        """
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

    async def await_change(self, until: float) -> bool:
        """Wait until an ingress has reported or the task was dropped; return False if neither came by then.

        Args:
            until: A time of the event loop's clock.
        """
        changed = self._changed
        try:
            async with asyncio.timeout_at(until):
                await changed.wait()
        except TimeoutError:
            return False
        return True

    def note_change(self) -> None:
        """Wake those who wait for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    def drop(self) -> None:
        """Own the task no more. Lines that are not in the log yet count as never written. Idempotent."""
        self.is_dropped = True
        lost = [*self._outbox.sent, *self._outbox.waiting]
        self._outbox.sent, self._outbox.waiting = [], []
        for _, _, written in lost:
            if not written.done():
                written.set_exception(DroppedError(self.task))
        cuts, self.cuts = self.cuts, set()
        for cut in cuts:
            cut()
        self.note_change()

    async def _send(self) -> None:
        """Write rows until no line waits."""
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

    async def _send_row(self, row: int) -> bool:
        """Write the lines that are on their way; return whether they are in the log and the task is still owned."""
        body = encode(line for lines, _, _ in self._outbox.sent for line in lines)
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
        for _, record, written in sent:
            self.unlogged.pop(record, None)
            if not written.done():
                written.set_result(None)
        return True
