"""What sandboxes of the `local` driver need from this machine: checked for `forkpoint doctor`, and before serving."""

import asyncio
import os
import platform
import re
import resource
import shutil
import sqlite3
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import orjson

from sandboxes import IMPORT_ROOT
from sandboxes.calls import ToolCall
from sandboxes.errors import SandboxError, SpecError
from sandboxes.host.defaults import RESERVE_BYTES
from sandboxes.linux import syscalls as kernel
from sandboxes.linux.cgroups import Cgroups
from sandboxes.local.driver import LocalDriver
from sandboxes.spec import EnvironmentSpec
from sandboxes.sql.sqlite_volatile import clock_can_be_set
from sandboxes.sqlite.file_clone import Method, choose, measure
from snapshots.criu.binary import CriuBinary, CriuMissingError

OLDEST_KERNEL = (6, 5)
"""The first whose overlayfs takes its layers one by one (`lowerdir+`)."""
DESCRIPTORS_PER_SANDBOX = 8
_TRIAL_BYTES = 16 << 20
"""Of the file that is forked to see what that costs."""


@dataclass(frozen=True, slots=True)
class Requirement:
    """One thing that was checked. required: without it nothing runs; otherwise something holds less well.

    remedy: what to do where it is not met.
    """

    name: str
    ok: bool
    detail: str
    remedy: str
    required: bool = True


def check(data_dir: Path) -> list[Requirement]:
    """Check this machine, and end with a real sandbox below data_dir that runs `true`. 0.1 s; leaves nothing behind."""
    found = [*_platform()]
    if not all(requirement.ok for requirement in found):
        return found
    found += [_namespaces(), _file_system(data_dir), _cgroups(), _descriptors(), _docker()]
    if all(requirement.ok for requirement in found if requirement.required):
        found += [_trial(data_dir), _criu(), _sqlite(data_dir)]
    return found


def _platform() -> Iterator[Requirement]:
    linux = sys.platform == "linux"
    yield Requirement("Linux", linux, platform.system(), "Run Forkpoint on Linux: in a virtual machine or on a server.")
    match = re.match(r"(\d+)\.(\d+)", platform.release())
    version = (int(match[1]), int(match[2])) if match else (0, 0)
    remedy = f"Boot kernel {'.'.join(map(str, OLDEST_KERNEL))} or newer (Debian 12: linux-image-amd64 from backports)."
    yield Requirement("kernel", version >= OLDEST_KERNEL, platform.release(), remedy)
    remedy = "Use an x86_64 or aarch64 machine: system calls are filtered by number."
    yield Requirement("processor", kernel.MACHINE in {"x86_64", "aarch64"}, kernel.MACHINE, remedy)


def _namespaces() -> Requirement:
    name = "namespaces"
    if os.geteuid() == 0:
        return _try_in_child(
            name, kernel.CLONE_NEWNS, "root", "Run the container that Forkpoint is in with --privileged."
        )
    remedy = "Run as root, or allow user namespaces: sysctl kernel.unprivileged_userns_clone=1, and on Ubuntu also "
    remedy += "kernel.apparmor_restrict_unprivileged_userns=0."
    return _try_in_child(name, kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS, "unprivileged, in a user namespace", remedy)


def _try_in_child(name: str, flags: int, detail: str, remedy: str) -> Requirement:
    """Unshare in a child of its own: a refusal may not touch this process."""
    program = f"from sandboxes.linux import syscalls; syscalls.unshare({flags})"
    pid = os.posix_spawn(
        sys.executable, [sys.executable, "-S", "-c", program], {"PYTHONPATH": IMPORT_ROOT},
        file_actions=[(os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0)],
    )  # fmt: skip
    ok = os.waitpid(pid, 0)[1] == 0
    return Requirement(name, ok, detail if ok else f"{detail}: the kernel refuses", remedy)


def _file_system(data_dir: Path) -> Requirement:
    there = next(folder for folder in (data_dir, *data_dir.absolute().parents) if folder.is_dir())
    free = shutil.disk_usage(there).free
    ok = os.access(there, os.W_OK | os.X_OK) and free > 2 * RESERVE_BYTES
    detail = f"{there}: {free >> 20} MB free" if os.access(there, os.W_OK) else f"{there} is not writable"
    return Requirement("data directory", ok, detail, "Choose a writable directory with free disk: --data DIR.")


def _cgroups() -> Requirement:
    groups = Cgroups(f"forkpoint-check-{os.getpid()}")
    groups.open()
    ok = groups.writable
    groups.close()
    if ok:
        return Requirement(
            "control groups", True, f"version {groups.version}: memory and pids are limited", "", required=False
        )
    detail = f"{groups.problem}; limits hold for each process (memory) and user (pids) instead of each sandbox"
    remedy = "Run as root, or as a service whose groups are delegated: systemd-run --user --scope -p Delegate=yes …"
    return Requirement("control groups", False, detail, remedy, required=False)


def _descriptors() -> Requirement:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    sandboxes = hard // DESCRIPTORS_PER_SANDBOX
    ok = sandboxes >= 200
    remedy = "Raise it: ulimit -Hn 65536, or LimitNOFILE= of the service."
    return Requirement("descriptors", ok, f"{soft} (at most {hard}): {sandboxes} sandboxes", remedy, required=False)


def _criu() -> Requirement:
    remedy = "Without it a state with live processes (a server, a REPL) is reached by replaying its calls: right, but "
    remedy += "slower. docs/operating.md, 'Checkpoints of live processes', says how to get it."
    with tempfile.TemporaryDirectory(prefix="forkpoint-check-") as folder:
        try:
            CriuBinary.prepare(Path(folder))
        except CriuMissingError as error:
            return Requirement("checkpoints", False, str(error), remedy, required=False)
    return Requirement("checkpoints", True, "CRIU works: live processes are frozen and restored", "", required=False)


def _docker() -> Requirement:
    from sandboxes.container.daemon import Daemon

    name, remedy = "Docker", "Only for the container driver: docs/containers.md says what it needs."
    daemon = Daemon()
    try:
        told = daemon.check()
    except SandboxError as error:
        return Requirement(name, False, str(error), remedy, required=False)
    finally:
        daemon.close()
    detail = f"{told.get('ServerVersion')} at {daemon.where}, storage driver {told.get('Driver')}"
    return Requirement(name, told.get("Driver") == "overlay2" and os.geteuid() == 0, detail, remedy, required=False)


def _sqlite(data_dir: Path) -> Requirement:
    """Say how databases fork below data_dir, and what that costs there."""
    there = next(folder for folder in (data_dir, *data_dir.absolute().parents) if folder.is_dir())
    method = choose(there)
    cost_ms = measure(there, method, _TRIAL_BYTES) * 1e3
    cost = f"{cost_ms:.2f} ms at any size"
    if method is Method.COPY:
        cost = f"{cost_ms * 100 / (_TRIAL_BYTES >> 20):.0f} ms for each 100 MB"
    detail = f"SQLite {sqlite3.sqlite_version}; a rollout's first write forks by {method.value}: {cost}"
    if not clock_can_be_set():
        detail += "; its clock is hidden: what uses a date function is not shared, and `volatile` cannot be frozen"
    remedy = "Put data on a file system with hard links or reflinks (XFS, btrfs): --data DIR."
    return Requirement("databases", method is not Method.COPY, detail, remedy, required=False)


def _trial(data_dir: Path) -> Requirement:
    remedy = "The detail names what the kernel refused. In a container, run it with --privileged; data must lie on a "
    remedy += "file system that overlayfs can write to (ext4, xfs, btrfs, tmpfs; not NFS, not another overlay)."
    made = not data_dir.exists()
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="check-", dir=data_dir) as folder:
            said = asyncio.run(_run_true(Path(folder)))
    except (SandboxError, SpecError, OSError) as error:
        return Requirement("trial sandbox", False, str(error), remedy)
    finally:
        if made and data_dir.exists() and not any(data_dir.iterdir()):
            data_dir.rmdir()
    return Requirement("trial sandbox", said == 0, f"`true` ended with {said}", remedy)


async def _run_true(folder: Path) -> int:
    driver = LocalDriver(folder)
    await driver.open()
    try:
        sandbox = await driver.start(EnvironmentSpec())
        call = ToolCall("shell", "exec", {"command": "true", "timeout_s": 10.0, "session": "main"})
        return int(orjson.loads((await sandbox.execute(call)).result.body)["exit_code"])
    finally:
        await driver.aclose()
