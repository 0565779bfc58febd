"""The native helper that starts programs touches no memory but its own, while its child runs on its parent's stack."""

import os
import subprocess
import sys
from pathlib import Path

from hatch_build import HELPER
from tests.sandboxes.conftest import REPOSITORY, checked_library
from tests.sandboxes.linux import many_spawns


def test_programs_get_their_descriptors_with_each_access_checked(tmp_path: Path) -> None:
    library, variables = checked_library(HELPER, tmp_path / "libvfork.so")
    ran = subprocess.run(
        [sys.executable, "-m", many_spawns.__name__, str(library)],
        cwd=REPOSITORY, env={**os.environ, **variables}, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert (ran.returncode, ran.stdout) == (0, "all were started\n"), ran.stderr
