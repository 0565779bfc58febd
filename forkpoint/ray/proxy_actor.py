"""The actor of one node: it holds the listening socket of the node's proxy, and runs the proxy as its child.

Connections wait in the socket while there is no proxy, so a proxy that dies refuses none. One thread starts the proxy
and waits for its end, again and again. The kernel sends the proxy SIGTERM when that thread ends (`forkpoint serve
--parent`), so it lives as long as the actor's process. This module imports little, and not Ray, to save memory.
"""

import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from proxy.address import url_of
from sandboxes import IMPORT_ROOT
from sandboxes.errors import SandboxError
from sandboxes.linux.dir_lock import DirLock, is_unowned

FIRST_WAIT_S = 0.1
"""Wait before a proxy that ended is started again. It doubles with each failure in a row."""
LONGEST_WAIT_S = 30.0
"""Longest wait before another start. A proxy with wrong settings costs a second of CPU each time."""
STEADY_S = 60.0
"""A proxy that ran this long had no trouble with its start: the next failure is the first one again."""
STOP_S = 60.0
"""A proxy has this long to end after SIGTERM, as a service manager gives it. Then it is killed."""
ANSWER_S = 2.0
"""Timeout of the question whether the proxy is ready."""
LOG_BYTES = 16 << 20
"""A log of this size is put aside at the next start of the proxy; one older log is kept."""
_DATA = "data"
_MOST_ON_A_MACHINE = 64
"""How many nodes of Ray may share a machine, which only tests do."""


@dataclass(frozen=True, slots=True)
class ProxyPlan:
    """What runs on each node; it is the same on all of them.

    Attributes:
        port: Their TCP port; 0 for a free one. A further node on the same machine takes the next number.
        data: The directory on each machine below which each node has its own; None for one in `/var/tmp`.
        settings: The settings of the proxies, as environment variables. They may hold secrets.
        clustered: Whether the proxies are members of one cluster. If not, only one node has a proxy.
    """

    host: str
    port: int
    data: str | None
    settings: dict[str, str] = field(repr=False)
    clustered: bool


@dataclass(frozen=True, slots=True)
class ProxyState:
    """What runs on one node: no URL before the socket listens, and the `failures` in a row, with the last `problem`."""

    url: str | None
    pid: int | None
    ready: bool
    starts: int
    failures: int
    problem: str
    log: str | None


@dataclass(frozen=True, slots=True)
class _Place:
    name: str
    folder: Path
    owned: DirLock
    listener: socket.socket

    @property
    def log(self) -> Path:
        return self.folder / "serve.log"

    def release(self) -> None:
        self.listener.close()
        self.owned.release()


def load_little() -> None:
    """Keep Ray's worker process, our actor's alone, from loading 38 MB of libraries for values that we never pass."""
    for name in ("numpy", "pyarrow"):
        sys.modules.setdefault(name, None)  # type: ignore[arg-type] # such a module counts as not installed


class ProxyActor:
    """Runs the proxy of this node until `stop`. Ray makes one, and makes it again if its process dies."""

    def __init__(self, plan: ProxyPlan) -> None:
        """Start the proxy in the background; an actor whose constructor fails would not be made again."""
        self._plan = plan
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._place: _Place | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._starts, self._failures, self._problem = 0, 0, ""
        self._watcher = threading.Thread(target=self._watch, name="forkpoint-proxy", daemon=True)
        self._watcher.start()

    def url(self) -> str | None:
        """Return the base URL of the proxy for processes of this node; None before the socket listens."""
        return None if self._place is None else url_of(*self._place.listener.getsockname()[:2])

    def state(self) -> ProxyState:
        """Return what runs here. Asks the proxy, for at most `ANSWER_S`."""
        url, process, place = self.url(), self._process, self._place
        runs = process is not None and process.poll() is None
        ready = runs and url is not None and _is_ready(url)
        if ready:
            self._failures, self._problem = 0, ""
        pid = process.pid if runs and process is not None else None
        log = None if place is None else str(place.log)
        return ProxyState(url, pid, ready, self._starts, self._failures, self._problem, log)

    def stop(self) -> None:
        """End the proxy as a service manager does, and close the socket. Takes up to `STOP_S`. Idempotent."""
        with self._lock:
            self._stopped.set()
            process = self._process
        if process is not None:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
        self._watcher.join()
        place, self._place = self._place, None
        if place is not None:
            place.release()

    def _watch(self) -> None:
        while not self._stopped.is_set():
            began = time.monotonic()
            try:
                self._serve_once()
            except (OSError, SandboxError) as error:
                self._problem = str(error)
            if time.monotonic() - began > STEADY_S:
                self._failures = 0
            wait_s = min(FIRST_WAIT_S * 2 ** min(self._failures, 10), LONGEST_WAIT_S)
            self._failures += 1
            self._stopped.wait(wait_s)

    def _serve_once(self) -> None:
        if self._place is None:
            self._place = _take_place(self._plan, self._stopped)
        place = self._place
        if place.log.exists() and place.log.stat().st_size > LOG_BYTES:
            place.log.replace(place.log.with_suffix(".log.1"))
        descriptor = place.listener.fileno()
        with self._lock, place.log.open("ab") as log:
            if self._stopped.is_set():
                return
            self._process = process = subprocess.Popen(  # noqa: S603 - our own module
                [sys.executable, "-m", "forkpoint", "serve", "--fd", str(descriptor), "--parent", str(os.getpid())],
                # From here `-m` imports this very package, whatever the directory of Ray's workers has.
                cwd=IMPORT_ROOT,
                env=os.environ | self._plan.settings | _own_settings(self._plan, place),
                pass_fds=(descriptor,),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Ray kills the process group of a worker that ends. The proxy gets SIGTERM instead, see `--parent`.
                start_new_session=True,
            )
            self._starts += 1
        # Ray's workers are the first that the kernel kills when memory runs out. A proxy and its sandboxes are not.
        with suppress(OSError):
            Path(f"/proc/{process.pid}/oom_score_adj").write_text("0")
        code = process.wait()
        if not self._stopped.is_set():
            reason = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
            self._problem = f"the proxy {reason}: {_last_line(place.log)}"


def _own_settings(plan: ProxyPlan, place: _Place) -> dict[str, str]:
    settings = {"FORKPOINT_DATA": str(place.folder / _DATA)}
    return settings | {"FORKPOINT_NODE": place.name} if plan.clustered else settings


def _take_place(plan: ProxyPlan, stopped: threading.Event) -> _Place:
    """Own a directory of this machine, and listen.

    The name is the host's. Actors of further nodes on the same machine get the next names and ports. The kernel
    releases a directory when its actor dies, so the next actor gets the same name, port and data. It waits for the
    proxy of that actor, which may still answer its last calls. Raises SandboxError or OSError.
    """
    base = _base_directory(plan)
    host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:58]
    for number in range(_MOST_ON_A_MACHINE):
        name = f"{host}-{number}" if number else host
        owned = DirLock(base / name)
        with suppress(SandboxError):
            owned.acquire()
            break
    else:
        raise SandboxError(f"all {_MOST_ON_A_MACHINE} directories of nodes in {base} are in use")
    try:
        _await_unowned(base / name / _DATA, stopped)
        listener = _listen(plan.host, plan.port + number if plan.port else 0)
    except BaseException:
        owned.release()
        raise
    return _Place(name, base / name, owned, listener)


def _await_unowned(data: Path, stopped: threading.Event) -> None:
    while not is_unowned(data):
        if stopped.wait(FIRST_WAIT_S):
            raise SandboxError("this actor was stopped")


def _base_directory(plan: ProxyPlan) -> Path:
    """Return the directory of all nodes of this machine, which belongs to this user alone."""
    base = Path(plan.data) if plan.data is not None else Path("/var/tmp") / f"forkpoint-ray-{os.geteuid()}"  # noqa: S108
    base.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Others may make a directory of this name in /var/tmp, or a link, and would have the answers and the token.
    if plan.data is None and (base.is_symlink() or base.lstat().st_uid != os.geteuid()):
        raise SandboxError(f"{base} belongs to another user. Name a directory: forkpoint.ray.up(data=...)")
    return base


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=4096)
    except OSError as error:
        raise SandboxError(
            f"cannot listen on {host}:{port}: {os.strerror(error.errno or 0)}. Choose another: "
            "forkpoint.ray.up(port=...)"
        ) from error


def _is_ready(url: str) -> bool:
    host, _, port = url.removeprefix("http://").rpartition(":")
    connection = http.client.HTTPConnection(host.strip("[]"), int(port), timeout=ANSWER_S)
    try:
        connection.request("GET", "/readyz")
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _last_line(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 4096))
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines()]
    return next((line for line in reversed(lines) if line), "its log is empty")[:500]
