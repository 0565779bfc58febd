"""The listening socket of a sandbox's egress, on the loopback of the network namespace that this process is in.

No process of the sandbox holds it, so it is in no checkpoint. CRIU would restore a connection to it without its peer.
"""

import contextlib
import socket
from pathlib import Path

PORT = 61080
"""Where programs in a sandbox find the egress proxy: above the ports that the kernel gives to outgoing connections."""
_BACKLOG = 128
"""Connections that wait to be accepted; further ones are tried again by the kernel."""


def listen() -> int:
    """Return the descriptor of a new listening socket at `PORT` of the loopback."""
    with socket.create_server(("127.0.0.1", PORT), backlog=_BACKLOG) as listener:
        return listener.detach()


CONNECTED = "a process has a connection to a host outside, which a restored process would not have"
"""The reason why a state is not frozen while `connected` is true."""


def connected() -> bool:
    """Return whether a process in this network namespace is connected to the socket, by /proc/net/tcp (proc(5))."""
    for table in ("tcp", "tcp6"):
        # A kernel without IPv6 has no second table.
        with contextlib.suppress(FileNotFoundError):
            rows = (line.split() for line in Path(f"/proc/thread-self/net/{table}").read_text().splitlines()[1:])
            if any(row[2].endswith(f":{PORT:04X}") and row[9] != "0" for row in rows):
                return True
    return False
