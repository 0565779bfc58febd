"""The `http` driver: its sandbox is a set of connections to servers elsewhere, whose state cannot be seen or kept.

So a call is shared only if its response is known to come again: a stateless call, by a rule; or a call after one that
opens a fresh session by a rule, so that the path of calls can be replayed in a session of its own. Every other call
belongs to its rollout alone and leaves no trace in the tree.
"""

import itertools
from collections.abc import Iterable
from pathlib import Path

from sandboxes.driver import FrozenState
from sandboxes.errors import SandboxError, StateGoneError
from sandboxes.spec import EnvironmentSpec
from sandboxes.upstream.sandbox import NO_SESSION, HttpSandbox

VERSION = "http-3"
"""The identity of every root state: it consists of nothing."""


class HttpDriver:
    """Sends calls to servers elsewhere; see `sandboxes.driver.Driver`."""

    name = "http"
    state_version = VERSION

    def __init__(self, data_dir: Path) -> None:
        self.data_dir = data_dir
        self._is_open = False
        self._live: set[HttpSandbox] = set()
        self._ids = itertools.count(1)

    async def open(self) -> None:
        """Take calls. Long responses are spooled to files without names, so nothing is ever left to remove."""
        self.data_dir.mkdir(parents=True, exist_ok=True)
        self._is_open = True

    async def identity(self, spec: EnvironmentSpec) -> str:  # noqa: ARG002 - servers elsewhere have no identity
        """Return the same identity for every spec."""
        return VERSION

    async def start(self, spec: EnvironmentSpec) -> HttpSandbox:
        """Return a sandbox without sessions. Nothing is sent yet."""
        if not self._is_open:
            raise SandboxError("the http driver is closed")
        sandbox = HttpSandbox(f"http-{next(self._ids)}", spec, self.data_dir, self._live.discard)
        self._live.add(sandbox)
        return sandbox

    async def restore(self, spec: EnvironmentSpec, frozen: FrozenState) -> HttpSandbox:
        """Return a sandbox without sessions, the only state that can be frozen. Raises StateGoneError if it has one."""
        if frozen.state != NO_SESSION:
            raise StateGoneError("a session with a server elsewhere cannot be restored")
        return await self.start(spec)

    async def collect(self, keep: Iterable[str]) -> int:  # noqa: ARG002 - there are no parts
        """Return 0: frozen states hold no data."""
        return 0

    async def aclose(self) -> None:
        """Close all sandboxes and connections."""
        for sandbox in list(self._live):
            await sandbox.close()
        self._is_open = False
