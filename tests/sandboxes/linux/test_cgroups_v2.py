"""Control groups of version 2: which files get which values in a tree of plain files, and a sweep on a real hierarchy.

The machines that test this project mount memory and pids with version 1, so the kernel's own answers to these writes
are not tested; docs/containers.md says so.
"""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandboxes.linux import cgroups
from sandboxes.linux.cgroups import MEMORY, PIDS, Cgroups, sweep
from tests.machine import needs_root


def make_group(folder: Path, controllers: str) -> Path:
    """Make the files of a group that the code reads."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cgroup.controllers").write_text(controllers)
    return folder


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root of a tree of plain files that stands for a hierarchy; this process is in its group `own`."""
    root = make_group(tmp_path / "cgroup", "cpu memory pids")
    make_group(root / "own", "cpu memory pids")
    monkeypatch.setattr(cgroups, "mount_points", lambda: {"": root})
    monkeypatch.setattr(cgroups, "_own_groups", lambda: {"": root / "own"})
    return root


def test_groups_are_below_the_own_group_if_it_enables_controllers(root: Path) -> None:
    groups = Cgroups("here")
    groups.open()
    assert (groups.version, groups.problem, groups.behind) == (2, "", None)
    assert groups.parents == {MEMORY: root / "own" / "here", PIDS: root / "own" / "here"}
    assert (root / "own" / "here" / "cgroup.subtree_control").read_text() == "+cpu"
    assert (root / "own" / "here" / "cpu.weight").read_text() == "50"


def test_the_root_is_taken_if_the_own_group_refuses(root: Path) -> None:
    """A group with processes of its own refuses to enable controllers; a directory refuses the write here."""
    (root / "own" / "cgroup.subtree_control").mkdir()
    groups = Cgroups("here")
    groups.open()
    assert groups.parents[MEMORY] == root / "here"
    assert not (root / "own" / "here").exists()


@pytest.mark.parametrize("controllers", ["", "cpu pids", "hugetlb"])
def test_a_hierarchy_without_memory_is_none(root: Path, controllers: str) -> None:
    """Machines with both versions have only leftovers in version 2."""
    for group in (root, root / "own"):
        make_group(group, controllers)
    groups = Cgroups("here")
    groups.open()
    assert not groups.writable
    assert "neither" in groups.problem


def test_a_sandbox_has_limits_of_its_own(root: Path) -> None:
    groups = Cgroups("here")
    groups.open()
    box = root / "own" / "here" / "box"
    assert groups.create("box") == [str(box / "cgroup.procs")]
    groups.limit("box", memory_bytes=1 << 20, pids=8, cpus=0.5)
    written = {path.name: path.read_text() for path in box.iterdir()}
    assert written == {
        "memory.max": "1048576",
        "memory.swap.max": "0",
        "memory.oom.group": "0",
        "pids.max": "10",
        "cpu.max": "50000 100000",
    }


@pytest.fixture
def hierarchy(tmp_path: Path) -> Iterator[Path]:
    """A real hierarchy of version 2, without the controllers that version 1 has."""
    mounted = subprocess.run(["mount", "-t", "cgroup2", "none", str(tmp_path)], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip(f"version 2 cannot be mounted here: {mounted.stderr.decode().strip()}")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


@needs_root
def test_a_sweep_ends_the_processes_of_real_groups(hierarchy: Path) -> None:
    parent = hierarchy / f"forkpoint-test-{hierarchy.name}"
    box = parent / "box"
    box.mkdir(parents=True)
    with subprocess.Popen(["sleep", "600"]) as process:
        (box / "cgroup.procs").write_text(str(process.pid))
        sweep(parent)
    assert process.returncode == -9
    assert not parent.exists()
