"""One SQLite database of a sandbox: the state it is in, and the fork that it writes.

Theory of operation:

1. A database that is only read has no process and no file of its own. It is the name of a frozen state, and any shared
   worker can answer for it.
2. Every call runs read-only on a shared worker first. If the engine refuses (the call writes, or needs session state),
   the same worker becomes dedicated to this sandbox, and the call runs again on a fork of the state. No statement is
   parsed to decide this.
3. A call on the fork reports the digest, the log's length, the connection's counters and settings, and whether there
   is a session (a transaction, temporary tables). Comparing them with the state before gives the call's effect.
4. A call that must leave nothing behind (it failed, or only reads) is undone if it did: the worker is ended, and the
   next one opens the fork and cuts the log off at its former length. A fork without changes is dropped.
5. Session state lives only in its worker. It cannot be frozen, and if the worker is lost, the sandbox is dead. The
   `witness` names it: a hash chain over the calls that led to it.
"""

import asyncio
import secrets
import time
from collections.abc import Mapping
from dataclasses import replace
from hashlib import blake2b
from typing import TypeVar

import orjson

from sandboxes.calls import ToolCall
from sandboxes.effects import Effect
from sandboxes.errors import NotFreezableError, SandboxError, StateGoneError
from sandboxes.ipc.messages import Done
from sandboxes.spec import EnvironmentSpec
from sandboxes.sql.sqlite_tools import READING
from sandboxes.sqlite.counters import UNTOUCHED
from sandboxes.sqlite.messages import ForkState, OpenFork, ReadPages, SharedState, StateGone, ToolDone
from sandboxes.sqlite.store import DatabaseState, Fork, SqliteStore
from sandboxes.sqlite.worker_calls import CIRCUMSTANTIAL, CallAbortedError, CallOutcome, WorkerCalls
from sandboxes.workers.pool import PooledWorker, WorkerLostError, WorkerPool, WorkerStuckError

_AnswerT = TypeVar("_AnswerT", Done, ToolDone)
_OPEN_S = 60.0
"""Time limit in seconds for opening a fork, and for reading its list of changed pages."""


def visible_digest(state: DatabaseState, witness: bytes = b"") -> bytes:
    """Return the digest of a database's content and of all that later statements can see of earlier ones (pure)."""
    visible = orjson.dumps([state.digest, list(state.counters), state.settings], option=orjson.OPT_SORT_KEYS)
    return blake2b(visible + witness, digest_size=32).digest()


def combined_digest(digests: Mapping[str, bytes]) -> bytes:
    """Return the digest of several databases together, from the digest of each by its name (pure)."""
    combined = blake2b(digest_size=32)
    for name in sorted(digests):
        combined.update(name.encode() + b"\0" + digests[name])
    return combined.digest()


class SandboxDatabase:
    """One database of a sandbox, and the session that its rollout has on it."""

    def __init__(
        self, store: SqliteStore, worker_pool: WorkerPool, spec: EnvironmentSpec, state: DatabaseState
    ) -> None:
        self._store, self._worker_pool = store, worker_pool
        self._calls = WorkerCalls(spec, store.folder)
        # While `frozen`, its files are those of a frozen state, otherwise those of the fork.
        self.state = self._last_frozen = state
        self.witness = b""  # Names the session state beyond `state`; empty if there is none.
        self.alive = True  # False once session state is lost, or the database is closed.
        self._fork: Fork | None = None
        self._worker: PooledWorker | None = None
        self._opened = False

    @property
    def frozen(self) -> bool:
        """Whether the state is a frozen one, without session state."""
        return self.state is self._last_frozen and not self.witness

    @property
    def parts(self) -> set[str]:
        """Names of the frozen states that the database needs."""
        return {*self.state.parts, *self._last_frozen.parts, *(self._fork.origin.parts if self._fork else ())}

    def digest(self) -> bytes:
        """Return the digest of the content and of all that later statements can see of earlier ones."""
        return visible_digest(self.state, self.witness)

    async def run(self, call: ToolCall) -> CallOutcome:
        """Run a call: on a shared worker if possible, else on the fork."""
        began = time.perf_counter()
        try:
            # A read of a table ends this setting for its connection, which rollouts share.
            if self._fork is None and "defer_foreign_keys" not in self.state.settings:
                outcome = await self._read(call)
                if outcome is not None:
                    return outcome
            return await self._write(call)
        except CallAbortedError as error:
            return error.outcome(call, time.perf_counter() - began)

    async def freeze(self) -> tuple[DatabaseState, int]:
        """Save the state and return it, with the bytes that it added to the disk, unless there is session state."""
        if self.witness:
            raise NotFreezableError(
                "the rollout's SQL session holds a transaction, temporary tables or attached databases"
            )
        if self.frozen:
            return self.state, self._store.size_bytes(self.state.part)
        worker, to_open = await self._dedicated_worker()
        try:
            if to_open is not None:
                self._require_intact((await worker.ask(to_open, timeout_s=_OPEN_S)).message)
                self._opened = True
            pages = (await worker.ask(ReadPages(), timeout_s=_OPEN_S)).body
        except (WorkerLostError, WorkerStuckError) as error:
            raise SandboxError(f"the state of a database cannot be saved: {error}") from error
        assert self._fork is not None
        frames = self.state.frames
        self.state, added = await asyncio.to_thread(self._store.freeze, self._fork, self.state, pages)
        self._last_frozen = self.state
        if self.state.frames != frames:
            # The log was written into a new database file. The next change forks that one.
            await self._drop_fork()
        return self.state, added

    async def close(self) -> None:
        """End the worker and remove the fork."""
        self.alive = False
        await self._drop_fork()

    # -- calls -------------------------------------------------------------------------------------------------------

    async def _read(self, call: ToolCall) -> CallOutcome | None:
        state = self.state
        location = SharedState(
            f"{state.part} {orjson.dumps(state.settings).decode()}", str(self._store.path(state.part)), state.frames,
            state.settings, counted=state.counters != UNTOUCHED,
        )  # fmt: skip
        for last in (False, True):
            async with self._worker_pool.reader() as worker:
                try:
                    done, body, _ = await self._calls.run(worker, call, self.digest(), state=location)
                except WorkerLostError as error:
                    if error.cause != "killed" or last:
                        raise self._calls.error_of(error) from error
                    # Something else killed the shared worker. The call itself is not to blame, so try once more.
                    continue
                if isinstance(done, ToolDone) and done.needs_private:
                    # This worker has just opened the state, so it opens the fork fastest.
                    self._worker_pool.dedicate(worker)
                    self._worker, self._opened = worker, False
                    return None
            return self._calls.outcome(self._require_intact(done), body)
        raise AssertionError("the last attempt returns or raises")

    async def _write(self, call: ToolCall, *, retry: bool = True) -> CallOutcome:
        new = self._fork is None
        worker, to_open = await self._dedicated_worker()
        before, session = self.state, self.witness
        try:
            answer, body, _ = await self._calls.run(worker, call, self.digest(), fork=to_open)
            self._opened = True
        except (WorkerLostError, CallAbortedError) as error:
            if session:
                self.alive = False
            await self._roll_back()
            if isinstance(error, CallAbortedError):
                raise
            if error.cause == "killed" and session:
                raise SandboxError(f"{error}, and the session that it held is lost") from error
            if error.cause == "killed" and retry:
                return await self._write(call, retry=False)
            raise self._calls.error_of(error) from error
        done = self._require_intact(answer)
        await self._calls.check_disk(done)
        fork = done.fork
        assert fork is not None, "the worker has just run the call on the fork"
        # Case 1: the call must not have an effect. A failure that depends on time or memory is not reproducible, a
        # failed script rolls back, and a reading tool changes nothing.
        if done.kind in CIRCUMSTANTIAL or fork.lost or (call.tool in READING and not session):
            await self._undo(fork, session, new=new)
            return self._calls.outcome(done, body)
        after = replace(
            before, frames=fork.frames, digest=fork.digest, counters=fork.counters, settings=fork.settings
        )  # fmt: skip
        failed = done.kind is not None
        # Case 2: a failed statement leaves nothing, not even in the counters.
        if failed and not session and not fork.session and before.digest == after.digest:
            await self._undo(fork, session, new=new)
            return self._calls.outcome(done, body)
        # Case 3: whatever the call changed is its effect.
        return replace(self._calls.outcome(done, body), effect=await self._advance(call, done, fork, after, new=new))

    async def _advance(
        self, call: ToolCall, done: ToolDone, fork: ForkState, after: DatabaseState, *, new: bool
    ) -> Effect:
        before, session = self.state, self.witness
        effect = Effect.DATABASE if after.digest != before.digest else Effect.NONE
        if (after.counters, after.settings) != (before.counters, before.settings):
            effect |= Effect.SESSION
        # A statement that fails may have ended the transaction (OR ROLLBACK), or keep its first rows (OR FAIL).
        if bool(session) != fork.session or (session and fork.wrote and done.kind != "refused"):
            effect |= Effect.SESSION
        if effect and fork.session:
            statement = orjson.dumps([call.tool, call.arguments], option=orjson.OPT_SORT_KEYS)
            # A replay cannot reproduce what the clock or random numbers put into a session, so its name is unique.
            unique = secrets.token_bytes(16) if done.volatile else b""
            self.witness = blake2b(self.digest() + statement + unique, digest_size=32).digest()
        elif not fork.session:
            self.witness = b""
        if effect:
            self.state = after
        now, last = ((state.digest, state.counters, state.settings) for state in (self.state, self._last_frozen))
        if not self.witness and (new or effect) and now == last:
            # The call changed nothing, or undid earlier changes.
            self.state = self._last_frozen
            await self._drop_fork()
        return effect

    async def _undo(self, fork: ForkState, session: bytes, *, new: bool) -> None:
        state = self.state
        now = fork.digest, fork.counters, fork.settings, fork.frames
        same = now == (state.digest, state.counters, state.settings, state.frames)
        if session:
            # Session state has no copy to restore from: it is intact, or it is lost.
            self.alive = not fork.lost and fork.session and same
        elif not same or fork.session:
            await self._roll_back()
        elif new:
            await self._drop_fork()

    def _require_intact(self, answer: _AnswerT | StateGone) -> _AnswerT:
        if isinstance(answer, StateGone):
            raise StateGoneError(f"database state {self.state.part} is damaged: {answer.reason}")
        return answer

    # -- the fork ----------------------------------------------------------------------------------------------------

    async def _dedicated_worker(self) -> tuple[PooledWorker, OpenFork | None]:
        """Return the worker of the fork, and the `open` request that it needs first; None if it has the fork open."""
        # The fork and the worker are created if they are missing.
        if self._worker is not None and self._worker.alive and self._opened:
            return self._worker, None
        if self.witness:
            self.alive = False
            raise SandboxError("the worker that held the rollout's SQL session was killed")
        if self._fork is None:
            # In a thread, because a database that cannot be linked is copied.
            self._fork = await asyncio.to_thread(self._store.fork, self.state)
        fork, state = self._fork, self.state
        if self._worker is None or not self._worker.alive:
            self._worker, self._opened = await self._worker_pool.dedicated(), False
        if not self.alive:
            # The sandbox was closed during an await above, when there was no fork yet to remove.
            await self._drop_fork()
            raise SandboxError("the sandbox was closed meanwhile")
        return self._worker, OpenFork(
            str(fork.path), str(self._store.path(state.root)), str(fork.pages) if fork.pages else None,
            fork.origin.frames, state.frames, state.counters, state.settings,
        )  # fmt: skip

    async def _roll_back(self) -> None:
        """End the worker. The next one opens the fork as it was before the call."""
        worker, self._worker = self._worker, None
        if worker is not None:
            await worker.close()
        if self.frozen:
            await self._drop_fork()
        elif self._fork is not None:
            self._fork.forget_index()

    async def _drop_fork(self) -> None:
        worker, self._worker = self._worker, None
        fork, self._fork = self._fork, None
        if worker is not None:
            await worker.close()
        if fork is not None:
            await asyncio.to_thread(fork.remove)
