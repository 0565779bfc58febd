"""What every driver promises. `tests/sandboxes/contract.py` holds each of them to it."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol, cast, runtime_checkable

from sandboxes.calls import Execution, ToolCall
from sandboxes.effects import StateDigest
from sandboxes.listener import Listener
from sandboxes.spec import EnvironmentSpec


@dataclass(frozen=True, slots=True)
class FrozenState:
    """A sandbox state that a driver can bring back, any number of times.

    payload: the driver's own JSON: layers, sessions.
    size_bytes: bytes on disk that this state added to those it was built on.
    parts: names of the driver's storage units (layers) that it needs; several states share most of theirs.
    state: the digest that the sandbox had; None where it has none.
    """

    driver: str
    kind: str
    payload: dict[str, Any]
    size_bytes: int
    state: StateDigest | None
    parts: tuple[str, ...] = ()


class Sandbox(Protocol):
    """One running sandbox. One caller at a time; the pool's leases see to that."""

    @property
    def id(self) -> str:
        """The name under which the machine knows it (cgroup, directory, container label)."""
        ...

    @property
    def alive(self) -> bool:
        """False once it is known to be dead; a dead one only needs `close`."""
        ...

    async def execute(self, call: ToolCall) -> Execution:
        """Run call and say what it changed.

        Raises:
            SandboxError: the sandbox failed. It is of no further use: close it.
        """
        ...

    async def freeze(self) -> FrozenState:
        """Freeze the state after the last call. The sandbox goes on from it, unharmed.

        Raises:
            NotFreezable: processes live; the sandbox goes on.
            SandboxError: the sandbox failed.
        """
        ...

    async def close(self) -> None:
        """Kill every process, unmount, and free what no frozen state holds. Idempotent; never raises SandboxError."""
        ...


class ServingSandbox(Sandbox, Protocol):
    """One in which tool servers run."""

    async def execute(self, call: ToolCall, listener: Listener | None = None) -> Execution:
        """See `Sandbox.execute`; listener hears a server's answer while it comes."""
        ...


SETTLE_S = 5.0
"""How long processes that a call left running may take to start; a state is settling for so long.

An estimate: a development server answers after one to three seconds. Halved, a replay may reach a slow server before it
listens and diverge. Doubled, each replay of such a call waits up to five seconds longer.
"""


@runtime_checkable
class Resting(Protocol):
    """A sandbox in which calls leave processes running, which may take a while to start."""

    async def rest(self, age_s: float) -> None:
        """Let time pass until what was last left running has lived here for age_s, or counts as started."""
        ...


async def rest(sandbox: Sandbox, age_s: float) -> None:
    """Give what a call has left running in sandbox the age that it had, where the next call would come sooner."""
    if age_s > 0 and isinstance(sandbox, Resting):
        await sandbox.rest(age_s)


async def execute(sandbox: Sandbox, call: ToolCall, listener: Listener | None) -> Execution:
    """Run call in sandbox. Only who serves tool servers is given a listener: others' answers come at once.

    Raises:
        SandboxError: see `Sandbox.execute`.
    """
    if listener is None:
        return await sandbox.execute(call)
    return await cast("ServingSandbox", sandbox).execute(call, listener)


class Driver(Protocol):
    """Knows one kind of sandbox. Its directory is its own; nothing of a dead instance is left after `open`."""

    @property
    def name(self) -> str: ...

    async def open(self) -> None:
        """Get ready, and remove the processes, mounts, cgroups and half-written files that a killed instance left."""
        ...

    async def identity(self, spec: EnvironmentSpec) -> str:
        """Return a digest of all that spec names outside itself (base, archives) and of this driver's version.

        Raises:
            SpecError: what spec names is not there or not usable.
        """
        ...

    async def start(self, spec: EnvironmentSpec) -> Sandbox:
        """Start a sandbox at spec's root state: base, archives, files, set-up.

        Raises:
            SpecError: spec cannot be built.
            SandboxError: the machine failed.
        """
        ...

    async def restore(self, spec: EnvironmentSpec, frozen: FrozenState) -> Sandbox:
        """Start a new sandbox at frozen, a state of a sandbox of the same spec. Never harms the source.

        Raises:
            StateGone: what frozen holds is gone or damaged.
            SandboxError: the machine failed; a later attempt may not.
        """
        ...

    async def collect(self, keep: Iterable[str]) -> int:
        """Delete the parts that are not in keep and that no live sandbox needs; return the bytes that keep occupies."""
        ...

    async def aclose(self) -> None:
        """Close every sandbox; frozen states stay."""
        ...
