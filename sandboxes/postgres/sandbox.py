"""One sandbox of the `postgres` driver: where it stands in each of its databases, and its own clones of them."""

import hashlib
from collections.abc import Awaitable, Callable
from typing import Any

from sandboxes.calls import Execution, ToolCall, ToolResult
from sandboxes.driver import FrozenState
from sandboxes.effects import Effect, StateDigest
from sandboxes.errors import NotFreezableError, SandboxError, SpecError
from sandboxes.ipc.frames import Message
from sandboxes.postgres.clones import OPEN_S, Clones, PrivateClone, Template
from sandboxes.postgres.connection import application_name
from sandboxes.postgres.digest import DatabaseDigest, combined
from sandboxes.spec import EnvironmentSpec
from sandboxes.sql.results import Failure, failure
from sandboxes.workers.pool import Worker, WorkerLostError, WorkerPool, WorkerStuckError


class DatabasePosition:
    """Where a sandbox stands in one of its databases. template: what it was last cloned from, or is the state of.

    holds: whether its session has what no other could have: an open transaction, temporary tables, settings.
    """

    def __init__(self, template: Template) -> None:
        self.template = template
        self.digest: DatabaseDigest = template.digest
        self.touched = template.touched
        self.own: PrivateClone | None = None
        self.holds = False
        self.witness = b""

    @property
    def frozen(self) -> bool:
        """Whether the template is this state."""
        return self.digest == self.template.digest and self.touched == self.template.touched


class PostgresSandbox:
    """See `sandboxes.driver.Sandbox`."""

    def __init__(
        self,
        name: str,
        spec: EnvironmentSpec,
        places: dict[str, DatabasePosition],
        *,
        clones: Clones,
        worker_pool: WorkerPool,
        keep: Callable[[DatabasePosition], Awaitable[Template]],
        closed: Callable[["PostgresSandbox"], None],
    ) -> None:
        self.id, self.places = name, places
        self._spec, self._clones, self._worker_pool = spec, clones, worker_pool
        self._keep_state, self._closed = keep, closed
        self._why_dead = ""

    @property
    def alive(self) -> bool:
        return not self._why_dead

    async def execute(self, call: ToolCall) -> Execution:
        """See `Sandbox.execute`."""
        if self._why_dead:
            raise SandboxError(f"sandbox {self.id} is dead: {self._why_dead}")
        place = self.places[str(call.arguments["database"])]
        try:
            if place.own is None:
                answered = await self._read(place, call)
                if answered is not None:
                    return answered
                place.own = await self._clones.fork(place.template)
            return await self._run(place, place.own, call)
        except (WorkerStuckError, WorkerLostError) as error:
            return await self._ended(place, call, error)
        except SpecError as error:
            self._why_dead = str(error)
            raise SandboxError(str(error)) from error
        except BaseException as error:
            self._why_dead = str(error) or type(error).__name__
            raise

    async def _read(self, place: DatabasePosition, call: ToolCall) -> Execution | None:
        """Answer a call on the database that all share who read at this state; None where it must write."""
        database = await self._clones.reader(place.template)
        request = self._request(call) | {"dsn": place.template.server.agent_dsn(database)}
        async with self._worker_pool.reader() as worker:
            try:
                told = await self._ask(worker, request, call)
            except WorkerStuckError:
                await place.template.server.end(application_name(worker.pid))
                raise
        if told.fields.get("must_write"):
            return None
        return self._execution(told.fields, told.body, Effect.NONE)

    async def _run(self, place: DatabasePosition, own: PrivateClone, call: ToolCall) -> Execution:
        try:
            told = await self._ask(own.worker, self._request(call), call)
        except WorkerStuckError:
            await place.template.server.end(str(own.backend))
            raise
        fields = told.fields
        place.digest = DatabaseDigest.from_json(fields["digest"])
        place.touched = tuple(fields["touched"])
        place.holds = bool(fields["holds"])
        place.witness = bytes.fromhex(fields["witness"])
        effect = Effect.DATABASE if fields["database"] else Effect.NONE
        effect |= Effect.SESSION if fields["session"] else Effect.NONE
        return self._execution(fields, told.body, effect)

    async def _ask(self, worker: Worker, request: dict[str, Any], call: ToolCall) -> Message:
        """Ask a worker; one whose connection is lost is of no more use than one that is lost itself."""
        # Beside the statement: connecting, and digesting what it changed.
        told = await worker.request(request, timeout_s=float(call.arguments["timeout_s"]) + OPEN_S)
        cause = told.fields.get("lost")
        if cause is None:
            return told
        await worker.close()
        if cause == "timeout":
            raise WorkerStuckError(str(told.fields["told"]))
        raise WorkerLostError("memory" if cause == "memory" else "killed", str(told.fields["told"]))

    def _execution(self, fields: dict[str, Any], body: bytes, effect: Effect) -> Execution:
        volatile = bool(fields.get("volatile")) and self._spec.volatile == "never"
        return Execution(
            ToolResult(200, "application/json", body), effect, float(fields["seconds"]), self._state(),
            self._witness(), shareable=not (volatile or fields.get("timed_out")),
        )  # fmt: skip

    async def _ended(
        self, place: DatabasePosition, call: ToolCall, error: WorkerStuckError | WorkerLostError
    ) -> Execution:
        """Tell the agent of a statement that took its worker with it; what it did is rolled back by the server."""
        # Libraries written in C may crash where their memory ends.
        if isinstance(error, WorkerLostError) and error.cause not in ("memory", "crashed"):
            self._why_dead = str(error)
            raise SandboxError(f"the worker of sandbox {self.id} ended: {error}") from error
        if place.own is not None:
            # Its session is gone. Nothing was committed, so whoever goes on from here starts where this call began.
            self._why_dead = f"a statement ended its worker: {error}"
        if isinstance(error, WorkerStuckError):
            told = Failure("the statement took longer than timeout_s, and was stopped", "timeout")
        else:
            told = Failure("the answer needs more memory than limits.memory_mb allows", "limit")
        body = failure(told, shape=str(call.arguments.get("format", "json")), sql=str(call.arguments.get("sql", "")))
        seconds = float(call.arguments["timeout_s"]) if isinstance(error, WorkerStuckError) else 0.0
        result = ToolResult(200, "application/json", body)
        return Execution(result, Effect.NONE, seconds, self._state(), self._witness(), shareable=False)

    def _request(self, call: ToolCall) -> dict[str, Any]:
        return {
            "op": "run", "tool": call.tool, "arguments": dict(call.arguments), "limits": self._limits(),
            "output_bytes": self._spec.limits.output_bytes,
        }  # fmt: skip

    def _limits(self) -> dict[str, int]:
        return {"memory_mb": self._spec.limits.memory_mb, "disk_mb": self._spec.limits.disk_mb}

    # -- states ------------------------------------------------------------------------------------------------------

    @property
    def _holds(self) -> bool:
        return any(place.holds for place in self.places.values())

    def _state(self) -> StateDigest | None:
        if self._holds:
            return None
        return combined((name, _with_session(place)) for name, place in self.places.items())

    def _witness(self) -> bytes | None:
        if not self._holds:
            return None
        digest = hashlib.blake2b(digest_size=32)
        for name, place in sorted(self.places.items()):
            digest.update(name.encode() + b"\0" + (place.witness or place.digest.state().exact))
        return digest.digest()

    async def freeze(self) -> FrozenState:
        """See `Sandbox.freeze`. A copy on the server, for which the sandbox's connection is given up and made anew."""
        if self._why_dead:
            raise SandboxError(f"sandbox {self.id} is dead: {self._why_dead}")
        if self._holds:
            raise NotFreezableError("its session holds an open transaction, temporary tables, settings or the like")
        size = 0
        try:
            for place in self.places.values():
                if not place.frozen:
                    size += await self._keep(place)
        except (WorkerStuckError, WorkerLostError, SpecError) as error:
            self._why_dead = str(error)
            raise SandboxError(f"sandbox {self.id} could not be frozen: {error}") from error
        names = {name: place.template.name for name, place in self.places.items()}
        return FrozenState(
            "postgres", "files", {"places": names}, size, self._state(), tuple(sorted(set(names.values())))
        )

    async def _keep(self, place: DatabasePosition) -> int:
        own = place.own
        assert own is not None
        # PostgreSQL clones nothing that has a session.
        await own.worker.request({"op": "close"}, timeout_s=OPEN_S)
        template = await self._keep_state(place)
        await own.worker.close()
        place.own = await self._clones.connect(template, own.database, place.digest, place.touched)
        place.template = template
        return template.size_bytes

    async def close(self) -> None:
        """See `Sandbox.close`."""
        self._why_dead = self._why_dead or "it was closed"
        for place in self.places.values():
            own, place.own = place.own, None
            if own is not None:
                self._clones.later(self._clones.give_up(place.template.server, own))
        self._closed(self)


def _with_session(place: DatabasePosition) -> StateDigest:
    """Return a place's digest with the sequences that `currval` and `lastval` know, which other sessions do not."""
    state = place.digest.state()
    if not place.touched:
        return state
    told = "\0".join(place.touched).encode()
    exact = hashlib.blake2b(state.exact + told, digest_size=32).digest()
    return StateDigest(exact, hashlib.blake2b(state.content + told, digest_size=32).digest())
