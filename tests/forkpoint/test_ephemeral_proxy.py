"""A temporary proxy comes and goes with its block."""

import socket
from pathlib import Path

import pytest

from forkpoint.ephemeral_proxy import EphemeralProxyError, ephemeral_proxy, free_port


def test_failed_start_is_reported_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("FORKPOINT_LOG", "loud")
    with (
        pytest.raises(EphemeralProxyError, match=r"ended with code 1:\nThe setting log in FORKPOINT_LOG"),
        ephemeral_proxy(),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


def test_free_port_stays_free() -> None:
    """The kernel chooses it for no other socket, although nothing listens. A server may bind it by its number."""
    port = free_port()
    with pytest.raises(OSError, match="Address already in use"), socket.socket() as other:
        other.bind(("127.0.0.1", port))
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    for _ in range(2):
        socket.create_server(("127.0.0.1", port)).close()
