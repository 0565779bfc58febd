"""What `doctor` says about a data directory and the settings."""

import errno
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from typer.testing import CliRunner

from proxy.cli.doctor import Requirement, _criu, _host_changes, _namespaces, _other_users, _shells, check
from proxy.cli.main import app
from proxy.cli.namespaces import closed_to_users, shared_interpreter
from sandboxes.linux import syscalls as kernel
from sandboxes.shell_files import copies
from tests.machine import data_directory, needs_root, require_sandboxes
from tests.rights import DOCKER, MOUNTS, POD, UBUNTU, Rights


def test_changes_of_the_host_are_reported(tmp_path: Path) -> None:
    """Each version of the host that was a base left its layer; nothing is said before the first one."""
    bases = tmp_path / "local" / "bases"
    assert list(_host_changes(tmp_path)) == []
    (bases / "mask-1").mkdir(parents=True)
    assert [requirement.ok for requirement in _host_changes(tmp_path)] == [True]
    (bases / "mask-2").mkdir()
    (changed,) = _host_changes(tmp_path)
    assert (changed.ok, changed.required) == (False, False)
    assert "has changed 1 times" in changed.detail


def test_checkpoints_turned_off_are_shown(tmp_path: Path) -> None:
    require_sandboxes()
    (shown,) = [requirement for requirement in check(tmp_path, checkpoints=False) if requirement.name == "checkpoints"]
    assert shown.ok
    assert "turned off" in shown.detail


@needs_root
def test_processes_of_other_users_are_tried() -> None:
    """CRIU reads their limits, which the kernel allows with one capability only."""
    (shown,) = _other_users()
    assert (shown.ok, shown.required) == (bool(kernel.permitted() >> kernel.CAP_SYS_RESOURCE & 1), False)
    assert shown.ok or "SYS_RESOURCE is missing" in shown.detail


def test_why_shells_are_executed_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_folder: Path) -> str:
        raise copies.NoShellFilesError("bash names no loader")

    monkeypatch.setattr(copies, "make", fail)
    shown = _shells()
    assert (shown.ok, shown.required) == (False, False)
    assert "executes bash" in shown.detail
    assert shown.detail.endswith("bash names no loader")


@pytest.mark.parametrize("look", [_shells, _criu])
def test_a_full_disk_of_temporary_files_is_reported(
    look: Callable[[], Requirement], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proxy starts all the same: its own directory may be on another disk."""
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr("tempfile.TemporaryDirectory", Mock(side_effect=full))
    shown = look()
    assert (shown.ok, shown.required) == (False, False)
    assert "No space left" in shown.detail


def test_modules_of_the_current_directory_are_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be an agent's, or have a folder of one of our names; what it has must not run as root."""
    for room in ("sandboxes", "forkpoint", "ctypes"):
        (tmp_path / room).mkdir()
        (tmp_path / room / "__init__.py").write_text(f"open({str(tmp_path / 'loaded')!r}, 'w')\n")
    at_home = _namespaces()
    monkeypatch.chdir(tmp_path)
    assert _namespaces() == at_home
    assert not (tmp_path / "loaded").exists()


@needs_root
@pytest.mark.parametrize(
    ("rights", "cause"),
    [
        (POD, "root: unshare 0x20000: Operation not permitted; the capability SYS_ADMIN is missing"),
        (replace(POD, capabilities=(*DOCKER, "SYS_ADMIN")), "unshare 0x20000: Operation not permitted; this process"),
        (Rights(refused=MOUNTS), "root: mount  on /: Operation not permitted; this process is confined by"),
        (UBUNTU, "unprivileged, in a user namespace: mount  on /: Operation not permitted; this process"),
    ],
    ids=["pod", "profile", "mounts", "ubuntu"],
)
def test_missing_rights_are_named(rights: Rights, cause: str) -> None:
    """A namespace in which no mount can be changed is of no use. SQLite works all the same."""
    with data_directory() as folder:
        shown = rights.doctor(folder)
    unmet = {
        name: requirement for name, requirement in shown.items() if requirement["required"] and not requirement["ok"]
    }
    assert list(unmet) == ["namespaces"]
    assert cause in unmet["namespaces"]["detail"]
    assert unmet["namespaces"]["remedy"]
    assert shown["trial of sqlite"]["ok"]


@needs_root
def test_doctor_does_not_point_to_itself() -> None:
    """A sandbox that cannot start has a text for users who have not asked doctor yet."""
    with data_directory() as folder:
        shown = Rights(refused=("pivot_root",)).doctor(folder)
    assert not shown["trial of local"]["ok"]
    assert "pivot_root" in shown["trial of local"]["detail"]
    assert not any("forkpoint doctor`" in f"{each['detail']}{each['remedy']}" for each in shown.values())


@pytest.mark.parametrize(
    ("name", "value", "cause", "remedy"),
    [
        ("clone", "0", "kernel.unprivileged_userns_clone is 0", "kernel.unprivileged_userns_clone=1"),
        ("most", "0", "user.max_user_namespaces is 0", "user.max_user_namespaces="),
        ("apparmor", "1", "AppArmor restricts user namespaces, as on Ubuntu 24.04", "`forkpoint doctor --apparmor`"),
    ],
)
def test_what_closes_namespaces_to_users_is_named(name: str, value: str, cause: str, remedy: str) -> None:
    opened = {"apparmor": "", "clone": "1", "most": "100"}
    assert closed_to_users(opened) is None
    assert closed_to_users(dict.fromkeys(opened, "")) is None
    known = closed_to_users(opened | {name: value})
    assert known is not None
    assert cause in known[0]
    assert remedy in known[1]


def test_profile_is_for_one_interpreter() -> None:
    """Where the interpreter is the system's, a warning says that other programs get the right too."""
    done = CliRunner().invoke(app, ["doctor", "--apparmor"])
    assert f'profile forkpoint "{os.path.realpath(sys.executable)}" flags=(unconfined) {{\n  userns,\n' in done.output
    assert "--copies" in shared_interpreter("/usr/bin/python3.12")
    assert shared_interpreter("/opt/forkpoint/bin/python3") == ""


@pytest.mark.parametrize("drivers", [["http"], ["sqlite"], ["local", "sqlite", "http"]])
def test_only_drivers_in_use_are_checked(drivers: list[str], tmp_path: Path) -> None:
    names = {requirement.name for requirement in check(tmp_path, drivers)}
    assert {name for name in names if name.startswith("trial")} == {f"trial of {name}" for name in drivers} - {
        "trial of http"
    }
    assert ("namespaces" in names) == ("local" in drivers)
