"""A sandbox's own view: its root, /proc and /dev, in its own mount namespace, and moving all of it onto new layers."""

import os
import stat

from sandboxes.localbox import kernel

_PROC = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
_DEVICES = {"null": 3, "zero": 5, "full": 7, "random": 8, "urandom": 9}
_LINKS = {"ptmx": "pts/ptmx", "fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}
_READ_ONLY = ("sys", "irq", "bus", "fs", "sysrq-trigger")
_MASKED_FILES = ("kcore", "keys", "timer_list", "sched_debug", "latency_stats", "kallsyms", "kmsg")
_MASKED_DIRECTORIES = ("acpi", "scsi", "asound")
SHARED_MEMORY = "/run/shm"
"""/dev/shm points there: what a call leaves in shared memory is then part of the files, like everything else."""


def enter(root: int, *, devices_from_host: bool, binds: list[str]) -> None:
    """Make the detached overlay root the root of this mount namespace, with its own /proc and /dev.

    devices_from_host: device nodes are bound from the host, for want of the right to make them.
    binds: folders of the host that stay visible, read-only, at their own path.
    """
    kernel.attach(root, "/")
    os.fchdir(root)
    for folder in binds:
        kernel.mount(folder, folder.lstrip("/"), "", kernel.MS_BIND | kernel.MS_REC)
        _remount_read_only(folder.lstrip("/"), kernel.MS_NOSUID | kernel.MS_NODEV)
    kernel.mount("tmpfs", "dev", "tmpfs", kernel.MS_NOSUID, "mode=755,size=64k,nr_inodes=64")
    _fill_dev(devices_from_host=devices_from_host)
    kernel.mount("proc", "proc", "proc", _PROC)
    _narrow_proc()
    _pivot()


def switch(root: int, carried: list[str]) -> None:
    """Put the detached overlay root in the place of this mount namespace's root; /proc, /dev and carried move over.

    0.3 ms. Whoever stands in a directory of the old root stays there: only sandboxes whose shells are gone switch.
    """
    kernel.attach(root, "/")
    os.fchdir(root)
    for place in ("/proc", "/dev", *carried):
        kernel.move(place, place.lstrip("/"))
    _pivot()


def _pivot() -> None:
    kernel.pivot_root(".", ".")
    kernel.unmount(".")
    os.chdir("/")


def _fill_dev(*, devices_from_host: bool) -> None:
    for name, minor in {**_DEVICES, "tty": 0}.items():
        path = f"dev/{name}"
        if devices_from_host:
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o666))
            kernel.mount(f"/dev/{name}", path, "", kernel.MS_BIND)
        else:
            os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(5 if name == "tty" else 1, minor))
            os.chmod(path, 0o666)  # noqa: PTH101 - pathlib is not loaded in pid 1
    os.mkdir("dev/pts")  # noqa: PTH102
    kernel.mount("devpts", "dev/pts", "devpts", kernel.MS_NOSUID | kernel.MS_NOEXEC, "newinstance,ptmxmode=0666,mode=620")
    for name, target in {**_LINKS, "shm": SHARED_MEMORY}.items():
        os.symlink(target, f"dev/{name}")  # noqa: PTH211
    # Read-only from here on: nothing that a call leaves may live outside the overlay.
    _remount_read_only("dev", kernel.MS_NOSUID)


def _narrow_proc() -> None:
    for name in _READ_ONLY:
        if os.path.exists(f"proc/{name}"):  # noqa: PTH110
            kernel.mount(f"proc/{name}", f"proc/{name}", "", kernel.MS_BIND | kernel.MS_REC)
            _remount_read_only(f"proc/{name}", _PROC)
    for name in _MASKED_FILES:
        if os.path.exists(f"proc/{name}"):  # noqa: PTH110
            kernel.mount("dev/null", f"proc/{name}", "", kernel.MS_BIND)
    for name in _MASKED_DIRECTORIES:
        if os.path.isdir(f"proc/{name}"):  # noqa: PTH112
            kernel.mount("tmpfs", f"proc/{name}", "tmpfs", _PROC | kernel.MS_RDONLY, "size=4k,nr_inodes=2")


def _remount_read_only(path: str, flags: int) -> None:
    kernel.mount("", path, "", kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | flags)
