"""Calls sent to a worker with the limits of their spec, and what becomes of a worker that fails."""

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path

from sandboxes.calls import ToolCall
from sandboxes.effects import Effect
from sandboxes.errors import SandboxError
from sandboxes.ipc.codec import Envelope
from sandboxes.spec import EnvironmentSpec
from sandboxes.sql import results
from sandboxes.sql.results import Failure
from sandboxes.sqlite.messages import OpenFork, RunTool, SharedState, StateGone, ToolDone
from sandboxes.workers.messages import SetLimits
from sandboxes.workers.pool import PooledWorker, WorkerLostError, WorkerStuckError

_RESERVE_BYTES = 16 << 20
"""If less is free, a failed write met the end of the machine's disk, and not the limit of its spec."""
CIRCUMSTANTIAL = frozenset({"timeout", "limit"})
"""Kinds of failure that another run, with more time or memory available, may not have."""


@dataclass(frozen=True, slots=True)
class CallOutcome:
    """The outcome of one call on one database."""

    body: bytes  # The result as the agent receives it.
    effect: Effect = Effect.NONE
    seconds: float = 0.0
    shareable: bool = True  # Whether the result may answer other rollouts.
    volatile: bool = False  # Whether another run may give something else: it used the clock or random numbers.


class CallAbortedError(Exception):
    """A worker ended during a call, and the failure is the agent's result."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure

    def outcome(self, call: ToolCall, seconds: float) -> CallOutcome:
        """Return the result of the call. It is not shared, because another run may succeed."""
        arguments = call.arguments
        if call.tool == "compare":
            errors = {"sql": self.failure, "gold": None}
            body = results.comparison({}, errors, ordered=arguments["ordered"])
        else:
            shape, sql = arguments.get("format", "json"), arguments.get("sql", "")
            body = results.failure(self.failure, shape=shape, sql=sql)
        return CallOutcome(body, seconds=seconds, shareable=False)


class WorkerCalls:
    """Sends the calls of one sandbox to workers."""

    def __init__(self, spec: EnvironmentSpec, folder: Path) -> None:
        self._spec, self._folder = spec, folder
        self._limits = SetLimits(spec.limits.memory_mb, spec.limits.disk_mb)

    async def run(
        self,
        worker: PooledWorker,
        call: ToolCall,
        digest: bytes,
        *,
        state: SharedState | None = None,
        fork: OpenFork | None = None,
    ) -> Envelope[ToolDone | StateGone]:
        """Run a call in a worker, on a shared state or on the fork (None), which is opened first if one is given."""
        # The digest of the database's state seeds random numbers if the clock is frozen.
        frozen_ms = self._spec.frozen_ms
        request = RunTool(
            call.tool, dict(call.arguments), self._spec.limits.output_bytes, frozen_ms,
            b"" if frozen_ms is None else digest, state, fork,
        )  # fmt: skip
        try:
            return await worker.ask(request, limits=self._limits, timeout_s=call.arguments["timeout_s"])
        except WorkerStuckError as error:
            failure = Failure("the statement took longer than timeout_s and was stopped", "timeout")
            raise CallAbortedError(failure) from error

    def error_of(self, error: WorkerLostError) -> Exception:
        """Return what a lost worker means: a result for the agent, or a failure of the sandbox."""
        if error.cause == "memory":
            memory_mb = self._spec.limits.memory_mb
            return CallAbortedError(Failure(f"the statement needs more than {memory_mb} MB of memory", "limit"))
        # A worker that something else killed says nothing about the statement, also if the machine ran out of memory.
        return SandboxError(str(error))

    async def check_disk(self, done: ToolDone) -> None:
        """Raise SandboxError if a statement met a limit because the disk is full: the agent is not to blame then."""
        if done.kind == "limit":
            disk = await asyncio.to_thread(os.statvfs, self._folder)
            if disk.f_bavail * disk.f_frsize < _RESERVE_BYTES:
                raise SandboxError(f"the disk of {self._folder} is full. Free some space.")

    def outcome(self, done: ToolDone, body: bytes) -> CallOutcome:
        """Return the outcome of a call without an effect."""
        circumstantial = done.kind in CIRCUMSTANTIAL and not done.repeatable
        if done.kind == "timeout" and self._spec.shares_timeouts:
            circumstantial = False
        # With a frozen clock, each run gets the same time and the same random numbers.
        volatile = done.volatile and self._spec.volatile != "frozen"
        shareable = not circumstantial and not (volatile and self._spec.volatile == "never")
        return CallOutcome(body, seconds=done.seconds, shareable=shareable, volatile=volatile)
