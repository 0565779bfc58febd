"""Runs CRIU inside a sandbox, without letting it load anything from there."""

# Theory of operation.
#
# CRIU must run in the sandbox's namespaces, because it opens files and creates processes there. But its program,
# libraries and plugins must not come from the sandbox, whose files the agent controls. Three steps achieve both:
#
# 1. The operator, a fork that is in the sandbox's namespaces already, changes its root to the host's.
# 2. It starts CRIU in a child that shares its root and working directory (`CLONE_FS`). CRIU's loader, libraries and
#    settings are found on the host. A first request and its answer show that loading is over.
# 3. Then the operator changes its root back to the sandbox's. Because the root is shared, CRIU's root changes with it.
#
# Afterwards the proxy talks to CRIU over a socket, which the operator hands to it. The operator only waits for CRIU's
# end. The proxy learns of it when the operator's socket closes.

import contextlib
import os
import signal
import socket
from typing import NoReturn

from sandboxes.ipc.codec import pack_message
from sandboxes.ipc.inherited import IMAGES_FD, INHERITED_FD, KERNEL_FD, SOCKET_FD
from sandboxes.ipc.launch_messages import CriuStarted
from sandboxes.ipc.messages import Failed
from sandboxes.linux import syscalls as kernel

_HELLO = bytes((0x08, 10, 0x20, 1))
"""A request for CRIU's version that keeps the connection, in protobuf: {type = 10, keep_open = 1}."""


def operate(host_root: int, program: list[str], reply: int, files: list[int], *, survey: bool = False) -> NoReturn:
    """Start CRIU in the namespaces of this process, or of its children to come; end when CRIU ends. Call in a fork.

    Args:
        host_root: A descriptor of the host's root directory.
        program: CRIU's path on the host, then its arguments.
        reply: A socket over which the proxy gets the socket to CRIU.
        files: The images' directory, the cache of kernel features, then what restored processes inherit.
        survey: Whether to tell the proxy of mapped files that CRIU cannot open by itself; for a dump.
    """
    code = 1
    # Open until this process ends: so the proxy learns that CRIU has ended.
    channel = socket.socket(fileno=reply)
    try:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        root = os.open("/", os.O_PATH | os.O_CLOEXEC)
        mapped = mapped_from_below(host_root) if survey else {}
        _change_root(host_root)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        pid = kernel.fork_sharing_root()
        if pid == 0:
            _execute(program, theirs.fileno(), files)
        theirs.close()
        ours.send(_HELLO)
        # The answer shows that CRIU has loaded everything. From here on it sees the sandbox's root.
        if not ours.recv(1 << 12):
            raise OSError("CRIU does not start")  # noqa: TRY301
        _change_root(root)
        socket.send_fds(channel, [pack_message(CriuStarted(mapped), fds=1)], [ours.fileno()])
        ours.close()
        os.waitpid(pid, 0)
        code = 0
    except OSError as error:
        channel.sendall(pack_message(Failed(str(error))))
    finally:
        os._exit(code)


def set_last_pid(host_root: int, last: int) -> None:
    """Make the next process of this process's pid namespace get the pid after last.

    The file is opened through the host's /proc, because the sandbox's is read-only.
    """
    fd = os.open("proc/sys/kernel/ns_last_pid", os.O_WRONLY | os.O_CLOEXEC, dir_fd=host_root)
    try:
        os.write(fd, str(last).encode())
    finally:
        os.close(fd)


def _change_root(root: int) -> None:
    os.fchdir(root)
    os.chroot(".")


def _execute(program: list[str], end: int, files: list[int]) -> None:
    try:
        # A session of its own: CRIU dumps and restores sessions, and must not be part of one of them.
        os.setsid()
        images, features, *inherited = files
        numbers = {SOCKET_FD: end, IMAGES_FD: images, KERNEL_FD: features}
        numbers |= {INHERITED_FD + index: fd for index, fd in enumerate(inherited)}
        null = os.open("/dev/null", os.O_RDWR)
        kernel.arrange_descriptors({0: null, 1: null, 2: null, **numbers})
        os.execve(program[0], program[1:], {"PATH": "/nowhere"})  # noqa: S606
    finally:
        os._exit(127)


def mapped_from_below(host_root: int) -> dict[str, str]:
    """Return CRIU's names of the files that processes have mapped from below the sandbox's root, and their paths.

    If the base is an overlay itself (the host's view), the kernel reports mappings as if they were made in that lower
    overlay. No mount namespace lists its mount, so CRIU cannot name the files (Linux 6.18: backing_file_mmap of stacked
    overlays). They become `external` files, which are opened again by path where they are restored. About 1 ms.
    """
    with open("/proc/1/mountinfo", "rb") as file:  # noqa: PTH123
        listed = {int(line.split()[0]) for line in file}
    mounts: dict[bytes, int] = {}
    mapped: dict[str, str] = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):  # noqa: PTH208
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            with open(f"/proc/{pid}/maps", "rb") as file:  # noqa: PTH123
                lines = [line.split(maxsplit=5) for line in file]
            for line in lines:
                if pid == "1" or len(line) < 6 or not _is_plain(line[5]):
                    continue
                device, inode = line[3], int(line[4])
                if device not in mounts:
                    # One file tells the mount of all files of its device: opening one is the costly part.
                    mounts[device] = _mount_of(f"/proc/{pid}/map_files/{line[0].decode()}", host_root)
                if mounts[device] not in listed:
                    path = line[5].rstrip(b"\n").decode(errors="surrogateescape")
                    mapped[f"file[{mounts[device]:x}:{inode:x}]"] = path
    return mapped


def _is_plain(path: bytes) -> bool:
    return path.startswith(b"/") and not path.startswith((b"/memfd:", b"/dev/", b"/SYSV")) and b"(deleted)" not in path


def _mount_of(path: str, host_root: int) -> int:
    """Return the number of the mount that a file was opened in.

    The host's /proc has it; the sandbox's knows this process under no number, because it is in another pid namespace.
    """
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        facts = os.open(f"proc/self/fdinfo/{fd}", os.O_RDONLY | os.O_CLOEXEC, dir_fd=host_root)
        with open(facts, "rb") as file:  # noqa: PTH123
            return next(int(line.split()[1]) for line in file if line.startswith(b"mnt_id:"))
    finally:
        os.close(fd)
