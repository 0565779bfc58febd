"""The driver's side of egress: it starts the egress proxy, opens an outlet for each sandbox, and asks what came in.

Theory of operation. The sandbox keeps a network of only its loopback: there is no route, no interface and no address
translation. Its supervisor makes a listening socket on that loopback before the agent's first process runs
(`sandboxes.linux.outlet`). The socket goes to the egress proxy, which accepts the connections of the sandbox's programs
there. So every byte that enters or leaves is in a request that the egress proxy has understood.

After each call the sandbox asks what its programs requested. The answer says whether something came in that was not
recorded before, which a replay must not have (`proxy.execution.divergence`).
"""

import asyncio
import contextlib
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import orjson
import structlog

from sandboxes.calls import Execution
from sandboxes.egress.messages import CloseOutlet, OpenOutlet, RecountRecordings, TakeExchanges
from sandboxes.egress.portable_recordings import PortableRecordings
from sandboxes.errors import SandboxError
from sandboxes.ipc.fork_server import ForkServer
from sandboxes.linux.descriptors import Opened
from sandboxes.linux.outlet import PORT
from sandboxes.spec import EnvironmentSpec

log = structlog.get_logger()

_URL = f"http://127.0.0.1:{PORT}"
_VARIABLES = {
    "http_proxy": _URL, "https_proxy": _URL, "HTTP_PROXY": _URL, "HTTPS_PROXY": _URL,
    "no_proxy": "localhost,127.0.0.1,::1", "NO_PROXY": "localhost,127.0.0.1,::1",
}  # fmt: skip
"""What tells programs of the egress proxy. Some read only the names in lower case, others only those in upper case."""


def variables(spec: EnvironmentSpec) -> Mapping[str, str]:
    """Return the environment variables that a sandbox has for its egress; none without egress."""
    return {} if spec.egress is None else _VARIABLES


class EgressGateway:
    """The egress of one driver's sandboxes. The egress proxy starts with the first one that has egress."""

    def __init__(self, folder: Path, *, module: str = "sandboxes.egress.process") -> None:
        """Describe the egress proxy; its process runs the `main` of `module`, which tests replace."""
        self._folder = folder
        self._process = ForkServer("the egress proxy", module, [str(folder)], site_packages=True)
        self._starting = asyncio.Lock()
        # Environments of which some states here come from other recordings than those that are here.
        self._doubtful: set[str] = set()

    async def open_outlet(self, sandbox: str, spec: EnvironmentSpec, listener: int) -> "SandboxEgress":
        """Serve the connections of a sandbox whose spec has egress. The listening socket is closed here."""
        assert spec.egress is not None, "only sandboxes with egress have a listening socket"
        with Opened(listener):
            async with self._starting:
                if not self._process.is_open:
                    await self._process.start()
            await self._process.ensure_running()
            scope = _scope(spec)
            await self._process.ask(OpenOutlet(sandbox, list(spec.egress.hosts), scope), [listener])
        return SandboxEgress(sandbox, self._process, lambda: scope in self._doubtful)

    def recordings(self, spec: EnvironmentSpec) -> PortableRecordings | None:
        """Return the recordings of a spec; None if it has no egress."""
        if spec.egress is None:
            return None
        scope = _scope(spec)
        return PortableRecordings(self._folder, scope, self._recount, lambda: self._doubtful.add(scope))

    async def _recount(self) -> None:
        # A process that starts later counts by itself.
        if self._process.is_open:
            with contextlib.suppress(SandboxError):
                await self._process.ask(RecountRecordings())

    async def close(self) -> None:
        """End the egress proxy. Idempotent."""
        await self._process.close()


class SandboxEgress:
    """The egress of one sandbox."""

    def __init__(self, sandbox: str, process: ForkServer, is_doubtful: Callable[[], bool]) -> None:
        """Take over an open outlet. `is_doubtful`: whether a repeated recording may differ from the recorded call's."""
        self._sandbox, self._process, self._is_doubtful = sandbox, process, is_doubtful

    async def conclude(self, execution: Execution) -> Execution:
        """Return a call's outcome with what came in since the last one; `SandboxError` if the egress proxy ended."""
        taken = (await self._process.ask(TakeExchanges(self._sandbox))).message
        for exchange in taken.exchanges:
            log.info("egress", sandbox=self._sandbox, **asdict(exchange))
        if taken.lost:
            log.warning("egress: further requests are not listed", sandbox=self._sandbox, requests=taken.lost)
        is_live = taken.live or (bool(taken.exchanges) and self._is_doubtful())
        return replace(execution, live=is_live, exchanges=tuple(taken.exchanges))

    async def close(self) -> None:
        """End the sandbox's connections. Nothing happens if the egress proxy has ended."""
        with contextlib.suppress(SandboxError):
            await self._process.ask(CloseOutlet(self._sandbox))


def _scope(spec: EnvironmentSpec) -> str:
    """Return a name of the environment that a recording is for: sandboxes of one spec share it, set-up included."""
    members: dict[str, Any] = spec.root()
    # Set-up runs in another directory.
    del members["workdir"]
    return hashlib.blake2b(orjson.dumps(members, option=orjson.OPT_SORT_KEYS), digest_size=16).hexdigest()
