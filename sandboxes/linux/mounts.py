"""A sandbox's own view of the file system: its root, /proc and /dev, in its own mount namespace.

Theory of operation. pid 1 starts in a copy of the host's mount namespace. `prepare` mounts a private /dev, /proc and
/sys over the host's, read-only and with what tells about the host masked, because whatever a call leaves must be in the
overlay. `switch` attaches an overlay, moves these and the other mounts into it, makes it the root, and detaches the
host's root. Later calls of `switch` replace one stack of layers by the next one: so a sandbox moves to another state
without a new process tree. pid 1 does not load pathlib.
"""

import os
import stat
from collections.abc import Iterable, Sequence

from sandboxes.linux import syscalls as kernel
from sandboxes.linux.descriptors import Opened
from sandboxes.linux.spawn import SHELL_FILES

_PROC_FLAGS = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
_DEVICES = {"null": (1, 3), "zero": (1, 5), "full": (1, 7), "random": (1, 8), "urandom": (1, 9), "tty": (5, 0)}
_LINKS = {"ptmx": "pts/ptmx", "fd": "/proc/self/fd"} | {
    name: f"/proc/self/fd/{number}" for number, name in enumerate(("stdin", "stdout", "stderr"))
}
_MASKED_FILES = (
    "kcore", "keys", "key-users", "timer_list", "timer_stats", "sched_debug", "latency_stats", "kallsyms", "kmsg",
    "kpagecgroup", "kpagecount", "kpageflags", "slabinfo", "vmallocinfo", "pagetypeinfo", "buddyinfo", "iomem",
    "ioports", "interrupts", "softirqs", "schedstat", "cmdline", "modules", "mtrr", "partitions", "diskstats",
    "consoles",
)  # fmt: skip
"""Files of the kernel that tell about the machine or its memory. Each looks empty. Docker masks a part of them. The
load, the memory and the processors of the machine stay visible (`loadavg`, `meminfo`, `stat`), because programs ask."""
_MASKED_DIRECTORIES = ("acpi", "scsi", "asound", "driver", "fs", "tty/driver", "pressure")
_MASKED_SYSTEM = ("firmware", "devices/virtual/powercap", "devices/virtual/dmi")
"""Directories of /sys that name the machine, or show its power use. Each looks empty; Docker masks the first two."""
_MAX_TERMINALS = 256
"""The most terminals of one sandbox. The machine has 4,096, of which 1,024 are kept for itself (kernel.pty.reserve)."""
SHARED_MEMORY = "/run/shm"
"""Where /dev/shm points. What a call leaves in shared memory is then a file of the overlay, like everything else."""
_KERNEL_TYPES = {"proc", "sysfs", "devpts", "mqueue", "cgroup", "cgroup2"}
"""File systems of the kernel's own. No process can make a link there."""


def prepare(*, devices_from_host: bool, shell_files: str = "") -> None:
    """Mount the sandbox's own /dev, /proc and /sys over the host's, in this mount namespace; `switch` moves them."""
    # Device nodes are bound from the host in a user namespace, where no process may make them.

    # Made before /dev is another one: the directory may be below it. It is an overlay of its own, so a lock or a watch
    # of these files concerns one sandbox alone. Without an upper it is read-only, and needs two lower layers
    # (overlayfs.rst).
    files = kernel.overlay([f"{shell_files}/files", f"{shell_files}/empty"], None, None) if shell_files else None
    nodes = {name: os.open(f"/dev/{name}", os.O_PATH | os.O_CLOEXEC) for name in _DEVICES} if devices_from_host else {}
    kernel.mount("tmpfs", "/dev", "tmpfs", kernel.MS_NOSUID, "mode=755,size=64k,nr_inodes=64")
    os.chdir("/")
    _fill_dev(nodes)
    if files is not None:
        kernel.attach(files, SHELL_FILES)
        os.close(files)
    kernel.mount("proc", "/proc", "proc", _PROC_FLAGS)
    narrow_proc()
    _show_system()


def bind_read_only(folder: str) -> None:
    """Bind a directory of the host read-only to its own path. It must be in `kept` of the next `switch`."""
    kernel.mount(folder, folder, "", kernel.MS_BIND | kernel.MS_REC)
    remount_read_only(folder, kernel.MS_NOSUID | kernel.MS_NODEV)


def hide(path: str) -> None:
    """Put an empty directory or file over a path below a bound directory; it moves along with that."""
    if os.path.isdir(path):  # noqa: PTH112
        kernel.mount("tmpfs", path, "tmpfs", _PROC_FLAGS | kernel.MS_RDONLY, "size=4k,nr_inodes=2")
    elif os.path.exists(path):  # noqa: PTH110
        kernel.mount("/dev/null", path, "", kernel.MS_BIND)


def switch(root: int, kept: list[str]) -> None:
    """Make a detached overlay (`syscalls.overlay`) the root of this mount namespace; the kept mounts move along."""
    # A process whose working directory is in the old root stays there, so a sandbox must not have shells when it
    # switches.
    kernel.attach(root, "/")
    os.fchdir(root)
    for mount_point in ("/proc", "/dev", "/sys", *kept):
        # Relative to the new root, which is the working directory.
        kernel.move(mount_point, mount_point.lstrip("/"))
    # With both arguments equal the old root is stacked on the new one and can be detached (pivot_root(2), notes).
    kernel.pivot_root(".", ".")
    kernel.unmount(".")
    os.chdir("/")


def mount_for_services(roots: Iterable[str], shared: Iterable[Sequence[str]]) -> None:
    """Give each side service the sandbox's /proc, /dev and /sys, and mount the directories that services share."""
    # No path may lead through a link, which is an `OSError`: an image may have one there.
    for root in roots:
        for mount_point in ("/proc", "/dev", "/sys"):
            kernel.bind(mount_point, f"{root}{mount_point}", whole=True)
    for source, target in shared:
        kernel.bind(source, target, whole=False)


def stop_following_links() -> list[str]:
    """Make the kernel follow no symbolic link in this mount namespace; return the changed mounts."""
    with open("/proc/1/mountinfo", "rb") as file:  # noqa: PTH123
        lines = [line.decode("latin-1").split(" - ") for line in file]
    changed = []
    for mount, rest in lines:
        _, _, _, _, mount_point, options, *_ = mount.split()
        # Agents write to mounts that are writable now: a read-only one holds what the host or an image has put there.
        # In /dev, which is ours and read-only, CRIU needs the link /dev/fd.
        writable = "ro" not in options.split(",") and rest.split()[0] not in _KERNEL_TYPES and mount_point != "/dev"
        if writable and "nosymfollow" not in options.split(","):
            kernel.set_mount_attributes(mount_point, add=kernel.MOUNT_ATTR_NOSYMFOLLOW)
            changed.append(mount_point)
    return changed


def follow_links(mount_points: list[str]) -> None:
    """Undo `stop_following_links`."""
    for mount_point in mount_points:
        kernel.set_mount_attributes(mount_point, remove=kernel.MOUNT_ATTR_NOSYMFOLLOW)


def enter_ipc(pid: int) -> None:
    """Enter the IPC namespace of a process."""
    with Opened(os.open(f"/proc/{pid}/ns/ipc", os.O_RDONLY | os.O_CLOEXEC)) as namespace:
        kernel.setns(namespace, kernel.CLONE_NEWIPC)


def show_message_queues() -> None:
    """Show the message queues of this process's IPC namespace wherever others are shown."""
    with open("/proc/1/mountinfo", "rb") as file:  # noqa: PTH123
        lines = [line.decode("latin-1").split(" - ") for line in file]
    for place in [mount.split()[4] for mount, rest in lines if rest.split()[0] == "mqueue"]:
        kernel.unmount(place)
        kernel.mount("mqueue", place, "mqueue", _PROC_FLAGS)


def _fill_dev(nodes: dict[str, int]) -> None:
    for name, (major, minor) in _DEVICES.items():
        path = f"dev/{name}"
        if name in nodes:
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o666))
            kernel.mount(f"/proc/self/fd/{nodes[name]}", path, "", kernel.MS_BIND)
            os.close(nodes[name])
        else:
            os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(major, minor))
            os.chmod(path, 0o666)  # noqa: PTH101, S103 - every /dev has these modes
    os.mkdir("dev/pts")  # noqa: PTH102
    kernel.mount(
        "devpts",
        "dev/pts",
        "devpts",
        kernel.MS_NOSUID | kernel.MS_NOEXEC,
        f"newinstance,ptmxmode=0666,mode=620,max={_MAX_TERMINALS}",
    )
    os.mkdir("dev/mqueue")  # noqa: PTH102
    kernel.mount("mqueue", "dev/mqueue", "mqueue", _PROC_FLAGS)
    for name, target in {**_LINKS, "shm": SHARED_MEMORY}.items():
        os.symlink(target, f"dev/{name}")  # noqa: PTH211
    # Empty without shell files.
    os.mkdir(f".{SHELL_FILES}")  # noqa: PTH102
    # Read-only from here on: whatever a call leaves must be in the overlay.
    remount_read_only("dev", kernel.MS_NOSUID)


def _show_system() -> None:
    try:
        kernel.mount("sysfs", "/sys", "sysfs", _PROC_FLAGS | kernel.MS_RDONLY)
    except OSError:
        # In a user namespace the kernel refuses it if the machine itself has hidden a part of it (mount_too_revealing
        # in fs/namespace.c). It is then empty.
        kernel.mount("tmpfs", "/sys", "tmpfs", _PROC_FLAGS | kernel.MS_RDONLY, "size=4k,nr_inodes=2")
    for name in _MASKED_SYSTEM:
        if os.path.isdir(f"/sys/{name}"):  # noqa: PTH112
            kernel.mount("tmpfs", f"/sys/{name}", "tmpfs", _PROC_FLAGS | kernel.MS_RDONLY, "size=4k,nr_inodes=2")


def narrow_proc() -> None:
    """Make the files of /proc that belong to no process read-only, and hide those that tell about the machine.

    The kernel has one owner and mode for such a file in all mounts of /proc: a chmod in a sandbox is a chmod on the
    machine, and in each other sandbox. On a read-only mount it fails. The working directory is the root.
    """
    masked = {*_MASKED_FILES, *_MASKED_DIRECTORIES}
    for name in os.listdir("proc"):  # noqa: PTH208
        # What has a number is a process. The links lead to files of a process.
        if not (name.isdigit() or name in masked or os.path.islink(f"proc/{name}")):  # noqa: PTH114
            kernel.mount(f"proc/{name}", f"proc/{name}", "", kernel.MS_BIND | kernel.MS_REC)
            remount_read_only(f"proc/{name}", _PROC_FLAGS)
    for name in _MASKED_FILES:
        if os.path.exists(f"proc/{name}"):  # noqa: PTH110
            # Of a /dev that is read-only by now, which the new mount is then too.
            kernel.mount("dev/null", f"proc/{name}", "", kernel.MS_BIND)
    for name in _MASKED_DIRECTORIES:
        if os.path.isdir(f"proc/{name}"):  # noqa: PTH112
            kernel.mount("tmpfs", f"proc/{name}", "tmpfs", _PROC_FLAGS | kernel.MS_RDONLY, "size=4k,nr_inodes=2")


def remount_read_only(path: str, flags: int) -> None:
    """Make a bind mount read-only, with these flags too."""
    kernel.mount("", path, "", kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | flags)
