"""Sandboxes have a smaller CPU weight than the proxy, and do not see it."""

import os
import subprocess

import pytest

from sandboxes.linux.cgroups import Cgroups
from tests.machine import needs_root


@pytest.fixture
def groups() -> Cgroups:
    groups = Cgroups(f"forkpoint-test-{os.getpid()}")
    groups.open()
    if groups.behind is None:
        pytest.skip(f"no version 1 hierarchy for the CPU is writable here: {groups.problem}")
    return groups


@needs_root
def test_group_weighs_less_than_a_process(groups: Cgroups) -> None:
    assert groups.behind is not None
    try:
        shares = int((groups.behind.parent / "cpu.shares").read_text())
        assert shares == 512 * (os.cpu_count() or 1)
    finally:
        groups.close()


@needs_root
def test_process_put_behind_is_in_group_and_closing_ends_it(groups: Cgroups) -> None:
    assert groups.behind is not None
    folders = groups.folders
    with subprocess.Popen(["sleep", "600"]) as process:
        groups.put_behind(process.pid)
        assert str(process.pid) in (groups.behind / "cgroup.procs").read_text().split()
        groups.close()
    assert process.returncode == -9
    assert not any(folder.exists() for folder in folders)
