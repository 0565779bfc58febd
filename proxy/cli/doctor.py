"""Checks of the machine: what each driver needs, for `forkpoint doctor` and before `serve`."""

import asyncio
import os
import platform
import re
import resource
import secrets
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from proxy.cli.namespaces import probe
from proxy.settings import Settings
from sandboxes.checkpointing import WITHOUT_CHECKPOINTS
from sandboxes.driver import TriedDriver, fulfils
from sandboxes.errors import SandboxError, SpecError
from sandboxes.host.defaults import RESERVE_BYTES
from sandboxes.linux import syscalls as kernel
from sandboxes.linux.cgroups import Cgroups
from sandboxes.linux.files import remove_tree
from sandboxes.local.machine import SEE_DOCTOR
from sandboxes.plugins import DriverContext, PluginError, make_driver
from sandboxes.pool.room import Room, open_more_files
from sandboxes.shell_files import copies
from sandboxes.sql.sqlite_volatile import clock_can_be_set
from sandboxes.sqlite.file_clone import can_link
from snapshots.criu.binary import CriuBinary, CriuMissingError

OLDEST_KERNEL = (5, 14)
"""The first kernel on whose mounts no link is followed where it is told so by descriptor (mount_setattr(2),
MOUNT_ATTR_NOSYMFOLLOW); also the kernel of RHEL 9."""
_ENOUGH = 200
"""Live sandboxes for which a machine should have room: three groups of 64 rollouts."""
_OTHER_DIRECTORY = "Choose a writable directory with free disk space: --data DIR."
_TRIAL_REMEDIES = {
    "local": "In a container, compare its rights with those in docs/deploying.md. The data directory must be on a file "
    "system that overlayfs can write to: ext4, xfs, btrfs or tmpfs, not NFS or another overlay."
}
"""What helps where the trial of a driver fails, if there is more to say than the error does."""


@dataclass(frozen=True, slots=True)
class Requirement:
    """A requirement, and whether this machine meets it."""

    name: str
    ok: bool
    detail: str  # What the check measured.
    remedy: str  # What to do if it is not met.
    required: bool = True  # Whether sandboxes cannot run without it. If not, a feature or a limit is missing.
    driver: str = ""  # The driver that needs it; empty if the proxy itself does.


def _extra(name: str, ok: bool, detail: str, remedy: str = "") -> Requirement:
    """Return a requirement without which sandboxes run all the same."""
    return Requirement(name, ok, detail, remedy, required=False)


def check(data_dir: Path, drivers: Sequence[str] = ("local",), *, checkpoints: bool = True) -> list[Requirement]:
    """Check this machine for these drivers, run a trial of each, and remove what it created."""
    results = [*_platform()]
    if not all(requirement.ok for requirement in results):
        return results
    local = "local" in drivers
    if local:
        results += [_kernel(), _namespaces(), _file_system(data_dir), _cgroups(), _room(), _images()]
        results += _host_changes(data_dir)
    results += _damage(data_dir)
    local = local and all(requirement.ok for requirement in results if requirement.required)
    results += _trials(data_dir, [name for name in drivers if local or name != "local"])
    if local:
        criu = _criu() if checkpoints else _no_checkpoints()
        results += [_shells(), criu, *(_other_users() if checkpoints and criu.ok else ())]
    if "sqlite" in drivers:
        results += [_sqlite(data_dir)]
    return results


def _platform() -> Iterator[Requirement]:
    linux = sys.platform == "linux"
    yield Requirement("Linux", linux, platform.system(), "Run Forkpoint on Linux, for example in a virtual machine.")
    remedy = "Use an x86_64 or aarch64 machine: the filter of system calls knows only these."
    yield Requirement("processor", kernel.MACHINE in {"x86_64", "aarch64"}, kernel.MACHINE, remedy)


def _kernel() -> Requirement:
    match = re.match(r"(\d+)\.(\d+)", platform.release())
    version = (int(match[1]), int(match[2])) if match else (0, 0)
    remedy = f"Boot kernel {'.'.join(map(str, OLDEST_KERNEL))} or newer."
    return Requirement("kernel", version >= OLDEST_KERNEL, platform.release(), remedy, driver="local")


def _namespaces() -> Requirement:
    ok, detail, remedy = probe()
    return Requirement("namespaces", ok, detail, remedy, driver="local")


def _file_system(data_dir: Path) -> Requirement:
    existing = _existing(data_dir)
    free = shutil.disk_usage(existing).free
    # With the capabilities that a proxy of another user than root has (access(2)).
    writable = os.access(existing, os.W_OK | os.X_OK, effective_ids=True)
    ok = writable and free > 2 * RESERVE_BYTES
    detail = f"{existing}: {free >> 20} MB free" if writable else f"{existing} is not writable"
    return Requirement("data directory", ok, detail, _OTHER_DIRECTORY)


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
            yield _extra("store", False, str(error), "Restore the file from a copy.")
    if damaged or lost:
        detail = f"{len(damaged)} damaged journal segments were set aside; {lost} rollouts lost their position"
        remedy = "Check the disk. End these rollouts (DELETE …/rollouts/{rollout}), then delete journal/*.damaged."
        yield _extra("journal", False, detail, remedy)


def _cgroups() -> Requirement:
    groups = Cgroups(f"forkpoint-check-{os.getpid()}")
    groups.open()
    ok, freezes = groups.writable, groups.freezer is not None
    groups.close()
    if ok:
        detail = f"version {groups.version}: memory and processes of each sandbox are limited, and processes can "
        detail += f"{'' if freezes else 'not '}be frozen between calls{'' if freezes else ' (no version 2)'}"
        return _extra("control groups", True, detail)
    # The kernel counts the processes of users other than root only (setrlimit(2), RLIMIT_NPROC).
    processes = (
        "the number of processes is not limited" if os.geteuid() == 0 else "processes for all sandboxes together"
    )
    detail = (
        f"{groups.problem}; memory is limited for each process instead of each sandbox, {processes}, and sandboxes "
        "compete with the proxy for CPUs"
    )
    remedy = "Run as root with writable control groups (docs/deploying.md), or as a service with delegated ones: "
    remedy += "systemd-run --user --scope -p Delegate=yes …"
    return _extra("control groups", False, detail, remedy)


def _room() -> Requirement:
    """Report for how many live sandboxes this machine has room, and what bounds their number."""
    open_more_files()
    room = Room(None, other_files=int(Settings.model_fields["max_connections"].default)).bound(0)
    remedy = f"For more, {room.remedy}."
    return _extra("room", room.most >= _ENOUGH, f"{room.most} live sandboxes, by {room.by}", remedy)


def _host_changes(data_dir: Path) -> Iterator[Requirement]:
    """Report how often the host changed under tasks that have it as their base: each version has a layer of its own."""
    folder = data_dir / "local" / "bases"
    versions = [*folder.glob("mask-*"), *folder.glob("host-*")]
    if versions:
        detail = f"this machine has changed {len(versions) - 1} times under tasks with base host"
        remedy = "New rollouts begin new trees then. Give tasks a directory or a tarball as base: docs/tasks.md."
        yield _extra("host base", len(versions) == 1, detail, remedy)


def _shells() -> Requirement:
    """Check whether the shells of this machine's bash can be forks of one that was loaded once."""
    remedy = "Install a C compiler (Debian, Ubuntu: apt install gcc libc6-dev), then install Forkpoint again."
    try:
        with tempfile.TemporaryDirectory(prefix="forkpoint-check-") as folder:
            copies.make(Path(folder) / "shell")
    # The directory may be on a disk that is full, which the data directory need not be on.
    except (copies.NoShellFilesError, OSError) as error:
        detail = f"each call executes bash, which takes 1.4 ms of CPU more than a fork: {error}"
        return _extra("shells", False, detail, remedy)
    return _extra("shells", True, "each call has a fork of a bash that was loaded once")


def _criu() -> Requirement:
    remedy = f"{WITHOUT_CHECKPOINTS} See 'Checkpoints of live processes' in docs/states-and-memory.md."
    try:
        with tempfile.TemporaryDirectory(prefix="forkpoint-check-") as folder:
            CriuBinary.prepare(Path(folder))
    except (CriuMissingError, OSError) as error:
        return _extra("checkpoints", False, str(error), remedy)
    return _extra("checkpoints", True, "CRIU works: live processes can be checkpointed and restored")


def _other_users() -> Iterator[Requirement]:
    """Check whether CRIU may save processes of other users; their limits (prlimit(2)) need CAP_SYS_RESOURCE."""
    if os.geteuid():
        return
    name, detail = "processes of other users", "they can be checkpointed and restored"
    # It ends with its input, because killing it needs a right, too.
    try:
        process = subprocess.Popen(
            ["/bin/cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, user=_NOBODY, group=_NOBODY, extra_groups=[]
        )
    except PermissionError:
        # Without the rights to become another user there are no such processes; the trial says what is missing.
        return
    with process:
        try:
            resource.prlimit(process.pid, resource.RLIMIT_CPU)
            yield _extra(name, True, detail)
        except PermissionError as error:
            detail = f"a process of user {_NOBODY} cannot be checkpointed ({error.strerror}): the capability "
            detail += "SYS_RESOURCE is missing"
            yield _extra(name, False, detail, _OTHERS_REMEDY)


_NOBODY = 65534
_OTHERS_REMEDY = (
    "Give the proxy the capability (docs/deploying.md, Least rights). Without it, states with servers whose workers "
    "have users of their own, such as nginx, are reached by replay, and lost where a replay differs."
)


def _no_checkpoints() -> Requirement:
    return _extra("checkpoints", True, f"turned off by the setting checkpoints. {WITHOUT_CHECKPOINTS}")


def _images() -> Requirement:
    from sandboxes.images.daemon import ImageDaemon

    daemon = ImageDaemon()
    try:
        info = daemon.check()
    except SandboxError as error:
        return _extra("images", False, str(error), "Images in files need no Docker (docs/containers.md).")
    finally:
        daemon.close()
    detail = f"Docker {info.get('ServerVersion')} at {daemon.where}, storage driver {info.get('Driver')}"
    return _extra("images", True, detail)


def _existing(data_dir: Path) -> Path:
    """Return the data directory, or the directory in which it would be made."""
    return next(folder for folder in (data_dir, *data_dir.absolute().parents) if folder.is_dir())


def _sqlite(data_dir: Path) -> Requirement:
    """Check how SQLite databases are forked in the data directory."""
    links = can_link(_existing(data_dir))
    way = "shares the database's file" if links else "copies the database"
    detail = f"SQLite {sqlite3.sqlite_version}; the first write of a rollout {way}"
    if not clock_can_be_set():
        detail += "; SQLite's clock cannot be set, so statements with date functions are not shared, "
        detail += "and `volatile` states have no snapshots"
    remedy = "Choose a data directory on a file system with hard links (ext4, XFS, btrfs): --data DIR."
    return _extra("databases", links, detail, remedy)


def _trials(data_dir: Path, names: Sequence[str]) -> list[Requirement]:
    folder = data_dir / f"check-{secrets.token_hex(4)}"
    results, drivers = list[Requirement](), dict[str, TriedDriver]()
    for name in names:
        try:
            driver = make_driver(name, DriverContext(folder / name))
        except PluginError as error:
            results.append(Requirement("package", False, str(error).rstrip("."), "Install it.", driver=name))
        else:
            drivers |= {name: driver} if fulfils(driver, TriedDriver) else {}
    if not drivers:
        return results
    created = not data_dir.exists()
    try:
        folder.mkdir(mode=0o700, parents=True)
    except OSError as error:
        return [*results, Requirement("data directory", False, str(error), _OTHER_DIRECTORY)]
    try:
        return [*results, *asyncio.run(_tried(drivers))]
    finally:
        remove_tree(folder)
        if created and not any(data_dir.iterdir()):
            data_dir.rmdir()


async def _tried(drivers: Mapping[str, TriedDriver]) -> list[Requirement]:
    return list(await asyncio.gather(*(_trial(name, driver) for name, driver in drivers.items())))


async def _trial(name: str, driver: TriedDriver) -> Requirement:
    try:
        await driver.open()
        await driver.trial()
    except (SandboxError, SpecError, OSError) as error:
        detail = str(error).removesuffix(SEE_DOCTOR).rstrip(" .")
        return Requirement(f"trial of {name}", False, detail, _TRIAL_REMEDIES.get(name, ""), driver=name)
    finally:
        await driver.aclose()
    return Requirement(f"trial of {name}", True, "works", "", driver=name)
