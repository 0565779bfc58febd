"""systemd understands the unit."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from proxy.cli.launching import SOCKET
from sandboxes.rights import held
from tests.rights import least_rights

FOLDER = Path(__file__).parents[2] / "docker" / "deploy" / "systemd"
UNIT, LAUNCHER = FOLDER / "forkpoint.service", FOLDER / "forkpoint-launcher.service"


def require_analyzer() -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze")


def values(unit: Path, name: str) -> list[str]:
    """Return the words of all lines of a unit that give a setting."""
    return [
        word
        for line in unit.read_text().splitlines()
        if line.startswith(f"{name}=")
        for word in line[len(name) + 1 :].split()
    ]


@pytest.mark.parametrize("changes", ["", "root.conf"])
def test_units_are_valid(tmp_path: Path, changes: str) -> None:
    """`systemd-analyze verify` needs the program to exist, so the units name this environment's."""
    require_analyzer()
    program = Path(sys.executable).parent / "forkpoint"
    for unit in (UNIT, LAUNCHER):
        text = unit.read_text().replace("/opt/forkpoint/bin/forkpoint", str(program))
        assert str(program) in text
        (tmp_path / unit.name).write_text(text)
    if changes:
        (tmp_path / f"{UNIT.name}.d").mkdir()
        (tmp_path / f"{UNIT.name}.d" / changes).write_text((FOLDER / changes).read_text())
    environment = {**os.environ, "SYSTEMD_LOG_LEVEL": "warning", "SYSTEMD_UNIT_PATH": f"{tmp_path}:"}
    command = [
        "systemd-analyze",
        "verify",
        "--recursive-errors=no",
        str(tmp_path / UNIT.name),
        str(tmp_path / LAUNCHER.name),
    ]
    checked = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    # Warnings about other units of this machine are none of ours.
    ours = [line for line in checked.stderr.splitlines() if "forkpoint" in line]
    assert (checked.returncode, ours) == (0, [])


def test_proxy_of_the_unit_is_hard_to_leave() -> None:
    """systemd rates what a unit leaves open, from 0 to 10: the unit's proxy was root once, with 9.6."""
    require_analyzer()
    command = ["systemd-analyze", "security", "--offline=true", "--threshold=30", str(UNIT)]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout[-3000:]


def test_unit_gives_the_rights_that_are_needed() -> None:
    """And none that make a proxy root; what the launcher gives up, its sandboxes cannot have."""
    needed = {f"CAP_{name}" for name in held.NEEDED}
    assert set(values(UNIT, "AmbientCapabilities")) == set(values(UNIT, "CapabilityBoundingSet")) == needed
    assert values(UNIT, "NoNewPrivileges") == ["yes"]
    # A proxy that is root restores checkpoints and schedules itself.
    least = {f"CAP_{name}" for name in least_rights() if name not in {"SYS_TIME", "SYS_NICE"}}
    assert set(values(LAUNCHER, "CapabilityBoundingSet")) == least


def test_units_agree_with_each_other() -> None:
    """The user, the data directory and the socket are in both."""
    (launcher,) = [line for line in LAUNCHER.read_text().splitlines() if line.startswith("ExecStart=")]
    (user,), (data,) = values(UNIT, "User"), values(UNIT, "ReadWritePaths")
    assert launcher.endswith(f" launcher --user {user} --data {data}")
    environment = dict(word.split("=", 1) for word in values(UNIT, "Environment"))
    assert (environment["FORKPOINT_DATA"], environment["FORKPOINT_LAUNCHER"]) == (data, str(SOCKET))
    assert SOCKET.parent == Path("/run", *values(LAUNCHER, "RuntimeDirectory"))
    assert str(SOCKET.parent) in values(UNIT, "BindReadOnlyPaths")


def test_root_s_changes_undo_each_restriction() -> None:
    """A restriction that is left would break sandboxes, whose launcher is then the proxy's child."""
    _, _, restrictions = UNIT.read_text().partition("# What work on the files")
    named = set(re.findall(r"^([A-Z]\w+)=", restrictions.partition("[Install]")[0], re.MULTILINE))
    undone = set(re.findall(r"^([A-Z]\w+)=", (FOLDER / "root.conf").read_text(), re.MULTILINE))
    assert named - undone == {"ReadWritePaths", "SystemCallErrorNumber"}


def test_unit_stops_later_than_the_proxy() -> None:
    """It needs 50 s even if calls do not end: 30 s for their responses, 10 s for themselves, 10 s for freezes."""
    match = re.search(r"^TimeoutStopSec=(\d+)$", UNIT.read_text(), re.MULTILINE)
    assert match is not None
    assert int(match[1]) >= 60
