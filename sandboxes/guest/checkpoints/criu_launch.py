"""Runs CRIU inside a sandbox, without letting it load anything from there, and without a way to the host."""

# Theory of operation.
#
# CRIU must run in the sandbox's namespaces, because it opens files and creates processes there. But its program,
# libraries and plugins must not come from the sandbox, whose files the agent controls. Three steps achieve both:
#
# 1. The operator, a fork that is in the sandbox's mount namespace already, changes its root to a directory that holds
#    CRIU and its libraries only.
# 2. It starts CRIU in a child that shares its root and working directory (`CLONE_FS`). CRIU's loader, libraries and
#    settings are found there. A first request and its answer show that loading is over.
# 3. Then the operator changes its root back to the sandbox's. Because the root is shared, CRIU's root changes with it.
#
# Afterwards the proxy talks to CRIU over a socket, which the operator hands to it. CRIU looks up names that the agent
# has made, with all rights. Three things keep it inside:
#
# - No descriptor in the sandbox leads to a directory of the host. CRIU's directories are detached mounts
#   (`syscalls.clone_mount`) with nothing above them, and read-only but for the images of a dump.
# - Before a dump, and while the processes stand still, the operator looks at every name (`held_names`).
# - During a restore the kernel follows no link that the agent has made (`mounts.stop_following_links`), until CRIU has
#   looked up its last path. So even images and files that do not belong together lead nowhere.
#
# The operator ends when CRIU has ended, and after that sets record locks again (`mapped_locks`). The proxy learns of it
# when the operator's socket closes.

import os
import select
import signal
import socket
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from sandboxes.guest.checkpoints import mapped_locks
from sandboxes.guest.checkpoints.held_names import HeldNames
from sandboxes.guest.checkpoints.looking import NotDumpableError
from sandboxes.guest.checkpoints.lost_settings import put_back
from sandboxes.guest.checkpoints.watched import watched_directories
from sandboxes.guest.driver_link import DriverLink
from sandboxes.ipc.codec import Envelope, IpcMessage
from sandboxes.ipc.inherited import FEATURES, IMAGES_FD, INHERITED_FD, KERNEL_FD, LIBRARIES, PROGRAM, SOCKET_FD
from sandboxes.ipc.launch_messages import (
    CriuStarted,
    FindWatched,
    FollowLinks,
    InspectNames,
    NamesInspected,
    NamesRefused,
    WatchedFound,
)
from sandboxes.ipc.messages import Done, Failed
from sandboxes.linux import mounts
from sandboxes.linux import syscalls as kernel
from sandboxes.linux.descriptors import close_all

_HELLO = bytes((0x08, 10, 0x20, 1))
"""A request for CRIU's version that keeps the connection, in protobuf: {type = 10, keep_open = 1}."""


class CriuFiles(NamedTuple):
    """The descriptors that the proxy opens for one run of CRIU, in the order in which they cross."""

    reply: int  # A socket over which the operator talks to the proxy.
    program: int  # The directory of CRIU's program; see `ipc.inherited.PROGRAM`.
    images: int  # The directory of the images.
    log: int  # A file for CRIU's errors.


def operate(
    files: CriuFiles, arguments: list[str], inherited: Sequence[int] = (), *, restores: bool, segments_of: int = 0
) -> NoReturn:
    """Start CRIU in the namespaces of this process or of its children; end when CRIU ends. Call it in a fork."""
    # `segments_of` is the pid of a process that gets an IPC namespace with System V shared memory; 0 if none does.
    code, starting = 1, 0
    # Open until this process ends: so the proxy learns that CRIU has ended.
    link = DriverLink(socket.socket(fileno=files.reply))
    try:
        changed = mounts.stop_following_links() if restores else []
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        root, null = os.open("/", os.O_PATH | os.O_CLOEXEC), os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        _change_root(files.program)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        pid = starting = kernel.fork_sharing_root()
        if pid == 0:
            _execute(arguments, theirs, files, null, inherited)
        ended = os.pidfd_open(pid)
        theirs.close()
        # Only the child knows its number in the sandbox.
        tracer = int(ours.recv(1 << 12))
        ours.send(_HELLO)
        # The answer shows that CRIU has loaded everything. From here on it sees the sandbox's root.
        if not ours.recv(1 << 12):
            raise OSError("CRIU does not start")  # noqa: TRY301
        _change_root(root)
        close_all({*files[1:], *inherited, root, null})
        link.hand_over(CriuStarted(), [ours.detach()])
        starting = 0
        last = _serve(link, ended, tracer, changed, segments_of)
        os.waitpid(pid, 0)
        if last is not None and last.message.locks:
            mapped_locks.set_again(last.message.pids, last.message.locks, last.fds[0])
            link.send(Done())
        code = 0
    except (OSError, ValueError) as error:
        if starting:
            # Gone before the report: a freeze that follows would take it for a process of the agent's.
            os.kill(starting, signal.SIGKILL)
            os.waitpid(starting, 0)
        link.send(Failed(str(error)))
    finally:
        os._exit(code)


def _serve(
    link: DriverLink, ended: int, tracer: int, changed: list[str], segments_of: int
) -> Envelope[FollowLinks] | None:
    """Answer the proxy until CRIU (`tracer`) ends; return the order with which a restore ends."""
    poll = select.poll()
    poll.register(ended, select.POLLIN)
    poll.register(link, select.POLLIN)
    last: Envelope[FollowLinks] | None = None
    while ended not in (ready := [fd for fd, _ in poll.poll()]):
        if link.fileno() in ready and not link.receive():
            # The proxy is gone, and CRIU's socket is closed with it.
            poll.unregister(link)
        while (envelope := link.take()) is not None:
            match envelope.message:
                case FindWatched():
                    link.send(WatchedFound(watched_directories()))
                case InspectNames():
                    link.send(_inspect(tracer))
                case FollowLinks() as order:
                    last = Envelope(order, envelope.body, envelope.fds)
                    _follow_links(order, changed, segments_of)
                    link.send(Done())
    return last


def _follow_links(order: FollowLinks, changed: list[str], segments_of: int) -> None:
    # None of the agent's processes runs yet.
    if segments_of:
        mounts.enter_ipc(segments_of)
        mounts.show_message_queues()
    # First: a path of the agent's must not lead through a link.
    _put_times_back(order.times)
    put_back(order.noted)
    mounts.follow_links(changed)


def _inspect(tracer: int) -> IpcMessage:
    try:
        names = HeldNames(tracer)
        return NamesInspected(names.mapped, names.times, names.noted)
    # The kernel refuses to show a name that is too long, for example. What was not seen is not dumped.
    except (NotDumpableError, OSError) as error:
        return NamesRefused(str(error))


def _put_times_back(times: dict[str, list[int]]) -> None:
    for path, (accessed, changed) in times.items():
        name = os.fsencode(path)
        status = os.lstat(name)
        # What CRIU did not touch may be read-only.
        if [status.st_atime_ns, status.st_mtime_ns] != [accessed, changed]:
            os.utime(name, ns=(accessed, changed), follow_symlinks=False)


def _change_root(root: int) -> None:
    os.fchdir(root)
    os.chroot(".")


def _execute(
    arguments: list[str], end: socket.socket, files: CriuFiles, null: int, inherited: Sequence[int]
) -> NoReturn:
    try:
        # A session of its own: CRIU dumps and restores sessions, and must not be part of one of them.
        os.setsid()
        end.send(str(os.getpid()).encode())
        features = os.open(FEATURES, os.O_RDONLY | os.O_CLOEXEC)
        numbers = {SOCKET_FD: end.fileno(), IMAGES_FD: files.images, KERNEL_FD: features}
        numbers |= {INHERITED_FD + index: fd for index, fd in enumerate(inherited)}
        kernel.arrange_descriptors({0: null, 1: null, 2: files.log, **numbers})
        environment = {"PATH": "/nowhere", "LD_LIBRARY_PATH": f"/{LIBRARIES}"}
        os.execve(f"/{PROGRAM}", arguments, environment)  # noqa: S606
    finally:
        os._exit(127)
