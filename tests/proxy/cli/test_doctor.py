"""What `doctor` says about a data directory and the settings."""

from pathlib import Path

import pytest

from proxy.cli.doctor import _host_changes, _namespaces, _shells, check
from sandboxes.shell_files import copies
from tests.machine import require_sandboxes


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


def test_why_shells_are_executed_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_folder: Path) -> str:
        raise copies.NoShellFilesError("bash names no loader")

    monkeypatch.setattr(copies, "make", fail)
    shown = _shells()
    assert (shown.ok, shown.required) == (False, False)
    assert "executes bash" in shown.detail
    assert shown.detail.endswith("bash names no loader")


def test_modules_of_the_current_directory_are_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be an agent's, or have a folder of one of our names; what it has must not run as root."""
    for room in ("sandboxes", "forkpoint", "ctypes"):
        (tmp_path / room).mkdir()
        (tmp_path / room / "__init__.py").write_text(f"open({str(tmp_path / 'loaded')!r}, 'w')\n")
    at_home = _namespaces()
    monkeypatch.chdir(tmp_path)
    assert _namespaces() == at_home
    assert not (tmp_path / "loaded").exists()
