"""What tests with real sandboxes need from this machine, and what may not be left on it."""

import functools
import os
import tempfile
from pathlib import Path

import pytest

from sandboxes.requirements import check

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system, which needs root")


def require_sandboxes() -> None:
    """Skip the test, with the reason, where the local driver cannot run."""
    if missing := _missing():
        pytest.skip(f"the local driver cannot run here: {missing}")


@functools.cache
def _missing() -> str:
    with tempfile.TemporaryDirectory(prefix="forkpoint-test-", dir="/var/tmp") as folder:
        unmet = [found for found in check(Path(folder)) if found.required and not found.ok]
    return "; ".join(f"{found.name}: {found.detail}" for found in unmet)
