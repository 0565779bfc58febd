"""A temporary proxy for the duration of a replay, a benchmark, a script or a test."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from forkpoint.client import Client
from sandboxes import IMPORT_ROOT

READY_S = 60.0
"""The proxy must be ready within this time."""
STOP_S = 30.0
"""The proxy must exit within this time after SIGTERM."""
POLL_S = 0.05
"""Interval at which readiness is polled."""
LOG_TAIL = 2000
"""Characters at the end of the log that an error text quotes."""
_TOKENS = frozenset({"FORKPOINT_TOKEN", "FORKPOINT_TOKEN_FILE"})


class EphemeralProxyError(RuntimeError):
    """The temporary proxy did not start, or did not stop cleanly."""


@dataclass(frozen=True, slots=True)
class EphemeralProxy:
    """A running temporary proxy; the process id is for measurements."""

    url: str
    pid: int


@contextmanager
def ephemeral_proxy(data: Path | None = None, settings: Mapping[str, object] | None = None) -> Iterator[EphemeralProxy]:
    """Run `forkpoint serve` on a free port of 127.0.0.1.

    The data directory stays; None is an empty one in TMPDIR that is removed. Settings other than these, as values of
    JSON, come from FORKPOINT_… variables. Raises EphemeralProxyError, with the end of the log, if the proxy does not
    start or stop in time, or its directory cannot be removed.
    """
    folder = Path(tempfile.mkdtemp(prefix="forkpoint-temporary-"))
    try:
        with _served(data or folder / "data", folder / "serve.log", as_variables(settings or {})) as proxy:
            yield proxy
    finally:
        _remove(folder)


@contextmanager
def local(data: str | Path | None = None, **settings: object) -> Iterator[Client]:
    """Run a proxy on a free port of 127.0.0.1, and yield a client of it.

    The proxy is a process of its own that ends with the block. It needs what `forkpoint serve` needs;
    `forkpoint doctor` says what is missing.

    Args:
        data: The data directory, whose trees the next block may use; None for an empty one that is removed.
        settings: Settings by their names, as `docs/deploying.md` lists them, such as `drivers=["sqlite"]`.

    Raises:
        EphemeralProxyError: The proxy does not start or does not stop in time. The text quotes the end of its log.
    """
    with (
        ephemeral_proxy(None if data is None else Path(data), settings) as proxy,
        Client(proxy.url, trust_env=False) as client,
    ):
        yield client


@contextmanager
def _served(data: Path, log: Path, variables: dict[str, str]) -> Iterator[EphemeralProxy]:
    port = free_port()
    command = [sys.executable, "-m", "forkpoint", "serve", "--port", str(port), "--data", str(data.resolve())]
    with log.open("wb") as output:
        # In a new session, Ctrl-C reaches only this process, which then stops the proxy in order.
        process = subprocess.Popen(  # noqa: S603 - our own module
            command,
            # From here `-m` imports this package, whatever the caller's directory contains.
            cwd=IMPORT_ROOT,
            # A token in the environment belongs to another proxy; this proxy listens on loopback only.
            env={name: value for name, value in os.environ.items() if name not in _TOKENS} | variables,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        proxy = EphemeralProxy(f"http://127.0.0.1:{port}", process.pid)
        _wait_until_ready(proxy.url, process, log)
        yield proxy
    finally:
        _stop(process, log)


def as_variables(settings: Mapping[str, object]) -> dict[str, str]:
    """Return settings as environment variables: strings and paths as they are, other values as JSON."""
    return {
        f"FORKPOINT_{name.upper()}": str(value) if isinstance(value, str | Path) else json.dumps(value)
        for name, value in settings.items()
    }


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 that is free, and that the kernel gives to no other program.

    A socket that is bound with SO_REUSEADDR and does not listen keeps the port out of the kernel's own choices until
    this process ends. A server that sets SO_REUSEADDR too, as servers do, may still listen there.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    port = int(reserved.getsockname()[1])
    # The descriptor stays open.
    reserved.detach()
    return port


def _wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise EphemeralProxyError(f"the temporary proxy ended with code {process.returncode}:\n{_tail(log)}")
        try:
            if httpx.get(f"{url}/readyz", trust_env=False).is_success:
                return
        except httpx.TransportError:
            pass  # Not listening yet.
        time.sleep(POLL_S)
    raise EphemeralProxyError(f"the temporary proxy was not ready after {READY_S:.0f} s:\n{_tail(log)}")


def _stop(process: subprocess.Popen[bytes], log: Path) -> None:
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise EphemeralProxyError(f"the temporary proxy did not stop within {STOP_S:.0f} s:\n{_tail(log)}") from None


def _remove(folder: Path) -> None:
    try:
        shutil.rmtree(folder)
    except OSError as error:
        raise EphemeralProxyError(
            f"the directory of the temporary proxy cannot be removed: {folder}: {error}. "
            "Unmount what `mount | grep forkpoint` lists, and remove the directory."
        ) from error


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-LOG_TAIL:]
