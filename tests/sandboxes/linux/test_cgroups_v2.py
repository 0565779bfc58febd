"""Control groups of version 2: which files get which values in a tree of plain files, and moves on a real hierarchy.

Machines that mount memory and pids with version 1 have no limits to test here: `tests/guest` tests them on its kernel.
"""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandboxes.linux import cgroups
from sandboxes.linux.cgroups import MEMORY, PIDS, PROXY_GROUP, Cgroups, sweep
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
    # The last of several writes: a plain file keeps no more.
    assert (root / "own" / "here" / "cgroup.subtree_control").read_text() == "+io"
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


@pytest.fixture
def busy(hierarchy: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, int]]:
    """A real group with a process in it, which stands for this process, and a controller that is free here."""
    controllers = (hierarchy / "cgroup.controllers").read_text().split()
    # The rule about processes in a group is for controllers such as these two.
    free = next((name for name in ("memory", "hugetlb") if name in controllers), None)
    if free is None:
        pytest.skip(f"version 2 has no controller here that needs a group without processes: {controllers}")
    monkeypatch.setattr(cgroups, "MEMORY", free)
    monkeypatch.setattr(cgroups, "PIDS", free)
    monkeypatch.setattr(cgroups, "mount_points", lambda: {"": hierarchy})
    group = hierarchy / f"forkpoint-test-{hierarchy.name}"
    enabled = free in (hierarchy / "cgroup.subtree_control").read_text().split()
    (hierarchy / "cgroup.subtree_control").write_text(f"+{free}")
    group.mkdir()
    with subprocess.Popen(["sleep", "600"]) as process:
        (group / "cgroup.procs").write_text(str(process.pid))
        monkeypatch.setattr(cgroups, "_own_groups", lambda: {"": group_of(hierarchy, process.pid)})
        yield group, process.pid
        process.kill()
    if (group / PROXY_GROUP).is_dir():
        (group / PROXY_GROUP).rmdir()
    group.rmdir()
    if not enabled:
        (hierarchy / "cgroup.subtree_control").write_text(f"-{free}")


def group_of(hierarchy: Path, pid: int) -> Path:
    (line,) = (line for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines() if line.startswith("0::"))
    return hierarchy / line.removeprefix("0::/")


@pytest.mark.parametrize("ours", ["delegated", "a container's root"])
@needs_root
def test_the_proxy_makes_room_in_its_own_group(
    busy: tuple[Path, int], monkeypatch: pytest.MonkeyPatch, ours: str
) -> None:
    """A group with processes can limit none below it. They move, and the next look, from there, leads to the same."""
    own, pid = busy
    if ours == "delegated":
        os.setxattr(own, "user.delegate", b"1")
    else:
        monkeypatch.setattr(cgroups, "mount_points", lambda: {"": own})
    for name in ("first", "second"):
        groups = Cgroups(name)
        groups.open()
        try:
            assert (groups.problem, groups.folders) == ("", {own / name})
            assert group_of(own.parent, pid) == own / PROXY_GROUP
            groups.create("box")
            assert list((own / name / "box").glob(f"{cgroups.MEMORY}.*max"))
        finally:
            groups.close()


@needs_root
def test_processes_stay_in_a_group_of_others(busy: tuple[Path, int], hierarchy: Path) -> None:
    own, pid = busy
    groups = Cgroups(f"{own.name}-beside")
    groups.open()
    try:
        assert groups.folders == {hierarchy / groups.name}
        assert group_of(hierarchy, pid) == own
    finally:
        groups.close()


@needs_root
def test_a_refusal_names_the_group(busy: tuple[Path, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no other group can be reached, the reason is the kernel's."""
    own, _ = busy
    monkeypatch.setattr(cgroups, "mount_points", lambda: {"": own})
    monkeypatch.setattr(cgroups, "_is_ours", lambda _group: False)
    groups = Cgroups("here")
    groups.open()
    assert (groups.writable, groups.problem) == (False, f"{own}: Device or resource busy")
    assert not (own / "here").exists()
