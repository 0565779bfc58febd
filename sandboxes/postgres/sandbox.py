"""A sandbox of the `postgres` driver: its position in each of its databases, and its private clones."""

import hashlib
from collections.abc import Awaitable, Callable

from sandboxes.calls import Execution, ToolCall, ToolResult
from sandboxes.driver import FrozenState
from sandboxes.effects import Effect, StateDigest
from sandboxes.errors import NotFreezableError, SandboxError, SpecError
from sandboxes.ipc.codec import Envelope
from sandboxes.postgres.clones import OPEN_S, Clones, PrivateClone, Template
from sandboxes.postgres.connection import application_name
from sandboxes.postgres.digest import DatabaseDigest, combined
from sandboxes.postgres.messages import MustWrite, RunStatement, ServerLost, StatementDone
from sandboxes.postgres.usage import ServerLimitError, WatchedSession
from sandboxes.spec import EnvironmentSpec
from sandboxes.sql.results import Failure, failure, marks_of
from sandboxes.workers.messages import CloseEngine, SetLimits
from sandboxes.workers.pool import PooledWorker, WorkerLostError, WorkerPool, WorkerStuckError


class DatabasePosition:
    """A sandbox's position in one of its databases."""

    def __init__(self, template: Template) -> None:
        self.template = template  # The one that it was last cloned from, or that is its state.
        self.digest: DatabaseDigest = template.digest
        self.sequence_use = template.sequence_use  # What the session knows of sequences.
        self.clone: PrivateClone | None = None  # None until the sandbox writes.
        self.has_session = False  # Whether there is an open transaction, a temporary table, a setting.
        self.witness = b""  # Names the session state; empty if there is none.

    @property
    def frozen(self) -> bool:
        """Whether the template is the current state."""
        return self.digest == self.template.digest and self.sequence_use == self.template.sequence_use

    def state(self) -> StateDigest:
        """Return the digest of the content and of the sequences that `currval` and `lastval` know in this session."""
        state = self.digest.state()
        if not self.sequence_use:
            return state
        use = repr(self.sequence_use).encode()
        exact = hashlib.blake2b(state.exact + use, digest_size=32).digest()
        return StateDigest(exact, hashlib.blake2b(state.content + use, digest_size=32).digest())


class PostgresSandbox:
    """A sandbox of the `postgres` driver, with its databases by the names that the spec gives them."""

    def __init__(
        self,
        name: str,
        spec: EnvironmentSpec,
        positions: dict[str, DatabasePosition],
        *,
        clones: Clones,
        worker_pool: WorkerPool,
        save: Callable[[DatabasePosition], Awaitable[Template]],
        on_close: Callable[["PostgresSandbox"], None],
    ) -> None:
        """Create a sandbox; `save` copies a private clone into a template, `on_close` is called once at the close."""
        self.id, self.positions = name, positions
        self._spec, self._clones, self._worker_pool = spec, clones, worker_pool
        self._save, self._on_close = save, on_close
        self._why_dead = ""

    @property
    def alive(self) -> bool:
        """False after a failure that lost state, and after `close`."""
        return not self._why_dead

    async def execute(self, call: ToolCall) -> Execution:
        """Run a call: read-only on the shared reader if possible, else on a private clone."""
        if self._why_dead:
            raise SandboxError(f"sandbox {self.id} is dead: {self._why_dead}")
        position = self.positions[str(call.arguments["database"])]
        try:
            if position.clone is None:
                execution = await self._read(position, call)
                if execution is not None:
                    return execution
                position.clone = await self._clones.fork(position.template)
            return await self._write(position, position.clone, call)
        except (WorkerStuckError, WorkerLostError, ServerLimitError) as error:
            return self._aborted(position, call, error)
        except SpecError as error:
            self._why_dead = str(error)
            raise SandboxError(str(error)) from error
        except BaseException as error:
            # A cancelled call may or may not have been committed, so the state is unknown.
            self._why_dead = str(error) or type(error).__name__
            raise

    async def _read(self, position: DatabasePosition, call: ToolCall) -> Execution | None:
        database = await self._clones.reader(position.template)
        request = self._request(call, position.template.server.agent_dsn(database))
        async with self._worker_pool.reader() as worker:
            # A state may have any size, and a read adds temporary files to it.
            size_bytes = position.template.size_bytes
            session = self._session(position, database, application_name(worker.pid), size_bytes)
            try:
                async with session.watched():
                    answer = await self._run(worker, request)
            except WorkerStuckError:
                # The server still runs the statement for the killed worker.
                await session.server.end(session.name)
                raise
        if isinstance(answer.message, MustWrite):
            return None
        return self._execution(answer.message, answer.body, Effect.NONE)

    async def _write(self, position: DatabasePosition, clone: PrivateClone, call: ToolCall) -> Execution:
        session = self._session(position, clone.database, str(clone.backend), position.template.root_bytes)
        try:
            async with session.watched():
                answer = await self._run(clone.worker, self._request(call))
        except WorkerStuckError:
            await session.server.end(session.name)
            raise
        done = answer.message
        assert isinstance(done, StatementDone), "a private database never refuses to write"
        state = done.private
        assert state is not None, "the worker has just run the call on its private database"
        if (state.database_changed or state.session_changed) and (excess := await session.end_if_exceeding()):
            raise ServerLimitError(excess)
        position.digest, position.sequence_use = state.digest, state.sequence_use
        position.has_session, position.witness = state.has_session, state.witness
        effect = Effect.DATABASE if state.database_changed else Effect.NONE
        effect |= Effect.SESSION if state.session_changed else Effect.NONE
        return self._execution(done, answer.body, effect)

    def _session(self, position: DatabasePosition, database: str, name: str, root_bytes: int) -> WatchedSession:
        return WatchedSession(position.template.server, database, name, root_bytes, self._spec.limits.disk_mb)

    async def _run(self, worker: PooledWorker, request: RunStatement) -> Envelope[StatementDone | MustWrite]:
        """Send a request to a worker. A worker that lost its connection is treated as a lost worker."""
        limits = SetLimits(self._spec.limits.memory_mb, self._spec.limits.disk_mb)
        # Connecting and digesting take time beyond the statement's own limit.
        within_s = float(request.arguments["timeout_s"]) + OPEN_S
        message, body, fds = await worker.ask(request, limits=limits, timeout_s=within_s)
        if not isinstance(message, ServerLost):
            return Envelope(message, body, fds)
        await worker.close()
        if message.cause == "timeout":
            raise WorkerStuckError(message.message)
        raise WorkerLostError("memory" if message.cause == "memory" else "killed", message.message)

    def _execution(self, done: StatementDone, body: bytes, effect: Effect) -> Execution:
        once = (done.volatile and self._spec.volatile == "never") or (done.timed_out and not self._spec.shares_timeouts)
        once = once or done.circumstantial
        return Execution(
            ToolResult(200, "application/json", body, marks=marks_of(body)), effect, done.seconds, self._state(),
            self._witness(), shareable=not once, volatile=done.volatile,
        )  # fmt: skip

    def _aborted(
        self, position: DatabasePosition, call: ToolCall, error: WorkerStuckError | WorkerLostError | ServerLimitError
    ) -> Execution:
        """Return the result of a statement that ended its session; SandboxError if it is not to blame."""
        # The session's changes are lost: the server rolls them back, or the clone is dropped with them.

        # "crashed" counts as out of memory: a C library may crash when it cannot allocate.
        if isinstance(error, WorkerLostError) and error.cause not in ("memory", "crashed"):
            self._why_dead = str(error)
            raise SandboxError(f"the worker of sandbox {self.id} ended: {error}") from error
        if position.clone is not None:
            # The session is lost, but no other one sees what it did: sandboxes may still restore the state before.
            self._why_dead = f"a statement ended its session: {error}"
        if isinstance(error, WorkerStuckError):
            reason = Failure("the statement took longer than timeout_s, and was stopped", "timeout")
        elif isinstance(error, ServerLimitError):
            reason = Failure(str(error), "limit")
        else:
            reason = Failure("the answer needs more memory than limits.memory_mb allows", "limit")
        body = failure(reason, shape=str(call.arguments.get("format", "json")), sql=str(call.arguments.get("sql", "")))
        seconds = float(call.arguments["timeout_s"]) if isinstance(error, WorkerStuckError) else 0.0
        result = ToolResult(200, "application/json", body, marks=marks_of(body))
        return Execution(result, Effect.NONE, seconds, self._state(), self._witness(), shareable=False)

    def _request(self, call: ToolCall, dsn: str | None = None) -> RunStatement:
        return RunStatement(call.tool, dict(call.arguments), self._spec.limits.output_bytes, dsn)

    # -- states ------------------------------------------------------------------------------------------------------

    @property
    def _has_session(self) -> bool:
        return any(position.has_session for position in self.positions.values())

    def _state(self) -> StateDigest | None:
        if self._has_session:
            return None
        return combined((name, position.state()) for name, position in self.positions.items())

    def _witness(self) -> bytes | None:
        if not self._has_session:
            return None
        digest = hashlib.blake2b(digest_size=32)
        for name, position in sorted(self.positions.items()):
            digest.update(name.encode() + b"\0" + (position.witness or position.digest.state().exact))
        return digest.digest()

    async def freeze(self) -> FrozenState:
        """Save the state of every database as a template on the server, unless there is session state."""
        if self._why_dead:
            raise SandboxError(f"sandbox {self.id} is dead: {self._why_dead}")
        if self._has_session:
            raise NotFreezableError("its session holds an open transaction, temporary tables, settings or the like")
        size_bytes = 0
        try:
            for position in self.positions.values():
                if not position.frozen:
                    size_bytes += await self._freeze(position)
        except (WorkerStuckError, WorkerLostError, SpecError) as error:
            self._why_dead = str(error)
            raise SandboxError(f"sandbox {self.id} could not be frozen: {error}") from error
        names = {name: position.template.name for name, position in self.positions.items()}
        return FrozenState(
            "postgres", "files", {"places": names}, size_bytes, self._state(), tuple(sorted(set(names.values())))
        )

    async def _freeze(self, position: DatabasePosition) -> int:
        clone = position.clone
        assert clone is not None
        # PostgreSQL clones no database that has sessions, so the worker disconnects and another one connects after.
        await clone.worker.ask(CloseEngine(), timeout_s=OPEN_S)
        template = await self._save(position)
        await clone.worker.close()
        position.clone = await self._clones.connect(template, clone.database, position.digest, position.sequence_use)
        position.template = template
        return template.size_bytes

    async def close(self) -> None:
        """Release the private clones. Idempotent."""
        self._why_dead = self._why_dead or "it was closed"
        for position in self.positions.values():
            clone, position.clone = position.clone, None
            if clone is not None:
                self._clones.release(position.template.server, clone)
        self._on_close(self)
