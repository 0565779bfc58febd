"""The driver contract: what every kind of sandbox must do. `tests/sandboxes/contract.py` checks each driver against it.

A driver starts sandboxes at the root state of a spec, runs calls in them, says what each call changed, and freezes and
restores states. It knows nothing of trees, rollouts or requests. Optional abilities are protocols of their own:
`ServingSandbox` and `Resting` here, `inspection` for views and terminals, `portability` for states that travel.

All methods are coroutines of one event loop. Blocking work belongs into threads or processes.
"""

from collections.abc import Awaitable, Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard, TypeVar, cast, runtime_checkable

from sandboxes.calls import UNKNOWN_COURSE, Course, Execution, ToolCall
from sandboxes.effects import StateDigest
from sandboxes.listener import Listener
from sandboxes.spec import EnvironmentSpec

P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class FrozenState:
    """A state that its driver can restore any number of times. Only metadata: the data stays with the driver."""

    driver: str  # The name of the driver that froze it.
    kind: str  # What the state consists of: `files` for plain data, `processes` for images of live processes.
    payload: dict[str, Any]  # What the driver needs to restore it, as JSON members: layers, sessions.
    size_bytes: int  # The bytes on disk that this state added to the states it was built on.
    state: StateDigest | None  # The digest that the sandbox had; None if it had none.
    # The names of the driver's storage units that hold the data. States share most of their parts.
    parts: tuple[str, ...] = ()


class Sandbox(Protocol):
    """One live sandbox. It has one caller at a time; the pool's leases see to that."""

    @property
    def id(self) -> str:
        """The name by which the machine knows the sandbox: of a cgroup, a directory, a container's label."""
        ...

    @property
    def alive(self) -> bool:
        """False once the sandbox is known to be dead. A dead sandbox must only be closed."""
        ...

    async def execute(self, call: ToolCall) -> Execution:
        """Run a call and detect what it changed. A failure of the tool is a result.

        A call that is cancelled kills the sandbox, because it is unknown how far it came.

        Raises:
            SandboxError: The sandbox failed and is dead. The caller closes it.
        """
        ...

    async def freeze(self) -> FrozenState:
        """Freeze the state after the last call. The sandbox continues unchanged.

        Returns:
            What `Driver.restore` needs. Its parts stay until `Driver.collect` is called without them.

        Raises:
            NotFreezableError: The state cannot be frozen, for example while processes run; the sandbox continues.
            SandboxError: The sandbox failed and is dead.
        """
        ...

    async def close(self) -> None:
        """Kill every process, unmount, and free whatever no frozen state needs. Idempotent; raises no SandboxError."""
        ...


class ServingSandbox(Sandbox, Protocol):
    """A sandbox in which tool servers run, whose responses may arrive over time."""

    async def execute(self, call: ToolCall, listener: Listener | None = None) -> Execution:
        """Run a call (`Sandbox.execute`); the listener receives a tool server's response while it arrives."""
        ...


SETTLE_S = 5.0
"""How long processes that a call left running may take to start; a state is settling for so long. An estimate: a
development server answers after one to three seconds. Halved, a replay may reach a slow server before it listens and
diverge. Doubled, each replay of such a call waits up to five seconds longer."""


@runtime_checkable
class WatchingDriver(Protocol):
    """A driver that notices when something changes that a spec only names, without looking at it again."""

    def unchanged(self, spec: EnvironmentSpec, /) -> Hashable | None:
        """Return a value that stands for `Driver.identity`, in microseconds and without blocking.

        Returns:
            Equal values mean equal identities. None: something may have changed, and only `identity` can tell.
        """
        ...


@runtime_checkable
class VersionedDriver(Protocol):
    """A driver that says when frozen states of an earlier version of it can no longer be restored."""

    @property
    def state_version(self) -> str:
        """Names the form and the meaning of frozen states. Snapshots with another one are removed at the start."""
        ...


@runtime_checkable
class Resting(Protocol):
    """A sandbox in which calls may leave processes running that take a while to start."""

    async def rest(self, dwell_s: float, /) -> None:
        """Wait until background processes count as started (`SETTLE_S`), for `dwell_s` seconds at the most."""
        # `dwell_s`: how long the recorded rollout had stayed at this state before its next call.
        ...


@runtime_checkable
class Repeating(Protocol):
    """A sandbox that can have a replay take the same course as the recorded call."""

    async def expect(self, course: Course, /) -> None:
        """Prepare for a call that is a replay: it writes files in the recorded order, and its processes get their pids.

        If the call writes other files than the recorded one, their times stay as they are. A pid that a process of the
        sandbox has is passed over.
        """
        ...


@runtime_checkable
class Settling(Protocol):
    """A sandbox that finishes a call in the background after its result."""

    async def settle(self) -> None:
        """Wait for what the last call left to do, as the next call or freeze would."""
        ...


@runtime_checkable
class EarlyFreezing(Protocol):
    """A sandbox that runs on while a frozen state of it is completed."""

    async def begin_freeze(self) -> Awaitable[FrozenState]:
        """Freeze the state as `Sandbox.freeze` does, but return what must be awaited for it: the next call may run."""
        ...


_FULFILS: dict[tuple[type, object], bool] = {}
"""Which classes have the members of which protocols, as far as `fulfils` was asked."""


def fulfils(thing: object, protocol: Callable[..., P]) -> TypeGuard[P]:
    """Return whether a sandbox or a driver has the members of a protocol, without the time that `isinstance` takes."""
    # The protocol's type is that of a function, because mypy takes no protocol for a `type`.
    key = type(thing), protocol
    if (known := _FULFILS.get(key)) is None:
        known = _FULFILS[key] = isinstance(thing, cast("type", protocol))
    return known


async def settle(sandbox: Sandbox) -> None:
    """Wait for what the last call left to do, if the sandbox is a `Settling` one."""
    if fulfils(sandbox, Settling):
        await sandbox.settle()


async def expect(sandbox: Sandbox, course: Course) -> None:
    """Prepare a sandbox for a replay, if it is a `Repeating` one and something is known of the recorded call."""
    if course != UNKNOWN_COURSE and fulfils(sandbox, Repeating):
        await sandbox.expect(course)


async def rest(sandbox: Sandbox, dwell_s: float) -> None:
    """Let a sandbox dwell at its state as long as the recorded rollout did, if it is a `Resting` one."""
    if dwell_s > 0 and fulfils(sandbox, Resting):
        await sandbox.rest(dwell_s)


async def execute(sandbox: Sandbox, call: ToolCall, listener: Listener | None) -> Execution:
    """Run a call; only sandboxes that run tool servers use the listener."""
    if listener is None:
        return await sandbox.execute(call)
    return await cast("ServingSandbox", sandbox).execute(call, listener)


class Driver(Protocol):
    """Starts and restores one kind of sandbox. One instance owns its data directory."""

    @property
    def name(self) -> str:
        """The name of the driver in specs and settings."""
        ...

    async def open(self) -> None:
        """Prepare for the first sandbox. Called once, before every other method.

        A killed instance may have left processes, mounts, cgroups and half-written files; `open` removes them.

        Raises:
            SandboxError: The driver cannot work here, for example because another process owns its directory.
        """
        ...

    async def identity(self, spec: EnvironmentSpec) -> str:
        """Return a digest of everything outside the spec that its root state depends on.

        Tasks with equal specs and equal identities have the same root state and may share a tree. The digest covers
        what the spec only names (base, archives, images) and the driver's own version, which changes when equal calls
        would give other results or digests than before.

        Raises:
            SpecError: What the spec names does not exist or cannot be used.
        """
        ...

    async def start(self, spec: EnvironmentSpec) -> Sandbox:
        """Start a sandbox at the root state of a spec: base, archives, files, set-up commands.

        Raises:
            SpecError: The spec cannot be built.
            SandboxError: The machine failed; a later attempt may succeed.
        """
        ...

    async def restore(self, spec: EnvironmentSpec, frozen: FrozenState) -> Sandbox:
        """Start a new sandbox at a frozen state. The sandbox that was frozen, and its other copies, are not affected.

        Args:
            spec: The spec of the sandbox that was frozen.
            frozen: The state, from `Sandbox.freeze` of this driver, possibly of an earlier process.

        Raises:
            StateGoneError: The data of the state is missing or damaged.
            SandboxError: The machine failed; a later attempt may succeed.
        """
        ...

    async def collect(self, keep: Iterable[str]) -> int:
        """Delete storage units but the parts of all states that the proxy keeps and of live sandboxes.

        Returns:
            The bytes on disk that the parts in `keep` occupy.
        """
        ...

    async def aclose(self) -> None:
        """Close every sandbox. Frozen states stay for the next instance. Idempotent."""
        ...


@runtime_checkable
class AdvisingDriver(Protocol):
    """A driver that knows when states are dearer on this machine than they need be."""

    def advice(self, spec: EnvironmentSpec, /) -> str:
        """Return what makes states of a task dear here, and what it costs; empty if nothing is known."""
        ...


@runtime_checkable
class ReservingDriver(Driver, Protocol):
    """A driver whose calls all fail, and end their sandboxes, while the disk has less free than a reserve."""

    def require_reserve(self) -> None:
        """Raise SandboxError while that is so. Asked before a call, so that a sandbox is not lost with its state."""
        ...


@runtime_checkable
class TriedDriver(Driver, Protocol):
    """A driver that can find out whether this machine lets its sandboxes run."""

    async def trial(self) -> None:
        """Run a call, or start what calls need, and end it again, on an open driver. Its error says what fails."""
        ...
