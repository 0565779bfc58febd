"""A proxy of one's own, for as long as a replay or a benchmark takes."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

READY_S = 60.0
STOP_S = 30.0
POLL_S = 0.05
LOG_TAIL = 2000
_TOKENS = frozenset({"FORKPOINT_TOKEN", "FORKPOINT_TOKEN_FILE"})


class PrivateProxyError(RuntimeError):
    """The private proxy did not start, or did not end as it should."""


@dataclass(frozen=True, slots=True)
class PrivateProxy:
    """Where it listens, and its process: whoever measures it wants to know."""

    url: str
    pid: int


@contextmanager
def private_proxy() -> Iterator[PrivateProxy]:
    """Start `forkpoint serve` on a free port with an empty data directory; stop it and remove the directory at the end.

    The directory is made where TMPDIR says. Settings come from the environment (FORKPOINT_...), as for any `serve`.

    Raises:
        PrivateProxyError: it is not ready within 60 s, needs a kill to end, or leaves something that cannot be removed;
            with the end of its log.
    """
    folder = Path(tempfile.mkdtemp(prefix="forkpoint-replay-"))
    try:
        with _served(folder) as proxy:
            yield proxy
    finally:
        _remove(folder)


@contextmanager
def _served(folder: Path) -> Iterator[PrivateProxy]:
    log = folder / "serve.log"
    port = free_port()
    command = [sys.executable, "-m", "forkpoint", "serve", "--port", str(port), "--data", str(folder / "data")]
    with log.open("wb") as output:
        # A session of its own: Ctrl-C at the terminal reaches the replay alone, which then stops the proxy in order.
        process = subprocess.Popen(  # noqa: S603 - our own module
            command,
            # So that `-m` finds this very package, whatever directories the caller's own has.
            cwd=Path(__file__).parents[2],
            # A token in the environment is that of another proxy: this one is reached by nobody else.
            env={name: value for name, value in os.environ.items() if name not in _TOKENS},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        proxy = PrivateProxy(f"http://127.0.0.1:{port}", process.pid)
        _wait_until_ready(proxy.url, process, log)
        yield proxy
    finally:
        _stop(process, log)


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 that nothing listens on just now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise PrivateProxyError(f"the private proxy ended with code {process.returncode}:\n{_tail(log)}")
        try:
            if httpx.get(f"{url}/readyz", trust_env=False).is_success:
                return
        except httpx.TransportError:
            pass  # Not listening yet.
        time.sleep(POLL_S)
    raise PrivateProxyError(f"the private proxy was not ready after {READY_S:.0f} s:\n{_tail(log)}")


def _stop(process: subprocess.Popen[bytes], log: Path) -> None:
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise PrivateProxyError(f"the private proxy did not stop within {STOP_S:.0f} s:\n{_tail(log)}") from None


def _remove(folder: Path) -> None:
    try:
        shutil.rmtree(folder)
    except OSError as error:
        raise PrivateProxyError(
            f"the private proxy left something behind in {folder}: {error}. "
            "See `mount | grep forkpoint`, unmount what is listed there, and remove the directory."
        ) from error


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-LOG_TAIL:]
