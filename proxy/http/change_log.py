"""The log of what people change by REST: who has forgotten, deleted, imported, forked or pinned what, and when."""

import os
import re
import time
from pathlib import Path
from typing import Any

import orjson
import structlog

from proxy.http.access import ALL, GRANT, Grant
from proxy.http.asgi import AsgiApp, AsgiMessage, Receive, Scope, Send

log = structlog.get_logger()

FILE = "changes.jsonl"
MAX_BYTES = 4 << 20
"""Size at which a new file begins; the one before stays beside it. Some 20,000 changes."""
_SHOWN = 1000
"""Changes that are listed."""
_MADE_BY_PEOPLE = re.compile(
    "DELETE /api/v1/(?!tasks/[^/]+/rollouts/)|"
    "(?:POST|PUT) /api/v1/.+/(?:import|fork|pin|snapshot|images?|verify|masks|drain|rebalance)$|POST /api/v1/gc$"
)
"""Begins, ends and labels of rollouts, and specs of tasks, are what trainers send, thousands of them."""


class ChangeLog:
    """Appends to a file of the data directory. What cannot be written there is in the proxy's own log."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / FILE
        self._before = self._file.with_suffix(".before")

    def around(self, behind: AsgiApp) -> AsgiApp:
        """Return an application whose changes are noted when they are answered."""

        async def noting(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http" or not _MADE_BY_PEOPLE.match(f"{scope['method']} {scope['path']}"):
                await behind(scope, receive, send)
                return
            status = 0

            async def sending(message: AsgiMessage) -> None:
                nonlocal status
                status = message.get("status", status)
                await send(message)

            try:
                await behind(scope, receive, sending)
            finally:
                self._note(scope, status)

        return noting

    def latest(self) -> list[dict[str, Any]]:
        """Return the latest changes, the newest first. A line that a loss of power has cut is left out."""
        lines = [
            line for file in (self._before, self._file) if file.exists() for line in file.read_bytes().splitlines()
        ]
        changes = []
        for line in reversed(lines[-_SHOWN:]):
            try:
                changes.append(orjson.loads(line))
            except orjson.JSONDecodeError:
                continue
        return changes

    def _note(self, scope: Scope, status: int) -> None:
        grant: Grant = scope.get(GRANT, ALL)
        change = {
            "timestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "token": grant.name,
            "address": (scope.get("client") or ("",))[0], "method": scope["method"], "path": scope["path"][:2048],
            "status": status,
        }  # fmt: skip
        try:
            if self._file.exists() and self._file.stat().st_size > MAX_BYTES:
                self._file.replace(self._before)
            # Calls and names of agents' tasks are nobody else's business.
            fd = os.open(self._file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "wb") as file:
                file.write(orjson.dumps(change) + b"\n")
        except OSError as error:
            log.warning("a change is not in its log", error=str(error), **change)
