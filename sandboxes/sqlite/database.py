"""One SQLite database of a sandbox.

As long as it is only read it is nothing but the name of a state: shared workers answer. With its first change it gets a
fork and a worker of its own.
"""

import asyncio
import os
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

import orjson

from sandboxes.calls import ToolCall
from sandboxes.effects import Effect
from sandboxes.errors import NotFreezableError, SandboxError, StateGoneError
from sandboxes.ipc.frames import Message
from sandboxes.spec import EnvironmentSpec
from sandboxes.sql import results
from sandboxes.sql.results import Failure
from sandboxes.sql.sqlite_tools import READING
from sandboxes.sqlite.counters import UNTOUCHED, Counters
from sandboxes.sqlite.file_clone import Method
from sandboxes.sqlite.store import DatabaseState, Fork, SqliteStore
from sandboxes.workers.pool import Worker, WorkerLostError, WorkerPool, WorkerStuckError

_OPEN_S = 60.0
_RESERVE_BYTES = 16 << 20
"""With less than this free, a write that found no room found none on the machine, and not in its limit."""
_ONCE = frozenset({"timeout", "limit"})
"""Failures that another run, with more time or memory at hand, may not have."""


@dataclass(frozen=True, slots=True)
class CallOutcome:
    """What came of one call on one database."""

    body: bytes
    effect: Effect = Effect.NONE
    seconds: float = 0.0
    shareable: bool = True


class DatabaseLostError(Exception):
    """A worker ended in a call, and the agent is told why."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class SandboxDatabase:
    """One database of a sandbox, and the session that the rollout has on it.

    place: the state it is in; its files are those of a kept state while `kept`, otherwise the fork's. witness: names
    what the rollout's session holds beyond that (a transaction, temporary tables); empty where it holds nothing.
    alive: False once a session is lost that nobody but its worker held.
    """

    def __init__(
        self, store: SqliteStore, worker_pool: WorkerPool, spec: EnvironmentSpec, place: DatabaseState
    ) -> None:
        self._store, self._worker_pool, self._spec = store, worker_pool, spec
        self.place = self._last_kept = place
        self.witness = b""
        self.alive = True
        self._fork: Fork | None = None
        self._worker: Worker | None = None
        self._opened = False
        limits = spec.limits
        self._limits = {"memory_mb": limits.memory_mb, "disk_mb": limits.disk_mb}
        self._frozen_ms = spec.frozen_ms

    @property
    def kept(self) -> bool:
        """Whether its state is one that has been kept, with nothing besides."""
        return self.place is self._last_kept and not self.witness

    @property
    def parts(self) -> set[str]:
        """The kept states that it needs."""
        return {*self.place.parts, *self._last_kept.parts, *(self._fork.origin.parts if self._fork else ())}

    def digest(self) -> bytes:
        """Return what names its state: the content, and what a later statement can see of earlier ones."""
        place = self.place
        told = orjson.dumps([place.digest, list(place.counters), place.settings], option=orjson.OPT_SORT_KEYS)
        return blake2b(told + self.witness, digest_size=32).digest()

    async def run(self, call: ToolCall) -> CallOutcome:
        """Run a call: on a shared worker where that will do, on the fork where the engine refuses.

        Raises:
            SandboxError: a worker or the machine failed.
        """
        began = time.perf_counter()
        try:
            if self._fork is None:
                ran = await self._read(call)
                if ran is not None:
                    return ran
            return await self._write(call)
        except DatabaseLostError as lost:
            seconds = time.perf_counter() - began
            return CallOutcome(_failed(call, lost.failure), seconds=seconds, shareable=False)

    async def _read(self, call: ToolCall) -> CallOutcome | None:
        """Run call on a shared worker; None where it needs one of its own."""
        place = self.place
        told = {
            "key": f"{place.part} {orjson.dumps(place.settings).decode()}",
            "path": str(self._store.path(place.part)),
            "frames": place.frames,
            "settings": place.settings,
            "counted": place.counters != UNTOUCHED,
        }
        for last in (False, True):
            async with self._worker_pool.reader() as worker:
                try:
                    answer = await self._ask(worker, call, place=told)
                except WorkerLostError as error:
                    if error.cause != "killed" or last:
                        raise self._lost(error) from error
                    # It was not this query that killed it: once more.
                    continue
                if answer.fields.get("needs_private"):
                    # It has the state at hand, so it is the one to go on.
                    self._worker_pool.dedicate(worker)
                    self._worker, self._opened = worker, False
                    return None
            self._require_whole(answer.fields)
            return self._ran(answer)
        raise AssertionError("the last attempt returns or raises")

    async def _write(self, call: ToolCall, *, again: bool = True) -> CallOutcome:
        """Run call on the fork; where one was made for it and it changed nothing after all, nothing is left of it."""
        new = self._fork is None
        worker, to_open = await self._own_worker()
        before, session = self.place, self.witness
        try:
            answer = await self._ask(worker, call, open=to_open)
            self._opened = True
        except (WorkerLostError, DatabaseLostError) as error:
            if session:
                self.alive = False
            await self._roll_back()
            if isinstance(error, DatabaseLostError):
                raise
            if error.cause == "killed" and session:
                raise SandboxError(f"{error}, and the session that it held is lost") from error
            if error.cause == "killed" and again:
                return await self._write(call, again=False)
            raise self._lost(error) from error
        fields = answer.fields
        self._require_whole(fields)
        await self._check_room(fields)
        if fields["kind"] in _ONCE or fields["lost"] or (call.tool in READING and not session):
            await self._take_back(fields, session, new=new)
            return self._ran(answer)
        after = replace(
            before, frames=fields["frames"], digest=fields["digest"], counters=Counters(*fields["counters"]),
            settings=fields["settings"],
        )  # fmt: skip
        failed = fields["kind"] is not None
        if failed and not session and not fields["session"] and before.digest == after.digest:
            # A statement that fails leaves nothing, not even in what `changes()` tells.
            await self._take_back(fields, session, new=new)
            return self._ran(answer)
        return await self._moved(call, answer, after, new=new)

    async def _moved(self, call: ToolCall, answer: Message, after: DatabaseState, *, new: bool) -> CallOutcome:
        before, session, fields = self.place, self.witness, answer.fields
        effect = Effect.DATABASE if after.digest != before.digest else Effect.NONE
        if (after.counters, after.settings) != (before.counters, before.settings):
            effect |= Effect.SESSION
        if bool(session) != fields["session"] or (session and fields["wrote"] and fields["kind"] is None):
            effect |= Effect.SESSION
        if effect and fields["session"]:
            told = orjson.dumps([call.tool, call.arguments], option=orjson.OPT_SORT_KEYS)
            # What the clock or lots put into a session no replay will bring back, and nobody could see that.
            unique = secrets.token_bytes(16) if fields["volatile"] else b""
            self.witness = blake2b(self.digest() + told + unique, digest_size=32).digest()
        elif not fields["session"]:
            self.witness = b""
        if effect:
            self.place = after
        if not self.witness and (new or effect) and _same(self.place, self._last_kept):
            # Nothing happened, or it was undone.
            self.place = self._last_kept
            await self._give_up_fork()
        return replace(self._ran(answer), effect=effect)

    async def _take_back(self, fields: Mapping[str, Any], session: bytes, *, new: bool) -> None:
        """After a call that is to have changed nothing: make sure that it has not."""
        place = self.place
        now = fields["digest"], Counters(*fields["counters"]), fields["settings"], fields["frames"]
        same = now == (place.digest, place.counters, place.settings, place.frames)
        if session:
            # Of a session, only its own connection knows what is gone.
            self.alive = not fields["lost"] and fields["session"] and same
        elif not same or fields["session"]:
            await self._roll_back()
        elif new:
            await self._give_up_fork()

    async def freeze(self) -> tuple[DatabaseState, int]:
        """Keep the state; return where, and the bytes that this added.

        Raises:
            NotFreezable: a transaction is open, or there are temporary tables.
            SandboxError: its worker failed.
        """
        if self.witness:
            raise NotFreezableError(
                "the rollout's SQL session holds a transaction, temporary tables or attached databases"
            )
        if self.kept:
            return self.place, self._store.size_bytes(self.place.part)
        worker, to_open = await self._own_worker()
        try:
            if to_open is not None:
                self._require_whole((await worker.request({"op": "open", **to_open}, timeout_s=_OPEN_S)).fields)
                self._opened = True
            pages = (await worker.request({"op": "run", "tool": "pages"}, timeout_s=_OPEN_S)).body
        except (WorkerLostError, WorkerStuckError) as error:
            raise SandboxError(f"a database cannot be kept: {error}") from error
        assert self._fork is not None
        frames = self.place.frames
        self.place, added = await asyncio.to_thread(self._store.freeze, self._fork, self.place, pages)
        self._last_kept = self.place
        if self.place.frames != frames:
            # The log became part of the database: whoever writes next forks that.
            await self._give_up_fork()
        return self.place, added

    async def close(self) -> None:
        self.alive = False
        await self._give_up_fork()

    # -- the fork ----------------------------------------------------------------------------------------------------

    async def _own_worker(self) -> tuple[Worker, dict[str, Any] | None]:
        """Return the worker on the fork, and what it must be told to open first, if anything; make what is missing.

        Raises:
            SandboxError: the session is lost with its worker, or the machine failed.
        """
        if self._worker is not None and self._worker.alive and self._opened:
            return self._worker, None
        if self.witness:
            self.alive = False
            raise SandboxError("the worker that held the rollout's SQL session was killed")
        if self._fork is None and self._store.method is Method.COPY:
            self._fork = await asyncio.to_thread(self._store.fork, self.place)
        fork, place = self._fork or self._store.fork(self.place), self.place
        self._fork = fork
        if self._worker is None or not self._worker.alive:
            self._worker, self._opened = await self._worker_pool.dedicated(), False
        if not self.alive:
            await self._give_up_fork()
            raise SandboxError("the sandbox was closed meanwhile")
        return self._worker, {
            "path": str(fork.path), "root": str(self._store.path(place.root)),
            "pages": str(fork.pages) if fork.pages else None, "saved_frames": fork.origin.frames,
            "frames": place.frames, "counters": place.counters, "settings": place.settings,
        }  # fmt: skip

    async def _roll_back(self) -> None:
        """End the worker; the next one begins with the fork as it was before the call."""
        worker, self._worker = self._worker, None
        if worker is not None:
            await worker.close()
        if self.kept:
            await self._give_up_fork()
        elif self._fork is not None:
            self._fork.forget_index()

    async def _give_up_fork(self) -> None:
        worker, self._worker = self._worker, None
        fork, self._fork = self._fork, None
        if worker is not None:
            await worker.close()
        if fork is not None:
            await asyncio.to_thread(fork.remove)

    # -- calls -------------------------------------------------------------------------------------------------------

    async def _ask(self, worker: Worker, call: ToolCall, **more: Any) -> Message:
        request = {
            "op": "run", "tool": call.tool, "arguments": dict(call.arguments), "limits": self._limits,
            "output_bytes": self._spec.limits.output_bytes, "frozen_ms": self._frozen_ms,
            "seed": self.digest().hex() if self._frozen_ms is not None else "", **more,
        }  # fmt: skip
        try:
            return await worker.request(request, timeout_s=call.arguments["timeout_s"])
        except WorkerStuckError as error:
            raise DatabaseLostError(
                Failure("the statement took longer than timeout_s and was stopped", "timeout")
            ) from error

    def _lost(self, error: WorkerLostError) -> Exception:
        memory_mb = self._spec.limits.memory_mb
        if error.cause == "memory":
            return DatabaseLostError(Failure(f"the statement needs more than {memory_mb} MB of memory", "limit"))
        if error.cause == "killed":
            return DatabaseLostError(
                Failure("the statement was stopped: the machine has too little memory for it", "limit")
            )
        return SandboxError(str(error))

    def _require_whole(self, fields: Mapping[str, Any]) -> None:
        if "gone" in fields:
            raise StateGoneError(f"database state {self.place.part} is damaged: {fields['gone']}")

    async def _check_room(self, fields: Mapping[str, Any]) -> None:
        if fields["kind"] == "limit":
            found = await asyncio.to_thread(os.statvfs, self._store.folder)
            if found.f_bavail * found.f_frsize < _RESERVE_BYTES:
                raise SandboxError(f"the disk of {self._store.folder} is full. Free some room.")

    def _ran(self, answer: Message) -> CallOutcome:
        fields = answer.fields
        once = fields["kind"] in _ONCE and not fields["repeatable"]
        volatile = fields["volatile"] and self._spec.volatile == "never"
        return CallOutcome(answer.body, seconds=fields["seconds"], shareable=not once and not volatile)


def _same(one: DatabaseState, other: DatabaseState) -> bool:
    """Say whether two places are one state, wherever their files are."""
    return (one.digest, one.counters, one.settings) == (other.digest, other.counters, other.settings)


def _failed(call: ToolCall, failure: Failure) -> bytes:
    arguments = call.arguments
    if call.tool == "compare":
        return results.comparison({}, {"sql": failure, "gold": None}, ordered=arguments["ordered"])
    return results.failure(failure, shape=arguments.get("format", "json"), sql=arguments.get("sql", ""))
