"""What a sandbox's groups say about a call, in trees of plain files that stand for control groups of both versions."""

from pathlib import Path

import pytest

from sandboxes.calls import ResourceUse
from sandboxes.linux.sandbox_groups import GroupFiles, ResourceMeter

CPU_STAT = "usage_usec {}\nuser_usec 1\nsystem_usec 2\ncore_sched.force_idle_usec 3\n"
CPU_STAT_1 = "nr_periods 0\nnr_throttled 0\nthrottled_time 7\n"
"""The file of the same name in version 1, which has no CPU time."""
DISK = "253:0 rbytes={} wbytes={} rios=9 wios=9 dbytes=9 dios=9\n"


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        (folder / name.replace("_", ".", 1)).write_text(text)


def meter(*groups: Path) -> ResourceMeter:
    return ResourceMeter(GroupFiles(map(str, groups)))


def test_version_2_counts_all_disks(tmp_path: Path) -> None:
    write(tmp_path, cpu_stat=CPU_STAT.format(1_000_000), memory_peak="4096\n", io_stat=DISK.format(10, 20))
    meter_ = meter(tmp_path)
    meter_.begin()
    disks = DISK.format(110, 20) + "8:0 \n" + DISK.replace("253", "7").format(5, 6)
    write(tmp_path, cpu_stat=CPU_STAT.format(1_250_000), memory_peak="8192\n", io_stat=disks)
    assert meter_.end() == ResourceUse(0.25, 8192, 105, 6)


def test_version_1_counts_cpu_and_memory(tmp_path: Path) -> None:
    cpu, accounts, memory = (tmp_path / name for name in ("cpu", "cpuacct", "memory"))
    for folder in (cpu, accounts, memory):
        folder.mkdir()
    write(cpu, cpu_stat=CPU_STAT_1)
    write(accounts, cpuacct_usage="1000000000\n")
    (memory / "memory.max_usage_in_bytes").write_text("9\n")
    meter_ = meter(cpu, accounts, memory)
    meter_.begin()
    write(accounts, cpuacct_usage="1500000000\n")
    assert meter_.end() == ResourceUse(0.5, 0, None, None)


def test_nothing_is_known_without_groups(tmp_path: Path) -> None:
    """Nothing is None, and not zeros."""
    write(tmp_path, cpu_stat=CPU_STAT_1, memory_max="max\n")
    meter_ = meter(tmp_path)
    meter_.begin()
    assert meter_.end() is None


@pytest.mark.parametrize(("peak", "known"), [(4096, None), (8192, 8192)])
def test_peak_that_cannot_be_reset_must_grow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, peak: int, known: int | None
) -> None:
    """Else it may be the peak of an earlier call."""
    monkeypatch.setattr(GroupFiles, "reset", lambda *_: False)
    write(tmp_path, cpu_stat=CPU_STAT.format(0), memory_peak="4096\n")
    meter_ = meter(tmp_path)
    meter_.begin()
    write(tmp_path, memory_peak=f"{peak}\n")
    assert meter_.end() == ResourceUse(0.0, known, None, None)


def test_disk_that_was_removed_takes_nothing_back(tmp_path: Path) -> None:
    write(tmp_path, io_stat=DISK.format(10, 20))
    meter_ = meter(tmp_path)
    meter_.begin()
    write(tmp_path, io_stat="")
    assert meter_.end() == ResourceUse(None, None, 0, 0)
