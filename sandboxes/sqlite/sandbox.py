"""A sandbox that consists of one or several SQLite databases."""

import contextlib

from sandboxes.calls import Execution, ToolCall, ToolResult
from sandboxes.driver import FrozenState
from sandboxes.effects import StateDigest
from sandboxes.errors import NotFreezableError, SandboxError
from sandboxes.sql.results import marks_of
from sandboxes.sqlite.database import SandboxDatabase, combined_digest


class SqliteSandbox:
    """A sandbox of the `sqlite` driver."""

    def __init__(self, name: str, databases: dict[str, SandboxDatabase]) -> None:
        self.id, self.closed = name, False
        self._databases = databases
        self._closing = False

    @property
    def alive(self) -> bool:
        """False once the sandbox is closed, or a database has lost its session."""
        return not self._closing and all(database.alive for database in self._databases.values())

    @property
    def parts(self) -> set[str]:
        """Names of the frozen states that the sandbox needs."""
        return {part for database in self._databases.values() for part in database.parts}

    async def execute(self, call: ToolCall) -> Execution:
        """Run a call on the database that it names."""
        if not self.alive:
            raise SandboxError(f"sandbox {self.id} is dead")
        outcome = await self._databases[call.arguments["database"]].run(call)
        result = ToolResult(200, "application/json", outcome.body, marks=marks_of(outcome.body))
        state, witness = self._state()
        return Execution(
            result, outcome.effect, outcome.seconds, state, witness, outcome.shareable, volatile=outcome.volatile
        )

    async def freeze(self) -> FrozenState:
        """Save the state of every database."""
        if not self.alive:
            raise SandboxError(f"sandbox {self.id} is dead")
        state, _ = self._state()
        if state is None:
            raise NotFreezableError(
                "the rollout's SQL session holds a transaction, temporary tables or attached databases"
            )
        frozen = {name: await database.freeze() for name, database in self._databases.items()}
        payload = {"databases": {name: database.to_json() for name, (database, _) in frozen.items()}}
        parts = sorted({part for database, _ in frozen.values() for part in database.parts})
        size_bytes = sum(added for _, added in frozen.values())
        return FrozenState("sqlite", "files", payload, size_bytes, state, tuple(parts))

    async def close(self) -> None:
        """Close all databases. Idempotent."""
        if not self._closing:
            self._closing = True
            for database in self._databases.values():
                # A fork that cannot be deleted now goes at the next start.
                with contextlib.suppress(OSError):
                    await database.close()
            # Only now: until here the databases need their parts.
            self.closed = True

    def _state(self) -> tuple[StateDigest | None, bytes | None]:
        """Return the digest of all databases together as the state, or, if a session is open, as the witness."""
        combined = combined_digest({name: database.digest() for name, database in self._databases.items()})
        if any(database.witness for database in self._databases.values()):
            return None, combined
        return StateDigest(combined, combined), None
