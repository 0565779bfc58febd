"""The `client` driver: a client runs the tools itself and reports each call with its answer.

A sandbox here is only the digest of the calls that were reported so far. A call carries the client's report in its body
(`ClientReport`), so a replay of recorded calls reaches the same digest. A report holds at one state: anywhere else it
is an error and is never recorded.
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b

import orjson

from sandboxes.calls import Execution, ToolCall, ToolResult
from sandboxes.driver import FrozenState
from sandboxes.effects import Effect, StateDigest
from sandboxes.errors import SandboxError
from sandboxes.spec import EnvironmentSpec

NAME = "client"
VERSION = "client-1"
"""The identity of every root state, and the version of frozen states: both consist of a digest."""
ROOT = StateDigest(b"\0" * 32, b"\0" * 32)
"""The state before the first call."""


@dataclass(frozen=True, slots=True)
class ClientReport:
    """What a client says about one call of its own."""

    at: bytes  # The digest of the state at which the call ran (`state_after`).
    answer: bytes  # The answer, as JSON.
    seconds: float  # How long the tool ran.
    changes: bool  # Whether the call leads to a state of its own. False for a call that only reads.

    def encoded(self) -> bytes:
        """Return the report as the body of its call."""
        fields = {"at": self.at.hex(), "seconds": self.seconds, "changes": self.changes, "answer": self.answer.decode()}
        return orjson.dumps(fields)

    @staticmethod
    def of(call: ToolCall) -> "ClientReport":
        """Return the report that a call carries; a call without one is a `SandboxError`."""
        try:
            fields = orjson.loads(call.body)
            return ClientReport(
                bytes.fromhex(fields["at"]), fields["answer"].encode(), float(fields["seconds"]), fields["changes"]
            )
        except (ValueError, TypeError, KeyError, AttributeError):
            raise SandboxError(f"call {call.tool!r} of {call.endpoint!r} carries no report of a client") from None


def state_after(at: bytes, key: bytes) -> StateDigest:
    """Return the state after a call that changes, given the digest of the state before and the call's key."""
    digest = blake2b(at + key, digest_size=32).digest()
    return StateDigest(digest, digest)


class ClientSandbox:
    """The place of a client's sandbox in the tree; see `sandboxes.driver.Sandbox`."""

    def __init__(self, name: str, state: StateDigest) -> None:
        self.id, self.alive, self._state = name, True, state

    async def execute(self, call: ToolCall) -> Execution:
        """Return what the client reported. A report of another state is a `SandboxError`."""
        if call.endpoint != "tvcache":
            text = orjson.dumps({"detail": "the sandboxes of this task belong to its client, which runs the calls"})
            return Execution(ToolResult(501, "application/json", text), Effect.NONE, 0.0, self._state)
        report = ClientReport.of(call)
        if report.at != self._state.exact:
            self.alive = False
            raise SandboxError("a client's report holds only at the state at which its call ran")
        if report.changes:
            name = orjson.dumps([call.tool, call.arguments], option=orjson.OPT_SORT_KEYS)
            self._state = state_after(report.at, name)
        effect = Effect.UNKNOWN if report.changes else Effect.NONE
        return Execution(ToolResult(200, "application/json", report.answer), effect, report.seconds, self._state)

    async def freeze(self) -> FrozenState:
        """Return the digest, which is all there is."""
        return FrozenState(NAME, "files", {}, 0, self._state)

    async def close(self) -> None:
        """Note the end. The client's own sandbox is not touched."""
        self.alive = False


class ClientDriver:
    """Keeps the places of clients' sandboxes; see `sandboxes.driver.Driver`."""

    name = NAME
    state_version = VERSION

    def __init__(self) -> None:
        self._ids = itertools.count(1)

    async def open(self) -> None:
        """Do nothing: a killed proxy leaves nothing behind."""

    async def identity(self, spec: EnvironmentSpec) -> str:  # noqa: ARG002 - the client knows what its root state is
        """Return the same identity for every spec."""
        return VERSION

    async def start(self, spec: EnvironmentSpec) -> ClientSandbox:  # noqa: ARG002 - as above
        """Return a place at the root."""
        return ClientSandbox(f"client-{next(self._ids)}", ROOT)

    async def restore(self, spec: EnvironmentSpec, frozen: FrozenState) -> ClientSandbox:  # noqa: ARG002 - as above
        """Return a place at a state."""
        return ClientSandbox(f"client-{next(self._ids)}", frozen.state or ROOT)

    async def collect(self, keep: Iterable[str]) -> int:  # noqa: ARG002 - there are no parts
        """Return 0: frozen states hold no data."""
        return 0

    async def aclose(self) -> None:
        """Do nothing."""
