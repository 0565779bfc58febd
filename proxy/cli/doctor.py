"""Checks of the machine: the requirements of local sandboxes, for `forkpoint doctor` and before `serve`."""

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
from contextlib import closing
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
from sandboxes.shell_files import copies
from sandboxes.spec import EnvironmentSpec
from sandboxes.sql.sqlite_volatile import clock_can_be_set
from sandboxes.sqlite.file_clone import Method, choose, measure
from snapshots.criu.binary import CriuBinary, CriuMissingError

OLDEST_KERNEL = (5, 14)
"""The first kernel on whose mounts no link is followed where it is told so by descriptor (mount_setattr(2),
MOUNT_ATTR_NOSYMFOLLOW); also the kernel of RHEL 9."""
DESCRIPTORS_PER_SANDBOX = 8
"""File descriptors that the proxy holds for each sandbox, rounded up."""
_TRIAL_BYTES = 16 << 20
"""Size of the file whose fork is timed."""


@dataclass(frozen=True, slots=True)
class Requirement:
    """A requirement, and whether this machine meets it."""

    name: str
    ok: bool
    detail: str  # What the check measured.
    remedy: str  # What to do if it is not met.
    required: bool = True  # Whether sandboxes cannot run without it. If not, a feature or a limit is missing.


def check(data_dir: Path, *, checkpoints: bool = True) -> list[Requirement]:
    """Check this machine, and run `true` in a real sandbox. Removes what it created.

    The directory of the store and the snapshots need not exist. `checkpoints` is the setting of this name: whether CRIU
    is used if it works.
    """
    results = [*_platform()]
    if not all(requirement.ok for requirement in results):
        return results
    results += [_namespaces(), _file_system(data_dir), _cgroups(), _descriptors(), _images()]
    results += [*_damage(data_dir), *_host_changes(data_dir)]
    if all(requirement.ok for requirement in results if requirement.required):
        results += [_trial(data_dir), _shells(), _criu() if checkpoints else _no_checkpoints(), _sqlite(data_dir)]
    return results


def _platform() -> Iterator[Requirement]:
    linux = sys.platform == "linux"
    yield Requirement("Linux", linux, platform.system(), "Run Forkpoint on Linux, for example in a virtual machine.")
    match = re.match(r"(\d+)\.(\d+)", platform.release())
    version = (int(match[1]), int(match[2])) if match else (0, 0)
    remedy = f"Boot kernel {'.'.join(map(str, OLDEST_KERNEL))} or newer."
    yield Requirement("kernel", version >= OLDEST_KERNEL, platform.release(), remedy)
    remedy = "Use an x86_64 or aarch64 machine: the filter of system calls knows only these."
    yield Requirement("processor", kernel.MACHINE in {"x86_64", "aarch64"}, kernel.MACHINE, remedy)


def _namespaces() -> Requirement:
    name = "namespaces"
    if os.geteuid() == 0:
        return _try_in_child(
            name,
            kernel.CLONE_NEWNS,
            "root",
            "If Forkpoint runs in a container, start that container with --privileged.",
        )
    remedy = "Run as root, or allow user namespaces: sysctl kernel.unprivileged_userns_clone=1, and on Ubuntu also "
    remedy += "kernel.apparmor_restrict_unprivileged_userns=0."
    return _try_in_child(name, kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS, "unprivileged, in a user namespace", remedy)


def _try_in_child(name: str, flags: int, detail: str, remedy: str) -> Requirement:
    """Try to create namespaces in a child process, because success would change this process."""
    program = f"from sandboxes.linux import syscalls; syscalls.unshare({flags})"
    # Without -P, modules in the directory where this was started would come before ours.
    pid = os.posix_spawn(
        sys.executable, [sys.executable, "-S", "-P", "-c", program], {"PYTHONPATH": IMPORT_ROOT},
        file_actions=[(os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0)],
    )  # fmt: skip
    ok = os.waitpid(pid, 0)[1] == 0
    return Requirement(name, ok, detail if ok else f"{detail}: the kernel refuses to create them", remedy)


def _file_system(data_dir: Path) -> Requirement:
    existing = _existing(data_dir)
    free = shutil.disk_usage(existing).free
    ok = os.access(existing, os.W_OK | os.X_OK) and free > 2 * RESERVE_BYTES
    detail = f"{existing}: {free >> 20} MB free" if os.access(existing, os.W_OK) else f"{existing} is not writable"
    return Requirement("data directory", ok, detail, "Choose a writable directory with free disk space: --data DIR.")


def _damage(data_dir: Path) -> Iterator[Requirement]:
    """Report rollouts that lost their position, and damaged segments of the journal that were set aside."""
    damaged = sorted(path.name for path in (data_dir / "journal").glob("*.damaged"))
    lost, store = 0, data_dir / "forkpoint.sqlite"
    if store.exists():
        try:
            with closing(sqlite3.connect(f"file:{store}?mode=ro", uri=True)) as connection:
                query = "SELECT COUNT(*) FROM rollouts WHERE finished = 0 AND lost <> ''"
                (lost,) = connection.execute(query).fetchone()
        except sqlite3.Error as error:
            yield Requirement("store", False, str(error), "Restore the file from a copy.", required=False)
    if damaged or lost:
        detail = f"{len(damaged)} damaged journal segments were set aside; {lost} rollouts lost their position"
        remedy = "Check the disk. End these rollouts (DELETE …/rollouts/{rollout}), then delete journal/*.damaged."
        yield Requirement("journal", False, detail, remedy, required=False)


def _cgroups() -> Requirement:
    groups = Cgroups(f"forkpoint-check-{os.getpid()}")
    groups.open()
    ok = groups.writable
    groups.close()
    if ok:
        return Requirement(
            "control groups",
            True,
            f"version {groups.version}: memory and processes of each sandbox are limited",
            "",
            required=False,
        )
    detail = (
        f"{groups.problem}; limits apply to each process (memory) and user (processes) instead of each sandbox, and "
        "sandboxes compete with the proxy for CPUs"
    )
    remedy = "Run as root, or as a service with delegated control groups: systemd-run --user --scope -p Delegate=yes …"
    return Requirement("control groups", False, detail, remedy, required=False)


def _descriptors() -> Requirement:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    sandboxes = hard // DESCRIPTORS_PER_SANDBOX
    ok = sandboxes >= 200
    remedy = "Raise the limit: ulimit -Hn 65536, or LimitNOFILE= of the service."
    return Requirement(
        "descriptors", ok, f"{soft} (hard limit {hard}), enough for {sandboxes} sandboxes", remedy, required=False
    )


def _host_changes(data_dir: Path) -> Iterator[Requirement]:
    """Report how often the host changed under tasks that have it as their base: each version has a layer of its own."""
    folder = data_dir / "local" / "bases"
    versions = [*folder.glob("mask-*"), *folder.glob("host-*")]
    if versions:
        detail = f"this machine has changed {len(versions) - 1} times under tasks with base host"
        remedy = "New rollouts begin new trees then. Give tasks a directory or a tarball as base: docs/tasks.md."
        yield Requirement("host base", len(versions) == 1, detail, remedy, required=False)


def _shells() -> Requirement:
    """Check whether the shells of this machine's bash can be forks of one that was loaded once."""
    remedy = "Install a C compiler (Debian, Ubuntu: apt install gcc libc6-dev), then install Forkpoint again."
    with tempfile.TemporaryDirectory(prefix="forkpoint-check-") as folder:
        try:
            copies.make(Path(folder) / "shell")
        except copies.NoShellFilesError as error:
            detail = f"each call executes bash, which takes 1.4 ms of CPU more than a fork: {error}"
            return Requirement("shells", False, detail, remedy, required=False)
    return Requirement("shells", True, "each call has a fork of a bash that was loaded once", "", required=False)


def _criu() -> Requirement:
    remedy = (
        "Without CRIU, states with live processes (a server, a REPL) are reached by replaying their calls, which is "
    )
    remedy += "slower. See 'Checkpoints of live processes' in docs/operating.md."
    with tempfile.TemporaryDirectory(prefix="forkpoint-check-") as folder:
        try:
            CriuBinary.prepare(Path(folder))
        except CriuMissingError as error:
            return Requirement("checkpoints", False, str(error), remedy, required=False)
    return Requirement(
        "checkpoints", True, "CRIU works: live processes can be checkpointed and restored", "", required=False
    )


def _no_checkpoints() -> Requirement:
    detail = "turned off by the setting checkpoints: states with live processes are reached by replay"
    return Requirement("checkpoints", True, detail, "", required=False)


def _images() -> Requirement:
    """Check where images come from: a daemon, or files alone."""
    from sandboxes.images.daemon import ImageDaemon

    daemon = ImageDaemon()
    try:
        info = daemon.check()
    except SandboxError as error:
        remedy = "Images in files need no Docker (docs/containers.md)."
        return Requirement("images", False, str(error), remedy, required=False)
    finally:
        daemon.close()
    detail = f"Docker {info.get('ServerVersion')} at {daemon.where}, storage driver {info.get('Driver')}"
    return Requirement("images", True, detail, "", required=False)


def _existing(data_dir: Path) -> Path:
    """Return the data directory, or the directory in which it would be made."""
    return next(folder for folder in (data_dir, *data_dir.absolute().parents) if folder.is_dir())


def _sqlite(data_dir: Path) -> Requirement:
    """Check how SQLite databases are forked in the data directory, and measure the cost."""
    existing = _existing(data_dir)
    method = choose(existing)
    cost_ms = measure(existing, method, _TRIAL_BYTES) * 1e3
    cost = f"{cost_ms:.2f} ms for any size"
    if method is Method.COPY:
        cost = f"{cost_ms * 100 / (_TRIAL_BYTES >> 20):.0f} ms for each 100 MB"
    detail = (
        f"SQLite {sqlite3.sqlite_version}; the first write of a rollout forks the database by {method.value}: {cost}"
    )
    if not clock_can_be_set():
        detail += "; SQLite's clock cannot be set, so statements with date functions are not shared, "
        detail += "and `volatile` states have no snapshots"
    remedy = "Choose a data directory on a file system with reflinks or hard links (XFS, btrfs): --data DIR."
    return Requirement("databases", method is not Method.COPY, detail, remedy, required=False)


def _trial(data_dir: Path) -> Requirement:
    remedy = (
        "See the error above. If Forkpoint runs in a container, start it with --privileged. The data directory must "
    )
    remedy += "be on a file system that overlayfs can write to: ext4, xfs, btrfs or tmpfs, not NFS or another overlay."
    created = not data_dir.exists()
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="check-", dir=data_dir) as folder:
            exit_code = asyncio.run(_run_true(Path(folder)))
    except (SandboxError, SpecError, OSError) as error:
        return Requirement("trial sandbox", False, str(error), remedy)
    finally:
        if created and data_dir.exists() and not any(data_dir.iterdir()):
            data_dir.rmdir()
    return Requirement("trial sandbox", exit_code == 0, f"`true` exited with {exit_code}", remedy)


async def _run_true(folder: Path) -> int:
    driver = LocalDriver(folder)
    await driver.open()
    try:
        sandbox = await driver.start(EnvironmentSpec())
        call = ToolCall("shell", "exec", {"command": "true", "timeout_s": 10.0, "session": "main"})
        return int(orjson.loads((await sandbox.execute(call)).result.body)["exit_code"])
    finally:
        await driver.aclose()
