"""Runs the proxy as a process, and checks what it leaves on the machine, for tests with real sandboxes."""

import asyncio
import fcntl
import functools
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import httpx
import pytest

from forkpoint.ephemeral_proxy import free_port
from proxy.cli.doctor import check
from sandboxes.linux.descriptors import Opened
from sandboxes.linux.file_flags import flags_of, spread_below
from sandboxes.linux.files import remove_tree
from snapshots.criu.binary import CriuBinary, CriuMissingError
from tests import forks

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system, which needs root")

PLAIN = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""For clients of plain HTTP (`verify=PLAIN`): it has no certificates, whose loading takes 20 ms of CPU a client."""

FORKS_FROM = "PYTEST_VERSION"
"""The variable that pytest sets. Under it proxies are forks of one that has imported all; for benchmarks none is."""
Process = tuple[int, str]
"""A pid and its start time, because the kernel reuses pids."""


class Answering(Protocol):
    """A proxy that answers requests, in this process or in another."""

    @property
    def client(self) -> httpx.Client: ...

    @property
    def address(self) -> tuple[str, int]: ...


def require_sandboxes() -> None:
    """Skip the test if the local driver cannot run here."""
    if missing := _missing():
        pytest.skip(f"the local driver cannot run here: {missing}")


def require_curl() -> None:
    """Skip the test if there is no curl, with which the documentation shows its calls. In CI, fail instead."""
    if shutil.which("curl") is None:
        assert not os.environ.get("CI"), "curl is missing"
        pytest.skip("curl is not installed (Debian: apt-get install curl)")


def require_criu() -> None:
    """Skip the test if CRIU does not work here. With FORKPOINT_NEEDS_CRIU, as in CI, the test fails instead."""
    require_sandboxes()
    if missing := _missing_criu():
        assert not os.environ.get("FORKPOINT_NEEDS_CRIU"), missing
        pytest.skip(missing)


@functools.cache
def _missing_criu() -> str:
    with tempfile.TemporaryDirectory(prefix="forkpoint-test-", dir="/var/tmp") as folder:
        try:
            CriuBinary.prepare(Path(folder))
        except CriuMissingError as error:
            return str(error)
    return ""


@functools.cache
def _missing() -> str:
    with tempfile.TemporaryDirectory(prefix="forkpoint-test-", dir="/var/tmp") as folder:
        unmet = [requirement for requirement in check(Path(folder)) if requirement.required and not requirement.ok]
    return "; ".join(f"{requirement.name}: {requirement.detail}" for requirement in unmet)


def assert_spread(folder: Path, beside: Path) -> None:
    """Assert that ext4 puts the directories in a directory apart, so that each has its own deleted files alone.

    Args:
        folder: The directory.
        beside: Another one of the same file system. What that lacks cannot be seen in either.
    """
    spread_below(str(beside))
    flags = []
    for each in (folder, beside):
        with Opened(os.open(each, os.O_RDONLY)) as fd:
            flags.append(flags_of(fd))
    assert flags[0] == flags[1], folder


@contextmanager
def data_directory(below: Path = Path("/var/tmp")) -> Iterator[Path]:
    """Yield a directory for sandboxes; nothing may be mounted below it at the end."""
    folder = Path(tempfile.mkdtemp(prefix="forkpoint-test-", dir=below))
    try:
        yield folder
        assert mounts_below(folder) == []
    finally:
        remove_tree(folder)


@dataclass
class Served:
    """`forkpoint serve` as a process. It can be killed and started again, and keeps its address."""

    folder: Path
    port: int = field(default_factory=free_port, kw_only=True)
    process: "subprocess.Popen[bytes] | forks.Forked | None" = field(default=None, kw_only=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log_file(self) -> Path:
        return self.folder / "serve.log"

    @property
    def command(self) -> list[str]:
        raise NotImplementedError

    @property
    def settings(self) -> dict[str, str]:
        """The proxy's settings, as environment variables."""
        raise NotImplementedError

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Descriptors of this process that the proxy gets under the same numbers."""
        return ()

    def launch(self) -> None:
        """Start the process; `is_ready` says when it answers."""
        command, environment = self.command, os.environ | self.settings
        if FORKS_FROM in os.environ and command[:2] == [sys.executable, "-m"] and not self.descriptors:
            self.process = forks.server().fork(command[2:], self.folder, environment, self.log_file)
            return
        with self.log_file.open("ab") as log:
            self.process = subprocess.Popen(
                command, cwd=self.folder, env=environment, stdin=subprocess.DEVNULL, stdout=log,
                stderr=log, start_new_session=True, pass_fds=self.descriptors,
            )  # fmt: skip

    def start(self) -> None:
        """Start the process, and return when it is ready."""
        self.launch()
        self.await_ready()

    def await_ready(self) -> None:
        wait_until(self.is_ready, f"the proxy of {self.log_file.name} is not ready", within_s=120)

    def is_ready(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log()
        try:
            # Most attempts are refused, and a client of HTTP takes ten times as long to find that out.
            socket.create_connection(("127.0.0.1", self.port)).close()
            return httpx.get(f"{self.url}/readyz", timeout=30, verify=PLAIN).is_success
        except (ConnectionError, httpx.TransportError):
            return False

    def kill(self) -> None:
        """Kill the process with SIGKILL."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """Stop the process with SIGTERM, as a service manager does."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(120) in (0, -signal.SIGTERM), self.log()

    def processes(self) -> set[Process]:
        """Return all descendants of the proxy, including those in sandboxes."""
        assert self.process is not None
        return descendants(self.process.pid)

    def log(self) -> str:
        return self.log_file.read_text(errors="replace")[-8000:]


@dataclass
class Proxy(Served):
    """A proxy on a data directory."""

    options: dict[str, str] = field(default_factory=dict)
    wrapper: tuple[str, ...] = ()
    python: str = sys.executable
    module: str = "forkpoint"

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def command(self) -> list[str]:
        command = [*self.wrapper, self.python, "-m", self.module, "serve", "--port", str(self.port)]
        return [*command, "--data", str(self.data)]

    @property
    def settings(self) -> dict[str, str]:
        own = {} if self.module == "forkpoint" else {"PYTHONPATH": str(Path(__file__).parents[1])}
        return own | {f"FORKPOINT_{name.upper()}": value for name, value in self.options.items()}

    def groups(self) -> list[Path]:
        """Return the control groups of this instance of the local driver."""
        instance = self.data / "local" / "instance.json"
        return [Path(group) for group in json.loads(instance.read_bytes())["cgroups"]] if instance.exists() else []

    def view(self, path: str) -> Any:
        return httpx.get(f"{self.url}/api/v1/{path}", timeout=30, verify=PLAIN).raise_for_status().json()


@contextmanager
def served(data: Path, **options: str) -> Iterator[Proxy]:
    """Run a proxy for the duration of the block; all of its processes must end with it."""
    proxy = Proxy(data, options)
    with serving(proxy):
        yield proxy


@contextmanager
def serving(proxy: Proxy) -> Iterator[Proxy]:
    """Run this proxy for the duration of the block; all of its processes must end with it."""
    proxy.start()
    try:
        yield proxy
    finally:
        if proxy.process is not None and proxy.process.poll() is None:
            processes = proxy.processes()
            proxy.kill()
            wait_until(lambda: not alive(processes), f"{alive(processes)} are still running")


def wait_until(true: Callable[[], bool], otherwise: str = "it does not come true", *, within_s: float = 30.0) -> None:
    deadline = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.01)


async def until(true: Callable[[], object], *, within_s: float = 60.0) -> None:
    """Wait for a condition while other tasks run."""
    async with asyncio.timeout(within_s):
        while not true():  # noqa: ASYNC110 - it depends on processes too
            await asyncio.sleep(0.01)


def alive(processes: set[Process]) -> set[Process]:
    """Return the processes that still run; a zombie has ended."""
    return {(pid, began) for pid, began in processes if (now := _stat(pid)) and now[2] == began and now[0] != "Z"}


def mounts_below(folder: Path) -> list[str]:
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    return [line for line in mounts if line.split()[4].startswith(f"{folder}/")]


def assert_nothing_left(proxy: Proxy, processes: set[Process], groups: list[Path]) -> None:
    """Assert that an ended proxy left no process, mount, control group, lock or incomplete file."""
    assert leftovers(proxy, processes, groups) == []


def snapshot_files(folder: Path) -> list[Path]:
    """Return the files of all snapshots in the folder of a `SnapshotStore`."""
    return [path for share in _inside(folder) if share.is_dir() for path in share.iterdir()]


def leftovers(proxy: Proxy, processes: set[Process], groups: list[Path]) -> list[str]:
    """Return what an ended proxy left behind: processes, mounts, control groups, locks and incomplete files."""
    data = proxy.data
    remains = [f"process {pid}" for pid, _ in alive(processes)]
    remains += [f"mount {line}" for line in mounts_below(proxy.folder)]
    remains += [f"control group {group}" for group in groups if group.exists()]
    remains += [str(path) for folder in ("local/uppers", "journal") for path in _inside(data / folder)]
    layers = _inside(data / "local/layers")
    remains += [f"incomplete: {path}" for path in layers if not (path / "meta.json").exists()]
    remains += [f"incomplete: {path}" for path in snapshot_files(data / "snapshots") if _manifest(path) is None]
    return remains + [f"locked: {lock}" for lock in data.glob("*/lock") if _locked(lock)]


def unnamed(proxy: Proxy) -> list[Path]:
    """Return the parts of snapshots on disk that nothing refers to. Call it for a proxy that just started."""
    data = proxy.data
    named: set[str] = set()
    for path in snapshot_files(data / "snapshots"):
        manifest = _manifest(path)
        assert manifest is not None
        named |= set(manifest["parts"])
    for root in data.glob("local/roots/*.json"):
        named |= set(json.loads(root.read_bytes())["layers"])
    return [
        path
        for kind in ("local/layers", "local/checkpoints")
        for path in _inside(data / kind)
        if path.name not in named
    ]


def _manifest(snapshot: Path) -> dict[str, Any] | None:
    """Return the manifest of a snapshot; None if its file is incomplete."""
    # A digest, the manifest, and the payload, whose length the manifest has.
    _, _, rest = snapshot.read_bytes().partition(b"\n")
    body, _, payload = rest.partition(b"\n")
    manifest: dict[str, Any] = json.loads(body or b"{}")
    return manifest if manifest.get("payload_bytes") == len(payload) else None


def is_sandbox(pid: int) -> bool:
    """Return whether a process is pid 1 of a namespace, whose end kills its whole sandbox."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    inner = next(line for line in status.splitlines() if line.startswith("NSpid:")).split()[1:]
    return len(inner) > 1 and inner[-1] == "1"


def process(pid: int) -> Process | None:
    """Return the process with this pid; None if there is none."""
    return None if (now := _stat(pid)) is None else (pid, now[2])


def _inside(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _locked(path: Path) -> bool:
    with path.open("rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def descendants(pid: int) -> set[Process]:
    """Return what a process has started, and what that has started."""
    children: dict[int, list[tuple[int, str]]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (stat := _stat(int(entry.name))):
            children.setdefault(stat[1], []).append((int(entry.name), stat[2]))
    descendants, pending = set(), [pid]
    while pending:
        for child in children.get(pending.pop(), []):
            descendants.add(child)
            pending.append(child[0])
    return descendants


def _stat(pid: int) -> tuple[str, int, str] | None:
    """Return state, parent and start time of a process; None if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], int(fields[1]), fields[19]


def children(pid: int) -> list[int]:
    """Return the processes that a process has started and that are not collected."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
