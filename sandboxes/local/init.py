"""Pid 1 of a local sandbox: it sets up namespaces, confines itself, and then runs requests one at a time."""

# Theory of operation.
#
# Order matters here. While it sets up, this process has rights that the agent must never have: it mounts layers, writes
# control group files, restores processes. Then it gives all of them up for good (`confine`), and only after that does
# the first of the agent's code run. What needs rights later, such as switching layers, the launcher does from outside.
#
# It dies with the launcher, and when the proxy closes its end of the socket. As it is pid 1 of its pid namespace, the
# kernel then kills everything in the sandbox.

import contextlib
import errno
import os
import random
import signal
import socket
from collections.abc import Iterable, Sequence

from sandboxes.guest import users
from sandboxes.guest.checkpoints.restore import Restored, Restoring
from sandboxes.guest.driver_link import DriverLink
from sandboxes.guest.files import delta, row_table
from sandboxes.guest.files.state_rows import StateRows
from sandboxes.guest.shells import Shells
from sandboxes.ipc.codec import pack_message
from sandboxes.ipc.fork_pages import write_pages
from sandboxes.ipc.messages import Failed
from sandboxes.ipc.state_messages import Ready, RestoreStarted, StartSandbox
from sandboxes.linux import confine, mounts, outlet
from sandboxes.linux import syscalls as kernel
from sandboxes.linux.sandbox_groups import GroupFiles
from sandboxes.linux.socket_queues import SocketQueues
from sandboxes.local.pid_one import PidOne, Switches, opened_root

NAMESPACES = kernel.CLONE_NEWNS | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS


def run(
    channel: int,
    switches: int,
    groups: Sequence[int],
    cgroups: Sequence[str],
    pages: Iterable[tuple[int, int]] = (),
    *,
    privileged: bool,
    shell_files: str,
    restores: bool,
) -> None:
    """Be a sandbox until the proxy closes its end; without `privileged`, as root of a user namespace."""
    # The first part needs no spec, and is done ahead, in spares. The launcher reports on the socket `switches`; control
    # groups are joined by their open files; pages are written to ahead, by address and bytes.

    # The kernel kills this process when the launcher dies, and with this pid 1 its whole pid namespace
    # (pid_namespaces(7)). So even kill -9 of the proxy leaves no process.
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # A session of its own: any process of a sandbox may set the niceness of pid 1's session (/proc/1/autogroup). The
    # launcher's is that of all sandboxes.
    os.setsid()
    kernel.set_process_name("init")
    # Joining a group takes up to 15 ms, while the kernel waits for readers (RCU): the reason for spare sandboxes.
    for group in groups:
        os.write(group, b"0")
        os.close(group)
    files = GroupFiles(os.path.dirname(path) for path in cgroups)  # noqa: PTH120
    # The pid namespace is not in this list: the launcher's fork was born in it.
    kernel.unshare(NAMESPACES)
    # After the groups were joined: they become the root of what the sandbox sees of control groups.
    kernel.unshare(kernel.CLONE_NEWCGROUP)
    kernel.bring_up_loopback()
    kernel.keep_no_ended_connections()
    os.umask(0o022)
    mounts.prepare(devices_from_host=not privileged, shell_files=shell_files)
    # The proxy's own output may be a file of the host, and a process with all rights in the sandbox could write to it.
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    os.close(null)
    link, reports = DriverLink(socket.socket(fileno=channel)), DriverLink(socket.socket(fileno=switches))
    write_pages(pages)
    link.send(Ready())
    _start(link, reports, files, restores=restores)


def _start(link: DriverLink, switches: DriverLink, groups: GroupFiles, *, restores: bool) -> None:
    order, tables, (table, *files) = link.wait()
    assert isinstance(order, StartSandbox), "nothing else is sent to a spare sandbox"
    mounted = switches.wait()
    if isinstance(mounted.message, Failed):
        raise OSError(mounted.message.error)
    overlay, upper_mount, lower, root = mounted.fds
    socket.sethostname(order.hostname)
    if order.cpus is not None:
        _run_on(order.cpus)
    # Before any process of the agent, also of a checkpoint, could take the port.
    listening = [outlet.listen()] if order.egress else []
    for folder in order.binds:
        # Bound here, before the root is switched: afterwards the host's directories have no path.
        mounts.bind_read_only(folder)
    for path in order.hidden:
        mounts.hide(path)
    mounts.switch(overlay, order.binds)
    mounts.mount_for_services(order.services.roots, order.services.shared)
    # The mount is attached by now. A descriptor of it would keep the layers of a state that the sandbox has left busy.
    os.close(overlay)
    restored: Restored | None = None
    if order.checkpoint is not None:
        if not restores:
            raise OSError(errno.EPERM, "no checkpoint is restored for a proxy that is not root")
        restoring = Restoring(order.checkpoint, order.criu_arguments, files)
        link.send(RestoreStarted())
        # The next message is `FinishRestore`: the proxy has seen CRIU succeed.
        link.wait()
        restored = restoring.finish()
    # The launcher switches layers by this descriptor, which this process opens for it: after `confine` it cannot mount.
    namespace = os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    # Before the filter of system calls, which may refuse this kind of socket one day.
    sockets = SocketQueues.open()
    # From here on this process has no right that the agent's processes lack.
    confine.limit_resources(order.disk_bytes, order.memory_bytes, order.pids)
    confine.confine()
    user, unknown = _user(order.user)
    environment = {**user.variables, **order.environment}
    shells = Shells(environment, order.workdir, order.sessions, order.pristine, user, order.tail_bytes)
    # A new session's first dump says what such a session looks like, so that one is waited for.
    begun = order.pristine is not None and restored is None and unknown is None
    if begun:
        # Now: bash needs several milliseconds, in which this process reads tables and reports.
        shells.begin("main")
    rows = StateRows(row_table.split(tables), row_table.mapped(table))
    roots = delta.DeltaRoots(opened_root(upper_mount), lower, root)
    pid_one = PidOne(link, Switches(switches, [upper_mount, lower]), roots, order, rows, sockets, groups, shells)
    if restored is not None:
        pid_one.adopt(restored)
    pid_one.serve([namespace, *listening], begun=begun, broken=unknown)


def _user(name: str) -> tuple[users.User, str | None]:
    """Return the user that an image names; root, and why, if no process can be started as it."""
    if not name:
        return users.ROOT, None
    try:
        user = users.read(name)
    except users.UnknownUserError as error:
        return users.ROOT, str(error)
    if users.has_several():
        return user, None
    # Without the groups that root has here, because they cannot be set there.
    return users.ROOT, f"unable to become user {name}: without root, a sandbox has one user only" if user.uid else None


def _run_on(count: int) -> None:
    """Let this process, and all that it will start, run on some CPUs only: programs ask how many there are."""
    # By chance, so that sandboxes spread over all. Which ones they are is no part of a state (`live_state.inherited`).
    all_cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, random.SystemRandom().sample(all_cpus, min(count, len(all_cpus))))


def report_failure(channel: int, error: BaseException) -> None:
    """Tell the proxy why this process ends; the proxy may be gone already."""
    with contextlib.suppress(OSError):
        os.write(channel, pack_message(Failed(f"{type(error).__name__}: {error}")))
