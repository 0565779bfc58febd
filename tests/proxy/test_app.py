"""What a proxy loads when it starts, and what a setting turns off."""

import asyncio
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import SecretStr

from proxy.app import _drivers, _listen
from proxy.settings import Settings
from sandboxes.local.driver import LocalDriver
from snapshots.criu.checkpoints import CriuCheckpointer

LATE = frozenset({"PIL", "av", "docker", "google.protobuf", "numpy", "psycopg", "pygments", "rich"})
"""Packages that only some calls need. Each takes 20 to 250 ms to load."""


def test_start_loads_no_late_packages() -> None:
    """`forkpoint serve` loads a package when a call first needs it, so that a restarted proxy answers at once."""
    program = "import sys, proxy.app; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert "proxy.engine" in loaded
    assert LATE.isdisjoint(loaded)


def test_setting_turns_checkpoints_off(tmp_path: Path) -> None:
    """Without CRIU no state has images, so a state with live processes counts as gone and is replayed."""
    settings = Settings(data=tmp_path, drivers=("local",))
    on, off = (_drivers(settings.model_copy(update={"checkpoints": wanted}))["local"] for wanted in (True, False))
    assert isinstance(on, LocalDriver)
    assert isinstance(on.machine.checkpointer, CriuCheckpointer)
    assert isinstance(off, LocalDriver)
    assert not asyncio.run(off.machine.checkpointer.is_available())
    assert off.machine.checkpointer.names() == set()


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_any_address_is_of_both_families(tmp_path: Path) -> None:
    """Pods may have addresses of either family."""
    with _listen(Settings(data=tmp_path, host="::", port=0, token=SecretStr("t" * 16))) as listener:
        for address in ("127.0.0.1", "::1"):
            socket.create_connection((address, listener.getsockname()[1]), timeout=30).close()
