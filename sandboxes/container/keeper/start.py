"""Start of a container by the OCI runtime alone, as `sandboxes.container.oci_spec` has prepared it."""

import contextlib
import errno
import os
import signal
from pathlib import Path

from sandboxes.container.keeper.cgroup_processes import ContainerProcesses
from sandboxes.ipc.launch_messages import ContainerStart
from sandboxes.linux import cgroups
from sandboxes.linux import syscalls as kernel

_ERROR_CHARS = 600
"""What is shown of the runtime's log: its last line has the error."""

_DESCRIPTORS = 1 << 20
"""Above the highest descriptor."""

_RUNTIME = "runc"
"""The directory of the runtime's own files, in the container's directory."""

_ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}


def start(order: ContainerStart, name: str) -> ContainerProcesses:
    """Mount a container's overlay and start the container. 30 ms, 28 of them CPU time of the runtime.

    The overlay is in a mount namespace of this process, and so it goes with this process and the container. The
    container's pid 1 becomes a child of this process.

    Args:
        order: What the proxy has prepared.
        name: What the runtime calls the container.

    Returns:
        The container's processes.

    Raises:
        OSError: The kernel or the runtime refuses; then nothing runs.
    """
    folder = Path(order.folder)
    kernel.unshare(kernel.CLONE_NEWNS)
    os.chdir(order.storage)
    _mount(f"{folder}/root", order.options)
    os.chdir("/")
    # The runtime exits when the container runs. Its child would then belong to the machine's init.
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    log, pid_file = folder / "log", folder / "pid"
    arguments = [
        *order.command, "--root", f"{folder}/{_RUNTIME}", "--log", str(log), "run", "--detach",
        "--bundle", str(folder), "--pid-file", str(pid_file), name,
    ]  # fmt: skip
    runtime = os.fork()
    if runtime == 0:
        _execute(arguments, order.pattern)
    code = os.waitstatus_to_exitcode(os.waitpid(runtime, 0)[1])
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 0)
    if code:
        remove_groups(order)
        raise OSError(f"{order.command[0]} exits with {code}: {_tail(log)}")
    pid = int(pid_file.read_text())
    try:
        return ContainerProcesses(pid, name)
    except OSError:
        # It is a child of this process, so the pid is no other one's.
        os.kill(pid, signal.SIGKILL)
        remove_groups(order)
        raise


def remove_groups(order: ContainerStart) -> None:
    """Remove the control groups of a container whose pid 1 was killed. Docker removes those that it has made."""
    if order.group:
        cgroups.remove_emptied(cgroups.groups_at(order.group))


def _mount(root: str, options: str) -> None:
    """Mount the overlay. Its number (`stat -f`) is the one of the file system below, and not a random one."""
    try:
        kernel.mount("overlay", root, "overlay", 0, f"{options},uuid=null")
    except OSError as error:
        # Before Linux 6.6 there is no such option, and each overlay is so.
        if error.errno != errno.EINVAL:
            raise
        kernel.mount("overlay", root, "overlay", 0, options)


def _execute(arguments: list[str], pattern: int) -> None:
    """Become the runtime. The container inherits what a process does, so it is what Docker's container has."""
    try:
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            # Python ignores some signals, and the launcher ignores SIGCHLD. An ignored one would be so in each command.
            with contextlib.suppress(OSError):
                signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.umask(0o022)
        os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, pattern))
        os.sched_setaffinity(0, os.sched_getaffinity(pattern))
        null = os.open("/dev/null", os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        # All of this process's descriptors close at `exec` anyway. The container must not have a single one of them.
        os.closerange(3, _DESCRIPTORS)
        os.execve(arguments[0], arguments, _ENVIRONMENT)  # noqa: S606 - no shell
    finally:
        os._exit(127)


def _tail(log: Path) -> str:
    """Return the last line that the runtime has written to its log."""
    with contextlib.suppress(OSError):
        lines = log.read_text(errors="replace").splitlines()
        if lines:
            return lines[-1][-_ERROR_CHARS:]
    return "it has written no log"
