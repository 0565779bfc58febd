"""systemd understands the unit."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

UNIT = Path(__file__).parents[2] / "docker" / "deploy" / "systemd" / "forkpoint.service"


def test_unit_is_valid(tmp_path: Path) -> None:
    """`systemd-analyze verify` needs the program to exist, so the unit names this environment's."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze")
    program = Path(sys.executable).parent / "forkpoint"
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace("/opt/forkpoint/bin/forkpoint", str(program)))
    assert str(program) in copy.read_text()
    environment = {**os.environ, "SYSTEMD_LOG_LEVEL": "warning"}
    checked = subprocess.run(
        ["systemd-analyze", "verify", "--recursive-errors=no", copy], capture_output=True, text=True, check=False,
        env=environment,
    )  # fmt: skip
    # Warnings about other units of this machine are none of ours.
    ours = [line for line in checked.stderr.splitlines() if UNIT.name in line]
    assert (checked.returncode, ours) == (0, [])


def test_unit_stops_later_than_the_proxy() -> None:
    """It needs 50 s even if calls do not end: 30 s for their responses, 10 s for themselves, 10 s for freezes."""
    match = re.search(r"^TimeoutStopSec=(\d+)$", UNIT.read_text(), re.MULTILINE)
    assert match is not None
    assert int(match[1]) >= 60
