"""The address of a running proxy: its URL, and the file in its data directory by which commands find it.

Also what a proxy and its commands agree on beside the API: the header with the length of a stream.
"""

import contextlib
from pathlib import Path

_FILE = "address"
TOTAL = "x-forkpoint-total"
"""Response header: how much a stream will have, for a progress bar. Bytes of an export, which are an estimate, and
rollouts of trajectories."""


def url_of(host: str, port: int) -> str:
    """Return the base URL of a listening socket for this machine: loopback for an unspecified host."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - compared, not bound
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def write_address(data: Path, url: str) -> None:
    """Write the base URL of the proxy of a data directory; a full disk is no reason to stop, and leaves it out."""
    with contextlib.suppress(OSError):
        (data / _FILE).write_text(f"{url}\n")


def read_address(data: Path) -> str | None:
    """Return the base URL of the proxy that serves a data directory; None if no proxy serves it."""
    try:
        return (data / _FILE).read_text().strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def remove_address(data: Path) -> None:
    """Remove the file when the proxy stops. A killed proxy leaves it; the next proxy overwrites it."""
    with contextlib.suppress(OSError):
        (data / _FILE).unlink(missing_ok=True)
