"""The launcher: the process that every local sandbox's pid 1 is forked from.

It does what needs rights that a sandbox must not have: it forks pid 1s into new pid namespaces, mounts layers, moves a
running sandbox to new layers, and starts CRIU in a sandbox's namespaces. It has one thread and few imports, so that a
fork is cheap and safe. It exits when the driver's end of its socket closes, and all pid 1s with it, by their
parent-death signal.

The launcher is root, for a driver that is not only as far as `rights.grounds` allows; otherwise it is root of a user
namespace of its own, with the same code. To work in another namespace, it enters that (setns) and returns by a
descriptor from its start. A process can return only to namespaces that its own user namespace owns, which is why an
unprivileged launcher is pid 1 of a pid namespace of its own.
"""

import contextlib
import errno
import gc
import os
import signal
import socket
import stat
import sys
import time

from sandboxes.guest.checkpoints.criu_launch import CriuFiles, operate
from sandboxes.ipc.codec import Envelope, IpcMessage, decode, pack_message, prepare
from sandboxes.ipc.fork_child import connect, freeze_heap, requests
from sandboxes.ipc.fork_pages import addresses, checked, own_pages, write_pages
from sandboxes.ipc.frames import MalformedFrameError
from sandboxes.ipc.launch_messages import (
    Forked,
    ForkSandbox,
    ForkServerReady,
    LayerStack,
    LinksTried,
    Mounted,
    MountLayers,
    RunCriu,
    SetLastPid,
    SwitchLayers,
    TryLinks,
    WritePages,
)
from sandboxes.ipc.messages import Done, Failed
from sandboxes.ipc.state_messages import LayersSwitched
from sandboxes.linux import confine, oom_score
from sandboxes.linux import mounts as rootfs
from sandboxes.linux import syscalls as kernel
from sandboxes.linux.descriptors import Opened, close_all
from sandboxes.linux.plain_paths import plain_descriptor
from sandboxes.linux.processes import LAST_PID, set_last_pid
from sandboxes.local import init
from sandboxes.rights.grounds import FOR, Grounds

_BUSY_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
"""How long to wait for the end of a mount. The kernel ends one some milliseconds after its last user."""


_NEVER = frozenset({errno.EOPNOTSUPP, errno.EINVAL, errno.EPERM, errno.ENOSYS})
"""Errors of a mount that the kernel refuses each time. Others come of a shortage, such as ENOSPC, ENOMEM and EMFILE."""


class Launcher:
    """Serves the driver's requests, one at a time."""

    def __init__(self, driver: socket.socket, *, privileged: bool, grounds: Grounds | None = None) -> None:
        """Remember the namespaces to come back to; `grounds` is what a driver that is not root may name, or None."""
        self.driver = driver
        self.grounds = grounds
        self.privileged = privileged
        if privileged:
            # Root's in each sandbox, as in containers. The proxy's own groups are no sandbox's.
            os.setgroups([0])
        # What this process writes to between two forks, and what pid 1s write to, by address and bytes.
        self._written, self._pages = list[tuple[int, int]](), list[tuple[int, int]]()
        # Descriptors, not paths: in another mount namespace /proc is another one.
        self.own_mounts = os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
        self.own_pids = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._last_pid = kernel.open_sysctl(LAST_PID)
        except OSError:
            self._last_pid = -1

    def serve(self) -> None:
        """Answer requests until the driver is gone."""
        for frame in requests(self.driver):
            self._answer(decode(frame))

    def _answer(self, envelope: Envelope[IpcMessage]) -> None:
        fds: list[int] = []
        try:
            if isinstance(envelope.message, MountLayers):
                self._mount(envelope.message, *envelope.fds)
                return
            if isinstance(envelope.message, SwitchLayers):
                self._switch(envelope.message, *envelope.fds)
                return
            answer, fds = self._perform(envelope)
        # One request has failed, such as a mount with a missing layer. The launcher goes on, because all sandboxes
        # depend on it.
        except (OSError, MalformedFrameError) as error:
            answer = Failed(str(error))
        frame = pack_message(answer, fds=len(fds))
        # The kernel passes the descriptors with the first byte (unix(7), SCM_RIGHTS), so the rest can follow without
        # them.
        # A driver that is gone reads no answer; the next read says so.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            sent = socket.send_fds(self.driver, [frame], fds)
            if sent < len(frame):
                self.driver.sendall(frame[sent:])
        # Sent descriptors are duplicates in the receiver. What stays open here would keep dead mounts alive.
        close_all([*fds, *envelope.fds])
        if isinstance(envelope.message, ForkSandbox):
            # A fork takes the pages of this process too, and the next sandbox waits for its mounts.
            write_pages(self._written)

    def _perform(self, envelope: Envelope[IpcMessage]) -> tuple[IpcMessage, list[int]]:
        match request := envelope.message:
            case ForkSandbox():
                return Forked(), [self._fork(request, *envelope.fds)]
            case WritePages():
                self._pages = addresses(checked(request.runs))
            case TryLinks():
                with self._stack(request.stack) as stack:
                    return _tried(stack), []
            case SetLastPid():
                return Forked(), self._set_last_pid(request.number, *envelope.fds)
            case RunCriu():
                self._run_criu(request, envelope.fds)
        return Done(), []

    def _stack(self, stack: LayerStack) -> contextlib.AbstractContextManager[LayerStack]:
        return contextlib.nullcontext(stack) if self.grounds is None else self.grounds.stack(stack)

    def _fork(self, request: ForkSandbox, channel: int, switches: int) -> int:
        groups: list[int] = []
        try:
            for path in request.cgroups:
                grounds = self.grounds
                groups.append(os.open(path, os.O_WRONLY | os.O_CLOEXEC) if grounds is None else grounds.group(path))
            return self._fork_into(groups, request, channel, switches)
        finally:
            close_all(groups)

    def _fork_into(self, groups: list[int], request: ForkSandbox, channel: int, switches: int) -> int:
        # unshare(CLONE_NEWPID) changes where children are born, not this process; setns undoes it for the next child.
        kernel.unshare(kernel.CLONE_NEWPID)
        try:
            pid = os.fork()
            if pid == 0:
                self._become_init(groups, request, channel, switches)
        finally:
            # In the parent only: the child never returns from `_become_init`.
            _come_back(self.own_pids, kernel.CLONE_NEWPID)
        if self.grounds is not None:
            self.grounds.add(pid)
        # The kernel reaps children here (SIGCHLD is ignored), so the pid may be free already; then this raises and the
        # driver gets the error.
        return os.pidfd_open(pid)

    def _become_init(self, groups: list[int], request: ForkSandbox, channel: int, switches: int) -> None:
        code = 1
        try:
            # Nothing of the launcher's may be reachable from a sandbox.
            self.driver.close()
            os.close(self.own_mounts)
            os.close(self.own_pids)
            close_all([self._last_pid] if self._last_pid >= 0 else [])
            if self.grounds is not None:
                self.grounds.close()
            init.run(
                channel, switches, groups, request.cgroups, self._pages,
                privileged=self.privileged, shell_files=request.shell_files, restores=self.grounds is None,
            )  # fmt: skip
            code = 0
        except SystemExit:
            code = 0
        except BaseException as error:  # noqa: BLE001 - the last frame of a process: tell the driver, then end
            init.report_failure(channel, error)
        finally:
            os._exit(code)

    def _mount(self, request: MountLayers, pid_1: int) -> None:
        try:
            with self._stack(request.stack) as stack:
                mounts = _mount(stack)
        except OSError as error:
            _report(pid_1, Failed(str(error)), [])
            return
        _report(pid_1, Mounted(), mounts)
        close_all(mounts)
        if not self._written:
            self._written = addresses(own_pages())

    def _switch(self, request: SwitchLayers, namespace: int, pid_1: int, table: int) -> None:
        report: IpcMessage = LayersSwitched(request.added_bytes, request.stack.links)
        mounts: list[int] = []
        try:
            if self.grounds is not None:
                self.grounds.require_mounts(namespace)
            with self._stack(request.stack) as stack:
                overlay = self._move(request, stack, namespace, mounts)
        except OSError as error:
            report, overlay = Failed(str(error)), None
        _report(pid_1, report, [] if overlay is None else [*mounts, table])
        # Pid 1 has these mounts now. Closing the last descriptor of one would wait for the kernel's readers (RCU).
        close_all([*mounts, namespace, table])
        if overlay is not None:
            os.close(overlay)

    def _move(self, request: SwitchLayers, stack: LayerStack, namespace: int, mounts: list[int]) -> int:
        """Move a sandbox to new layers; return its overlay, and add mounts of the upper and of what is below it."""
        overlay = _writable(stack)
        upper = os.open(stack.upper, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            mounts.append(kernel.clone_mount(stack.upper, kernel.SEALED))
            if not request.same_below:
                mounts.append(_overlay(stack.lowers, None, None))
            # setns into a mount namespace needs a process that shares its root and directory with no other (setns(2));
            # this one has a single thread.
            kernel.setns(namespace, kernel.CLONE_NEWNS)
            try:
                if request.same_below:
                    # The old root shows what is below the new upper. It stays mounted for pid 1 alone, read-only.
                    mounts.append(kernel.clone_mount("/", kernel.SEALED))
                _copy_top(mounts[1], upper)
                rootfs.switch(overlay, request.binds)
                rootfs.mount_for_services(request.services.roots, request.services.shared)
            finally:
                _come_back(self.own_mounts, kernel.CLONE_NEWNS)
                # setns has moved the working directory to the root of the namespace that was entered. It must not hold
                # a file of the sandbox.
                os.chdir("/")
        except BaseException:
            os.close(overlay)
            raise
        finally:
            os.close(upper)
        return overlay

    def _set_last_pid(self, number: int, sandbox: int) -> list[int]:
        """Write `ns_last_pid` in a child, and return its process descriptor, if it has not ended."""
        # The kernel goes by the pid namespace of the writer (pid_namespaces(7)). Nothing waits for the child here: a
        # process of the sandbox may stop it. Where the kernel lets nobody write, replays get the pids that come.
        with contextlib.suppress(OSError):
            if self.grounds is not None:
                self.grounds.require_sandbox(sandbox)
            # Not only in the child: it is seen in the sandbox from its first moment, and has all rights.
            kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
            kernel.setns(sandbox, kernel.CLONE_NEWPID)
            try:
                pid = os.fork()
                if pid == 0:
                    with contextlib.suppress(OSError):
                        set_last_pid(self._last_pid, number)
                    os._exit(0)
            finally:
                _come_back(self.own_pids, kernel.CLONE_NEWPID)
                kernel.prctl(kernel.PR_SET_DUMPABLE, 1)
            return [os.pidfd_open(pid)]
        return []

    def _run_criu(self, request: RunCriu, fds: list[int]) -> None:
        """Start CRIU inside a sandbox, named by its pid 1, in a child that replies to the driver itself."""
        if self.grounds is not None:
            # Whoever drives CRIU, or makes its images, makes processes with any right.
            raise OSError(errno.EPERM, "the launcher runs no CRIU for a proxy that is not root")
        sandbox, *files = fds
        try:
            pid = os.fork()
        except OSError as error:
            # As a child reports it: a freeze fails then, and the sandbox goes on.
            init.report_failure(files[0], error)
            return
        if pid:
            return
        try:
            self.driver.close()
            # All namespaces by one descriptor of the process (setns(2), since Linux 5.8). Only a child of this fork,
            # CRIU, is born in the pid namespace.
            entered = init.NAMESPACES | kernel.CLONE_NEWPID | kernel.CLONE_NEWCGROUP
            kernel.setns(sandbox, entered)
            if request.dumps_segments:
                # An empty one, so that CRIU is neither in the sandbox's nor in the machine's.
                kernel.unshare(kernel.CLONE_NEWIPC)
            os.chdir("/")
            operate(CriuFiles(*files), request.criu_arguments, restores=False)
        except OSError as error:
            init.report_failure(files[0], error)
        finally:
            os._exit(1)


def _come_back(namespace: int, kind: int) -> None:
    """Return to a namespace of this process's own. It ends if it cannot: it would act on a sandbox's paths or pids."""
    try:
        kernel.setns(namespace, kind)
    except OSError:
        # The driver starts another launcher for the next sandbox.
        os._exit(1)


def _report(pid_1: int, report: IpcMessage, fds: list[int]) -> None:
    """Report to a pid 1 by its socket, which is closed here; the other descriptors stay open."""
    # Never waits: one report at a time fits, and a pid 1 that reads none gives the proxy no answer either.
    with socket.socket(fileno=pid_1) as end, contextlib.suppress(OSError):
        try:
            socket.send_fds(end, [pack_message(report, fds=len(fds))], fds, socket.MSG_DONTWAIT)
        except OSError as error:
            # Descriptors may be refused (unix(7), ETOOMANYREFS). Pid 1 would wait for this report for ever.
            end.send(pack_message(Failed(str(error))), socket.MSG_DONTWAIT)


def _mount(stack: LayerStack) -> list[int]:
    """Mount a stack of layers; return mounts of the whole, of its upper, of what is below, and of any root state."""
    # Pid 1 holds them in the sandbox, so none of them leads further up on the host.
    fds = [_writable(stack)]
    upper = os.open(stack.upper, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fds.append(kernel.clone_mount(stack.upper, kernel.SEALED))
        fds.append(_overlay(stack.lowers, None, None))
        _copy_top(fds[2], upper)
        if stack.root is not None:
            # A sandbox at its root state needs no second mount of the same layers.
            same = stack.root == stack.lowers
            fds.append(os.dup(fds[2]) if same else _overlay(stack.root, None, None))
    except OSError:
        close_all(fds)
        raise
    finally:
        os.close(upper)
    return fds


def _writable(stack: LayerStack) -> int:
    if not stack.links:
        return _overlay(stack.lowers, stack.upper, stack.work)
    for pause_s in _BUSY_S:
        try:
            overlay = _overlay(stack.lowers, stack.upper, stack.work, index=True)
            break
        except OSError as error:
            # A mount whose upper is one of the layers by now is about to end.
            if error.errno != errno.EBUSY:
                raise
            time.sleep(pause_s)
            # The mark of a volatile mount, over which none is made.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{stack.work}/work/incompat/volatile/dirty")  # noqa: PTH108
                os.rmdir(f"{stack.work}/work/incompat/volatile")  # noqa: PTH106
    else:
        raise OSError(errno.EBUSY, "a layer is still another mount's upper directory")
    # Without file handles in a file system below, the kernel goes on without an index, and says so in its log only.
    if not os.path.isdir(f"{stack.work}/index"):  # noqa: PTH112
        os.close(overlay)
        raise OSError(errno.EOPNOTSUPP, "hard links would break: the kernel keeps no index of these layers")
    return overlay


def _tried(stack: LayerStack) -> LinksTried:
    """Try to mount a stack. Errors that the kernel gives for what it cannot do are final; a shortage is over later."""
    try:
        os.close(_writable(stack))
    except OSError as error:
        return LinksTried(str(error), error.errno in _NEVER)
    return LinksTried("", final=True)


def _overlay(lowers: list[str], upper: str | None, work: str | None, *, index: bool = False) -> int:
    """Return a descriptor of an overlay whose base is opened without following links; see `syscalls.overlay`."""
    # A base may be a directory in which another user can put a link after its path was checked. All other directories
    # are the driver's own.

    # The base is the last but one, above the skeleton or the host's root (`Base.lowers`).
    with Opened(plain_descriptor(lowers[-2])) as base:
        return kernel.overlay([*lowers[:-2], f"/proc/self/fd/{base}", lowers[-1]], upper, work, index=index)


def _copy_top(mount: int, upper: int) -> None:
    # A mount's descriptor names it only (open(2), O_PATH), and attributes are read through an open one.
    with Opened(os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=mount)) as below:
        _copy_facts_of(below, upper)


def _copy_facts_of(lower: int, upper: int) -> None:
    status = os.fstat(lower)
    # Without rights over the machine, the owner may be a user that the namespace does not have.
    with contextlib.suppress(OSError):
        os.chown(upper, status.st_uid, status.st_gid)
    os.chmod(upper, stat.S_IMODE(status.st_mode))
    for name in os.listxattr(lower):
        # Names of overlayfs' own are stored escaped (overlayfs.rst, "Nesting overlayfs mounts").
        stored = name.replace(_MARKS, f"{_MARKS}overlay.", 1) if name.startswith(_MARKS) else name
        # Attributes of the machine's security module can be neither read nor set everywhere.
        with contextlib.suppress(OSError):
            os.setxattr(upper, stored, os.getxattr(lower, name))
    os.utime(upper, ns=(status.st_atime_ns, status.st_mtime_ns))


_MARKS = "user.overlay."


def _become_root_of_a_namespace() -> None:
    """Continue as root of a new user namespace, in a child that is pid 1 of a pid namespace that it owns."""
    # The child can return from each sandbox's pid namespace only to a pid namespace that its own user namespace owns.
    uid, gid = os.geteuid(), os.getegid()
    kernel.unshare(kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS | kernel.CLONE_NEWPID)
    # Without "deny" the kernel refuses a gid_map of an unprivileged process (user_namespaces(7)).
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:  # noqa: PTH123 - pathlib is not loaded here
            file.write(text)
    pid = os.fork()
    if pid:
        # The parent only waits: it is the process whose exit the driver sees. It must not hold the driver's socket.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # With a copy of the socket here, the driver would not see the child's end.
        os.closerange(3, 1 << 16)
        os.waitpid(pid, 0)
        os._exit(0)
    # The child must not outlive the waiting parent, whose exit the driver takes for the launcher's.
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)


def _show_host(mount_point: str) -> None:
    """Mount a view of the host's root at `mount_point`/root, in this process's mount namespace only."""
    # The view is an overlay of its own because overlayfs refuses a layer that lies inside another layer: our layers lie
    # in the host's root, but not in this view of it. In a container, whose root is an overlay already, the kernel
    # stacks no more than two.
    kernel.mount("tmpfs", mount_point, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=755,size=64k,nr_inodes=32")
    for name in ("empty", "root", "upper", "work"):
        os.mkdir(f"{mount_point}/{name}")  # noqa: PTH102
    mounted = kernel.clone_mount("/") if _root_is_overlay() else _view_of_root(mount_point)
    kernel.attach(mounted, f"{mount_point}/root")
    os.close(mounted)


def _view_of_root(folder: str) -> int:
    # An overlay without an upper needs two lower layers (overlayfs.rst), so an empty one comes below.
    lowers = ["/", f"{folder}/empty"]
    # Nothing writes to the upper. It gives the view an identity of its own, without which the kernel makes no file
    # handles of what lies below, and so keeps no hard links over it. Before Linux 6.6 it does neither.
    with contextlib.suppress(OSError):
        return kernel.overlay(lowers, f"{folder}/upper", f"{folder}/work", handles=True)
    return kernel.overlay(lowers, None, None)


def _root_is_overlay() -> bool:
    with open("/proc/self/mountinfo") as mounts:  # noqa: PTH123 - pathlib is not loaded here
        return any(" / / " in line and " - overlay " in line for line in mounts)


def main() -> None:
    """Run the launcher."""
    # Arguments: the socket's descriptor, the directory for the host's view, and options: `OLDER_MOUNTS`, or `FOR` and
    # the user and the directory of a proxy that is not root.
    driver = connect()
    grounds: Grounds | None = None
    # Before the first fork, and with the right to it: no process of a sandbox can get a lower score then.
    oom_score.write(oom_score.SANDBOX)
    # The kernel reaps children; the driver watches them by their process descriptors.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    privileged = os.geteuid() == 0
    try:
        if kernel.OLDER_MOUNTS in sys.argv:
            kernel.mount_as_older_kernels()
        if privileged:
            kernel.unshare(kernel.CLONE_NEWNS)
        else:
            _become_root_of_a_namespace()
        # Otherwise mounts made here would appear on the host, because mounts are shared by default there
        # (mount_namespaces(7)).
        kernel.mount("", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
        if privileged:
            _show_host(sys.argv[2])
        if FOR in sys.argv:
            uid, folder = sys.argv[sys.argv.index(FOR) + 1 :]
            kernel.mount_without_devices()
            # After the namespace was made, which it compares others with.
            grounds = Grounds(int(uid), folder)
            os.close(grounds.folder(sys.argv[2]))
        prepare()
        # Made once here, so that no fork has to make it.
        confine.program(kernel.MACHINE)
        freeze_heap()
        gc.disable()
        driver.sendall(pack_message(ForkServerReady()))
    except OSError as error:
        driver.sendall(pack_message(Failed(str(error))))
        return
    Launcher(driver, privileged=privileged, grounds=grounds).serve()


if __name__ == "__main__":
    main()
