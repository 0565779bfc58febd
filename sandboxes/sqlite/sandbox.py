"""A sandbox that is one or several SQLite databases."""

import contextlib
from collections.abc import Callable
from hashlib import blake2b

from sandboxes.calls import Execution, ToolCall, ToolResult
from sandboxes.driver import FrozenState
from sandboxes.effects import StateDigest
from sandboxes.errors import NotFreezableError, SandboxError
from sandboxes.sqlite.database import SandboxDatabase


class SqliteSandbox:
    """See `sandboxes.driver.Sandbox`."""

    def __init__(
        self, name: str, databases: dict[str, SandboxDatabase], gone: Callable[["SqliteSandbox"], None]
    ) -> None:
        self.id = name
        self._databases, self._gone = databases, gone
        self._closed = False

    @property
    def alive(self) -> bool:
        """See `Sandbox.alive`."""
        return not self._closed and all(database.alive for database in self._databases.values())

    @property
    def parts(self) -> set[str]:
        """The kept states that it needs."""
        return {part for database in self._databases.values() for part in database.parts}

    async def execute(self, call: ToolCall) -> Execution:
        """See `Sandbox.execute`."""
        if not self.alive:
            raise SandboxError(f"sandbox {self.id} is dead")
        ran = await self._databases[call.arguments["database"]].run(call)
        result = ToolResult(200, "application/json", ran.body)
        state, witness = self._state()
        return Execution(result, ran.effect, ran.seconds, state, witness, ran.shareable)

    async def freeze(self) -> FrozenState:
        """See `Sandbox.freeze`."""
        if not self.alive:
            raise SandboxError(f"sandbox {self.id} is dead")
        state, _ = self._state()
        if state is None:
            raise NotFreezableError(
                "the rollout's SQL session holds a transaction, temporary tables or attached databases"
            )
        kept = {name: await database.freeze() for name, database in self._databases.items()}
        payload = {"databases": {name: place.to_json() for name, (place, _) in kept.items()}}
        parts = sorted({part for place, _ in kept.values() for part in place.parts})
        size_bytes = sum(added for _, added in kept.values())
        return FrozenState("sqlite", "files", payload, size_bytes, state, tuple(parts))

    async def close(self) -> None:
        """See `Sandbox.close`."""
        if not self._closed:
            self._closed = True
            for database in self._databases.values():
                with contextlib.suppress(OSError):
                    await database.close()
            self._gone(self)

    def _state(self) -> tuple[StateDigest | None, bytes | None]:
        """Return the digest of all databases together, or, beside an open session, the witness."""
        digest = blake2b(digest_size=32)
        for name in sorted(self._databases):
            digest.update(name.encode() + b"\0" + self._databases[name].digest())
        named = digest.digest()
        if any(database.witness for database in self._databases.values()):
            return None, named
        return StateDigest(named, named), None
