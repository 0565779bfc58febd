"""What a proxy loads when it starts."""

import subprocess
import sys

LATE = frozenset({"PIL", "av", "docker", "google.protobuf", "numpy", "psycopg", "pygments", "rich"})
"""Packages that only some calls need. Each takes 20 to 250 ms to load."""


def test_start_loads_no_late_packages() -> None:
    """`forkpoint serve` loads a package when a call first needs it, so that a restarted proxy answers at once."""
    program = "import sys, proxy.app; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert "proxy.engine" in loaded
    assert LATE.isdisjoint(loaded)
