"""Runs CRIU inside a sandbox, without letting it load anything from there.

The program is started with the host's root, so that its loader, libraries and settings are the host's; then, before it
does anything, its root is changed to the sandbox's from outside: it shares its file system view (CLONE_FS) with us.
"""

import contextlib
import os
import signal
import socket
from typing import NoReturn

from sandboxes.ipc.frames import pack
from sandboxes.ipc.inherited import IMAGES_FD, INHERITED_FD, KERNEL_FD, SOCKET_FD
from sandboxes.linux import syscalls as kernel

_HELLO = bytes((0x08, 10, 0x20, 1))
"""A request for its version that keeps the connection: {type = 10, keep_open = 1}."""


def operate(host_root: int, program: list[str], reply: int, files: list[int], *, survey: bool = False) -> NoReturn:
    """Start CRIU in the namespaces that this process is in, or that its children will be; end when it ends.

    program: its path on the host, then its arguments. reply: a socket over which the driver gets CRIU's; with survey,
    what `mapped_from_below` found comes with it. files: the images' directory, the cache of kernel features, then what
    is inherited. To be called in a fork.
    """
    code = 1
    # Open until this process ends, for that is how the driver learns that CRIU has.
    channel = socket.socket(fileno=reply)
    try:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        root = os.open("/", os.O_PATH | os.O_CLOEXEC)
        told = {"mapped": mapped_from_below(host_root)} if survey else {}
        _stand_at(host_root)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        pid = kernel.fork_sharing_root()
        if pid == 0:
            _execute(program, theirs.fileno(), files)
        theirs.close()
        ours.send(_HELLO)
        if not ours.recv(1 << 12):
            raise OSError("CRIU does not start")  # noqa: TRY301
        _stand_at(root)
        socket.send_fds(channel, [pack(told, fds=1)], [ours.fileno()])
        ours.close()
        os.waitpid(pid, 0)
        code = 0
    except OSError as error:
        channel.sendall(pack({"error": str(error)}))
    finally:
        os._exit(code)


def set_last_pid(host_root: int, last: int) -> None:
    """Have the pids of this process's namespace be given from after last on.

    By way of the host's /proc, for the sandbox's is read-only.
    """
    fd = os.open("proc/sys/kernel/ns_last_pid", os.O_WRONLY | os.O_CLOEXEC, dir_fd=host_root)
    try:
        os.write(fd, str(last).encode())
    finally:
        os.close(fd)


def _stand_at(root: int) -> None:
    os.fchdir(root)
    os.chroot(".")


def _execute(program: list[str], end: int, files: list[int]) -> None:
    try:
        os.setsid()
        images, features, *inherited = files
        places = {SOCKET_FD: end, IMAGES_FD: images, KERNEL_FD: features}
        places |= {INHERITED_FD + at: fd for at, fd in enumerate(inherited)}
        null = os.open("/dev/null", os.O_RDWR)
        kernel.arrange_descriptors({0: null, 1: null, 2: null, **places})
        os.execve(program[0], program[1:], {"PATH": "/nowhere"})  # noqa: S606
    finally:
        os._exit(127)


def mapped_from_below(host_root: int) -> dict[str, str]:
    """Return CRIU's names of the files that the sandbox's processes have mapped from below its root file system.

    Where the base is an overlay itself (the host's view), the kernel shows mappings as if made in that lower overlay,
    whose mount no namespace lists, so CRIU cannot name them (Linux 6.18: backing_file_mmap of stacked overlays). They
    become `external` files: name -> path, to be opened again by path where they are restored. About 1 ms.
    """
    with open("/proc/1/mountinfo", "rb") as file:  # noqa: PTH123
        listed = {int(line.split()[0]) for line in file}
    mounts: dict[bytes, int] = {}
    found: dict[str, str] = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):  # noqa: PTH208
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            with open(f"/proc/{pid}/maps", "rb") as file:  # noqa: PTH123
                lines = [line.split(maxsplit=5) for line in file]
            for line in lines:
                if pid == "1" or len(line) < 6 or not _is_plain(line[5]):
                    continue
                device, inode = line[3], int(line[4])
                if device not in mounts:
                    mounts[device] = _mount_of(f"/proc/{pid}/map_files/{line[0].decode()}", host_root)
                if mounts[device] not in listed:
                    path = line[5].rstrip(b"\n").decode(errors="surrogateescape")
                    found[f"file[{mounts[device]:x}:{inode:x}]"] = path
    return found


def _is_plain(path: bytes) -> bool:
    return path.startswith(b"/") and not path.startswith((b"/memfd:", b"/dev/", b"/SYSV")) and b"(deleted)" not in path


def _mount_of(path: str, host_root: int) -> int:
    """Return the number of the mount that a file was opened in. The host's /proc: we are not in the sandbox's."""
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        facts = os.open(f"proc/self/fdinfo/{fd}", os.O_RDONLY | os.O_CLOEXEC, dir_fd=host_root)
        with open(facts, "rb") as file:  # noqa: PTH123
            return next(int(line.split()[1]) for line in file if line.startswith(b"mnt_id:"))
    finally:
        os.close(fd)
