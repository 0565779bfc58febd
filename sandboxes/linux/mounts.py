"""A sandbox's own view: its root, /proc and /dev, in its own mount namespace, and moving all of it onto new layers."""

import os
import stat

from sandboxes.linux import syscalls as kernel

_PROC = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
_DEVICES = {"null": (1, 3), "zero": (1, 5), "full": (1, 7), "random": (1, 8), "urandom": (1, 9), "tty": (5, 0)}
_LINKS = {"ptmx": "pts/ptmx", "fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}
_READ_ONLY = ("sys", "irq", "bus", "fs", "sysrq-trigger")
_MASKED_FILES = ("kcore", "keys", "timer_list", "sched_debug", "latency_stats", "kallsyms", "kmsg")
_MASKED_DIRECTORIES = ("acpi", "scsi", "asound")
SHARED_MEMORY = "/run/shm"
"""/dev/shm points there: what a call leaves in shared memory is then part of the files, like everything else."""  # noqa: S108


def prepare(*, devices_from_host: bool) -> None:
    """Lay the sandbox's own /dev and /proc over the host's, in this mount namespace; `switch` then carries them along.

    devices_from_host: device nodes are bound from the host, for want of the right to make them.
    """
    nodes = {name: os.open(f"/dev/{name}", os.O_PATH | os.O_CLOEXEC) for name in _DEVICES} if devices_from_host else {}
    kernel.mount("tmpfs", "/dev", "tmpfs", kernel.MS_NOSUID, "mode=755,size=64k,nr_inodes=64")
    os.chdir("/")
    _fill_dev(nodes)
    kernel.mount("proc", "/proc", "proc", _PROC)
    _narrow_proc()


def bind_read_only(folder: str) -> None:
    """Keep a folder of the host visible, read-only, at its own path; `switch` has to carry it along."""
    kernel.mount(folder, folder, "", kernel.MS_BIND | kernel.MS_REC)
    _remount_read_only(folder, kernel.MS_NOSUID | kernel.MS_NODEV)


def switch(root: int, carried: list[str]) -> None:
    """Put the detached overlay root in the place of this mount namespace's root; /proc, /dev and carried move over.

    The first switch leaves the host's root for the sandbox's, later ones a stack of layers for the next.

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


def _fill_dev(nodes: dict[str, int]) -> None:
    for name, (major, minor) in _DEVICES.items():
        path = f"dev/{name}"
        if name in nodes:
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o666))
            kernel.mount(f"/proc/self/fd/{nodes[name]}", path, "", kernel.MS_BIND)
            os.close(nodes[name])
        else:
            os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(major, minor))
            os.chmod(path, 0o666)  # noqa: PTH101, S103 - as every /dev has them
    os.mkdir("dev/pts")  # noqa: PTH102
    kernel.mount(
        "devpts", "dev/pts", "devpts", kernel.MS_NOSUID | kernel.MS_NOEXEC, "newinstance,ptmxmode=0666,mode=620"
    )
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
