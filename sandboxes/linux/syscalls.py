"""System calls that Python has no name for. The one door to the kernel. Refusals are OSErrors that name the call."""

import contextlib
import ctypes
import errno
import fcntl
import os
import platform
import signal
import socket
import struct
import sys
from collections.abc import Callable, Mapping

from sandboxes.linux.descriptors import Opened, close_all

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_REMOUNT = 32
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
MNT_DETACH = 2

CAP_DAC_OVERRIDE = 1
CAP_SYS_ADMIN = 21
CAP_SYS_RESOURCE = 24
CAP_SYS_TIME = 25
PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_KEEPCAPS = 8
PR_SET_NAME = 15
PR_SET_SECCOMP = 22
PR_CAPBSET_DROP = 24
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
PR_CAP_AMBIENT = 47
PR_CAP_AMBIENT_RAISE = 2
PR_CAP_AMBIENT_CLEAR_ALL = 4
SECCOMP_MODE_FILTER = 2

AT_FDCWD = -100
AT_EMPTY_PATH, AT_RECURSIVE = 0x1000, 0x8000
_PATH = os.O_PATH | os.O_DIRECTORY
OPEN_TREE_CLONE = 1
OPEN_TREE_CLOEXEC = 0o2000000
MOUNT_ATTR_RDONLY = 0x1
MOUNT_ATTR_NOSUID = 0x2
MOUNT_ATTR_NODEV = 0x4
MOUNT_ATTR_NOEXEC = 0x8
MOUNT_ATTR_NOSYMFOLLOW = 0x200000
SEALED = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOSYMFOLLOW
"""What a mount needs that is there to be read only."""
RESOLVE_NO_XDEV = 0x01
RESOLVE_NO_MAGICLINKS = 0x02
RESOLVE_NO_SYMLINKS = 0x04
RESOLVE_BENEATH = 0x08
RESOLVE_IN_ROOT = 0x10
MOVE_MOUNT_F_EMPTY_PATH = 0x04
MOVE_MOUNT_T_EMPTY_PATH = 0x40
FSOPEN_CLOEXEC = 1
FSMOUNT_CLOEXEC = 1
FSCONFIG_SET_FLAG = 0
FSCONFIG_SET_STRING = 1
FSCONFIG_CMD_CREATE = 6
_MOST_IN_OPTION = 255
"""Bytes of an option's value (fsconfig(2)): some 80 names of layers."""

OLDER_MOUNTS = "FORKPOINT_OLDER_MOUNTS"
"""The variable of the proxy's environment, and the argument of the launcher, that has overlays made as older kernels
need it. It is for tests: an older kernel is noticed without it."""

MACHINE = platform.machine()
# Calls that were added since Linux 5.1 have the same number on every machine; older ones differ.
_OLD = {
    "x86_64": {"pivot_root": 155, "capset": 126, "statx": 332, "sched_setattr": 314, "ptrace": 101},
    "aarch64": {"pivot_root": 41, "capset": 91, "statx": 291, "sched_setattr": 274},
}.get(MACHINE, {})
_NEW = {"open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432}
_NEW |= {"openat2": 437, "pidfd_getfd": 438, "mount_setattr": 442}
_NEW |= {"landlock_create_ruleset": 444, "landlock_add_rule": 445, "landlock_restrict_self": 446}
SYSCALLS = {**_OLD, **_NEW}

# struct statx (statx(2)): its size, the bit of the mount's number, and where that number is.
_STATX_BYTES, _STATX_MNT_ID, _STATX_MNT_ID_OFFSET = 256, 0x1000, 144

_STATFS_BYTES = 120
"""The size of a `struct statfs`, whose first member is the kind."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_libc_with_gil = ctypes.PyDLL(None, use_errno=True)
_libc_with_gil.syscall.restype = ctypes.c_long
_CLONE_FS = 0x00000200


def _check(returned: int, what: str) -> int:
    if returned < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return returned


def syscall(name: str, *arguments: object, about: str = "") -> int:
    """Call the kernel by the name of a call in `SYSCALLS`; `about` is for the error."""
    if name not in SYSCALLS:
        raise OSError(38, f"{name}: not known on {MACHINE}")
    return _check(int(_libc.syscall(ctypes.c_long(SYSCALLS[name]), *arguments)), f"{name} {about}".strip())


def unshare(flags: int) -> None:
    """Move this process into new namespaces."""
    _check(_libc.unshare(ctypes.c_int(flags)), f"unshare {flags:#x}")


def fork_sharing_root() -> int:
    """Fork so that parent and child share root and working directory: `chroot` in one moves both, also after exec."""
    number = {"x86_64": 56, "aarch64": 220}.get(MACHINE)
    if number is None:
        raise OSError(38, f"clone: not known on {MACHINE}")
    zero = ctypes.c_long(0)
    # PyDLL keeps the interpreter's lock: in the child no other thread exists that could give it up again.
    flags = ctypes.c_long(_CLONE_FS | signal.SIGCHLD)
    return _check(int(_libc_with_gil.syscall(ctypes.c_long(number), flags, zero, zero, zero, zero)), "clone")


def setns(fd: int, kind: int) -> None:
    """Move this process into the namespace of a descriptor."""
    _check(_libc.setns(ctypes.c_int(fd), ctypes.c_int(kind)), "setns")


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    """Mount a file system, or change or bind a mount, as the flags say."""
    _check(
        _libc.mount(
            source.encode(), os.fsencode(target), kind.encode() or None, ctypes.c_ulong(flags), options.encode() or None
        ),
        f"mount {kind or source} on {target}",
    )


def unmount(target: str) -> None:
    """Detach what is mounted at a path at once, even if it is busy."""
    _check(_libc.umount2(os.fsencode(target), ctypes.c_int(MNT_DETACH)), f"umount {target}")


def pivot_root(new: str, old: str) -> None:
    """Make `new` the root of this mount namespace, and mount the old root at `old`."""
    syscall("pivot_root", ctypes.c_char_p(os.fsencode(new)), ctypes.c_char_p(os.fsencode(old)))


def prctl(option: int, value: int = 0, third: object = 0) -> None:
    """Change an attribute of this process."""
    argument = ctypes.c_ulong(third) if isinstance(third, int) else third
    _check(
        _libc.prctl(ctypes.c_int(option), ctypes.c_ulong(value), argument, ctypes.c_ulong(0), ctypes.c_ulong(0)),
        f"prctl {option}",
    )


def permitted() -> int:
    """Return the capabilities that this thread may have in effect, as a mask of bits."""
    with open("/proc/thread-self/status") as status:  # noqa: PTH123
        return next(int(line.split()[1], 16) for line in status if line.startswith("CapPrm:"))


def holds(capability: int) -> bool:
    """Return whether this thread may have a capability in effect."""
    return bool(permitted() >> capability & 1)


def capset(effective: int, permitted: int | None = None, inheritable: int = 0) -> None:
    """Set this thread's capabilities; programs that it executes get inheritable ones only if they are ambient too."""
    header, permitted = struct.pack("=Ii", 0x20080522, 0), effective if permitted is None else permitted
    sets = [mask >> shift & 0xFFFFFFFF for shift in (0, 32) for mask in (effective, permitted, inheritable)]
    syscall("capset", ctypes.c_char_p(header), ctypes.c_char_p(struct.pack("=6I", *sets)))


def openat2(folder: int, path: bytes, how: ctypes.Array[ctypes.c_char]) -> int:
    """Open a path below a directory with limits to how it is resolved; `how` is a `struct open_how` (openat2(2))."""
    arguments = (ctypes.c_int(folder), ctypes.c_char_p(path), how, ctypes.c_size_t(len(how)))
    return syscall("openat2", *arguments, about=os.fsdecode(path))


def open_how(flags: int, resolve: int) -> ctypes.Array[ctypes.c_char]:
    """Return a `struct open_how` for `openat2`: flags, mode, resolve. The descriptor is closed at `exec`."""
    how = struct.pack("=QQQ", flags | os.O_CLOEXEC, 0, resolve)
    return ctypes.create_string_buffer(how, len(how))


def seccomp(program: bytes) -> None:
    """Install a BPF program as a filter, which every later exec and fork keeps. The process needs no_new_privs."""
    buffer = ctypes.create_string_buffer(program, len(program))

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]

    description = Program(len(program) // 8, ctypes.addressof(buffer))
    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(description))


def inotify() -> int:
    """Return a non-blocking descriptor for inotify's events."""
    return _check(_libc.inotify_init1(ctypes.c_int(os.O_CLOEXEC | os.O_NONBLOCK)), "inotify_init1")


def inotify_add(fd: int, path: str, mask: int) -> int:
    """Watch a path and return the number of the watch."""
    return _check(
        _libc.inotify_add_watch(ctypes.c_int(fd), os.fsencode(path), ctypes.c_uint32(mask)), f"inotify_add_watch {path}"
    )


def overlay(
    lowers: list[str], upper: str | None, work: str | None, *, index: bool = False, handles: bool = False
) -> int:
    """Return a descriptor of a detached overlay mount of layers, the topmost first; read-only without `upper`.

    `work` is empty, on the upper's file system. With an `index`, hard links of the layers stay links when one of their
    names is written (overlayfs.rst, "Index"); the kernel refuses it (EBUSY) while a layer is the upper of another
    mount. With `handles`, such an overlay may lie over this one in turn (overlayfs.rst, "NFS export").
    """
    options = {"index": "on"} if index or handles else {}
    if handles:
        options["nfs_export"] = "on"
    # `stat -f` shows the number of the file system below. By default each overlay has a random one (overlayfs.rst).
    if not _Layering.together:
        try:
            return _overlay(lowers, upper, work, options | {"uuid": "on" if handles else "null"}, _name_each)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
    made = _overlay(lowers, upper, work, options | {"uuid": "on" if handles else "off"}, _name_together)
    _Layering.together = True
    return made


class _Layering:
    """How this kernel's overlayfs takes its layers."""

    # Whether all by one option, as before Linux 6.5. `uuid=null` came with Linux 6.6. The first overlay finds out.
    together = False
    attributes = 0  # `MOUNT_ATTR_…` of every overlay.


def mount_as_older_kernels() -> None:
    """Make overlays in this process, and in its forks, as kernels before Linux 6.5 need it."""
    _Layering.together = True


def mount_without_devices() -> None:
    """Make overlays in this process, and in its forks, in which no device node can be opened."""
    _Layering.attributes = MOUNT_ATTR_NODEV


def _overlay(
    lowers: list[str], upper: str | None, work: str | None, options: Mapping[str, str],
    name_folders: Callable[[int, list[str], dict[str, str], list[int]], None],
) -> int:  # fmt: skip
    context = syscall("fsopen", ctypes.c_char_p(b"overlay"), ctypes.c_uint(FSOPEN_CLOEXEC), about="overlay")
    before = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    named: list[int] = []
    try:
        _fsconfig(context, FSCONFIG_SET_STRING, "source", "overlay")
        # Whiteouts and opaque marks in user.* attributes can be read without CAP_SYS_ADMIN, by root and everybody.
        _fsconfig(context, FSCONFIG_SET_FLAG, "userxattr", None)
        for option, value in options.items():
            _fsconfig(context, FSCONFIG_SET_STRING, option, value)
        above = {}
        if upper is not None and work is not None:
            # No sync waits for the disk: a layer that a loss of power damages is rebuilt by replay.
            _fsconfig(context, FSCONFIG_SET_FLAG, "volatile", None)
            above = {"upperdir": upper, "workdir": work}
        name_folders(context, lowers, above, named)
        _fsconfig(context, FSCONFIG_CMD_CREATE, None, None)
        attributes = ctypes.c_uint(_Layering.attributes)
        return syscall("fsmount", ctypes.c_int(context), ctypes.c_uint(FSMOUNT_CLOEXEC), attributes)
    finally:
        os.fchdir(before)
        close_all([context, before, *named])


# /proc/self/mountinfo shows the names of layers as they are given, and sandboxes can read it. So no name is a path.


def _name_each(context: int, lowers: list[str], above: dict[str, str], _opened: list[int]) -> None:
    """Name the directories of an overlay one by one, each from within by a dot."""
    for option, folder in [*(("lowerdir+", lower) for lower in lowers), *above.items()]:
        os.chdir(folder)
        _fsconfig(context, FSCONFIG_SET_STRING, option, ".")


def _name_together(context: int, lowers: list[str], above: dict[str, str], opened: list[int]) -> None:
    """Name the directories by descriptors, added to `opened`: they have to be open when the overlay is made."""
    for folder in (*lowers, *above.values()):
        opened.append(os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))  # noqa: PERF401 - each is closed
    numbers = list(map(str, opened))
    lowerdir = ":".join(numbers[: len(lowers)])
    if len(lowerdir) > _MOST_IN_OPTION:
        raise OSError(errno.E2BIG, f"overlay: Linux before 6.5 takes no {len(lowers)} layers")
    os.chdir("/proc/self/fd")
    _fsconfig(context, FSCONFIG_SET_STRING, "lowerdir", lowerdir)
    for option, number in zip(above, numbers[len(lowers) :], strict=True):
        _fsconfig(context, FSCONFIG_SET_STRING, option, number)


def _fsconfig(context: int, command: int, key: str | None, value: str | None) -> None:
    syscall(
        "fsconfig",
        ctypes.c_int(context),
        ctypes.c_uint(command),
        ctypes.c_char_p(key.encode() if key else None),
        ctypes.c_char_p(os.fsencode(value) if value else None),
        ctypes.c_int(0),
        about=f"overlay {key} {value}" if key else "create",
    )


def open_sysctl(name: str) -> int:
    """Return a descriptor of a setting of the kernel for writing, such as `kernel/ns_last_pid`."""
    # Containers have /proc/sys read-only. A new mount of /proc, which takes CAP_SYS_ADMIN, is not.
    try:
        return os.open(f"/proc/sys/{name}", os.O_WRONLY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno != errno.EROFS:
            raise
    context = syscall("fsopen", ctypes.c_char_p(b"proc"), ctypes.c_uint(FSOPEN_CLOEXEC), about="proc")
    with Opened(context):
        _fsconfig(context, FSCONFIG_CMD_CREATE, None, None)
        mounted = syscall("fsmount", ctypes.c_int(context), ctypes.c_uint(FSMOUNT_CLOEXEC), ctypes.c_uint(0))
    with Opened(mounted):
        return os.open(f"sys/{name}", os.O_WRONLY | os.O_CLOEXEC, dir_fd=mounted)


def clone_mount(path: str, attributes: int = 0) -> int:
    """Return a descriptor (O_PATH) of a detached, private mount that shows one directory and nothing above it.

    `..` of its root is its root, so a process that gets at the descriptor reaches this directory and no other one.
    Closing the last copy unmounts it, for which the kernel waits until no CPU looks at the mount: milliseconds on a
    busy machine.
    """
    flags = ctypes.c_uint(OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC)
    mounted = syscall("open_tree", ctypes.c_int(AT_FDCWD), ctypes.c_char_p(os.fsencode(path)), flags, about=path)
    try:
        # Private: what the host mounts below the directory later does not appear in the clone.
        _mount_setattr(mounted, "", attributes, 0, MS_PRIVATE)
    except OSError:
        os.close(mounted)
        raise
    return mounted


def set_mount_attributes(target: str, *, add: int = 0, remove: int = 0) -> None:
    """Change `MOUNT_ATTR_…` of the mount at a path."""
    _mount_setattr(AT_FDCWD, target, add, remove, 0)


def _mount_setattr(folder: int, path: str, add: int, remove: int, propagation: int) -> None:
    # struct mount_attr: attr_set, attr_clr, propagation, userns_fd (mount_setattr(2)).
    attributes = struct.pack("=QQQQ", add, remove, propagation, 0)
    syscall(
        "mount_setattr", ctypes.c_int(folder), ctypes.c_char_p(os.fsencode(path)), ctypes.c_uint(AT_EMPTY_PATH),
        ctypes.c_char_p(attributes), ctypes.c_size_t(len(attributes)), about=path,
    )  # fmt: skip


def open_without_links(path: bytes, flags: int) -> int:
    """Open an absolute path without following any symbolic link. The error ELOOP means that there is one."""
    return openat2(AT_FDCWD, path, open_how(flags, RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS))


def bind(source: str, target: str, *, whole: bool) -> None:
    """Bind a directory to another one, with all mounts below it if `whole`; a link in an absolute path is ELOOP."""
    # Otherwise neither path may lead into another mount (EXDEV).
    flags, resolve = (AT_RECURSIVE, 0) if whole else (0, RESOLVE_NO_XDEV)
    how = open_how(_PATH, RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS | resolve)
    empty, opened = ctypes.c_char_p(b""), [os.open("/", _PATH | os.O_CLOEXEC)]
    try:
        for path in (source, target):
            # Descriptors, not paths: what a path leads to may be changed before the mount.
            opened.append(openat2(opened[0], os.fsencode(path.lstrip("/")) or b".", how))
        clone = ctypes.c_uint(OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_EMPTY_PATH | flags)
        opened.append(syscall("open_tree", ctypes.c_int(opened[1]), empty, clone, about=source))
        attached = ctypes.c_uint(MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_EMPTY_PATH)
        syscall(
            "move_mount", ctypes.c_int(opened[3]), empty, ctypes.c_int(opened[2]), empty, attached,
            about=f"{source} to {target}",
        )  # fmt: skip
    finally:
        close_all(opened)


def take_descriptor(process: int, number: int) -> int:
    """Return a duplicate of a descriptor of another process, named by its process descriptor (pidfd_getfd(2))."""
    return syscall("pidfd_getfd", ctypes.c_int(process), ctypes.c_int(number), ctypes.c_uint(0))


def mount_id(path: str) -> int:
    """Return the number of the mount that a path leads into, as mountinfo lists it (statx(2), STATX_MNT_ID)."""
    answer = ctypes.create_string_buffer(_STATX_BYTES)
    name, mask = ctypes.c_char_p(os.fsencode(path)), ctypes.c_uint(_STATX_MNT_ID)
    syscall("statx", ctypes.c_int(AT_FDCWD), name, ctypes.c_int(0), mask, answer, about=path)
    return int.from_bytes(answer.raw[_STATX_MNT_ID_OFFSET : _STATX_MNT_ID_OFFSET + 8], sys.byteorder)


def attach(mounted: int, target: str) -> None:
    """Attach a detached mount at a path."""
    flags = ctypes.c_uint(MOVE_MOUNT_F_EMPTY_PATH)
    empty, path = ctypes.c_char_p(b""), ctypes.c_char_p(os.fsencode(target))
    syscall("move_mount", ctypes.c_int(mounted), empty, ctypes.c_int(AT_FDCWD), path, flags, about=target)


def move(source: str, target: str) -> None:
    """Move the mount at a path, and all mounts below it, to another path."""
    from_path, to_path = ctypes.c_char_p(os.fsencode(source)), ctypes.c_char_p(os.fsencode(target))
    here = ctypes.c_int(AT_FDCWD)
    syscall("move_mount", here, from_path, here, to_path, ctypes.c_uint(0), about=f"{source} to {target}")


def stat_in_root(root: int, path: bytes) -> os.stat_result:
    """Return the attributes of what a path leads to for a process whose root is the given directory (openat2(2))."""
    with Opened(openat2(root, path, open_how(os.O_PATH, RESOLVE_IN_ROOT))) as fd:
        return os.fstat(fd)


def sync_file_system(folder: str) -> None:
    """Wait until everything written to the file system of a directory is on its disk (syncfs(2))."""
    with Opened(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as fd:
        _check(_libc.syncfs(fd), f"syncfs {folder}")


def kind_of_file_system(file: int) -> int:
    """Return the number of the kind of file system that an open file is in (statfs(2), `f_type`)."""
    answer = ctypes.create_string_buffer(_STATFS_BYTES)
    _check(_libc.fstatfs(ctypes.c_int(file), answer), "fstatfs")
    return int.from_bytes(answer.raw[:8], sys.byteorder)


def set_process_name(name: str) -> None:
    """Replace the command line of this process, as `ps` shows it, by a name: the agent can read that of pid 1."""
    with open("/proc/self/stat", "rb") as file:  # noqa: PTH123 - pathlib is not loaded here
        fields = file.read().rpartition(b")")[2].split()
    # arg_start and arg_end (proc_pid_stat(5), fields 48 and 49).
    start, end = int(fields[45]), int(fields[46])
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, name.encode(), len(name))
    _check(_libc.prctl(ctypes.c_int(PR_SET_NAME), ctypes.c_char_p(name.encode())), "prctl name")


def keep_no_ended_connections() -> None:
    """Let TCP connections here end without TIME_WAIT (RFC 9293), which would be state that nothing shows."""
    with contextlib.suppress(OSError), Opened(open_sysctl("net/ipv4/tcp_max_tw_buckets")) as file:
        os.write(file, b"0")


def bring_up_loopback() -> None:
    """Bring up the loopback interface of this network namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # SIOCSIFFLAGS with IFF_UP and IFF_RUNNING (netdevice(7)).
        request = struct.pack("16sH14x", b"lo", 0x1 | 0x40)
        fcntl.ioctl(probe.fileno(), 0x8914, request)


def schedule(niceness: int, slice_ns: int) -> None:
    """Give this thread a niceness and a time slice (sched_setattr(2)). What it forks or starts is ordinary again."""
    # The slice is from 100,000 to 100,000,000 ns; Linux before 6.12 ignores it.

    # SCHED_OTHER, with SCHED_FLAG_RESET_ON_FORK; deadline, period and the limits of utilization do not apply.
    attributes = struct.pack("=IIQiIQQQII", 56, 0, 1, niceness, 0, slice_ns, 0, 0, 0, 0)
    syscall("sched_setattr", ctypes.c_int(0), ctypes.c_char_p(attributes), ctypes.c_uint(0))


def share_heap() -> None:
    """Let all threads of this process allocate from one heap (mallopt(3)). Call it before threads start."""
    # glibc gives threads heaps of their own, in which freed memory stays: 3 to 6 MB for each thread of the proxy.

    # M_ARENA_MAX; a libc without it has one heap.
    if hasattr(_libc, "mallopt"):
        _libc.mallopt(-8, 1)


def reset_signals() -> None:
    """Handle every signal as a new process does: ignored and blocked signals would stay so across an exec."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def arrange_descriptors(targets: Mapping[int, int]) -> None:
    """Give descriptors the numbers that a program expects after an exec, and close all others."""
    above = max(targets) + 1
    # Copies above all targets come first: a descriptor may have the number that another one shall have.
    copies = {target: fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above) for target, fd in targets.items()}
    for target, fd in copies.items():
        os.dup2(fd, target)
    kept = sorted(targets)
    for number, following in zip(kept, [*kept[1:], os.sysconf("SC_OPEN_MAX")], strict=True):
        os.closerange(number + 1, following)
