"""A session's shell in a container, seen from the keeper: bash, or the image's /bin/sh.

The shell's descriptors are FIFOs and files in a directory of the box, which the keeper holds open at the other end. The
anchor starts the shell there. Its resource limits are read and set from outside, because a POSIX shell cannot print
them all.
"""

import contextlib
import os
import re
import resource
import stat
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from sandboxes.container.boot_scripts import SHELL_TEXTS
from sandboxes.container.keeper import cgroup_processes
from sandboxes.container.keeper import posix_session as posix
from sandboxes.container.keeper.file_kit import ENDS, FileKit
from sandboxes.guest.bash import restore as bash_restore
from sandboxes.guest.bash import session as sessions
from sandboxes.guest.process_io import death_of
from sandboxes.guest.shell import Shell, is_in_proc_of
from sandboxes.linux import processes
from sandboxes.linux import syscalls as kernel
from sandboxes.linux.confine import become_user
from sandboxes.shell_text import Jobs, ShellSession, quote

_LIMITS = {
    "Max cpu time": resource.RLIMIT_CPU,
    "Max file size": resource.RLIMIT_FSIZE,
    "Max data size": resource.RLIMIT_DATA,
    "Max stack size": resource.RLIMIT_STACK,
    "Max core file size": resource.RLIMIT_CORE,
    "Max resident set": resource.RLIMIT_RSS,
    "Max processes": resource.RLIMIT_NPROC,
    "Max open files": resource.RLIMIT_NOFILE,
    "Max locked memory": resource.RLIMIT_MEMLOCK,
    "Max address space": resource.RLIMIT_AS,
    "Max pending signals": resource.RLIMIT_SIGPENDING,
    "Max msgqueue size": resource.RLIMIT_MSGQUEUE,
}
"""Lines of /proc/PID/limits (proc(5)), with the limits that they show."""

# Columns are separated by two or more spaces, and names contain single ones, so the name is matched lazily.
_LIMIT = re.compile(r"(Max [a-z ]+?) +(\d+|unlimited) +(\d+|unlimited)")

Inode = tuple[int, int]
"""A device and an inode; for a character device -1 and its number."""


class ContainerShell(Shell):
    """A shell in a container, whose pipes are FIFOs and whose texts are files in a directory of the box.

    Attributes:
        kit: What it has open; None once the next shell has it.
        bash: Whether it is bash; otherwise it is the image's /bin/sh.
        inner: Its process, as the container numbers it; `pid` is its number on this machine.
        limits: The resource limits that it was born with.
    """

    def __init__(self, name: str, session: ShellSession | None, kit: FileKit, *, bash: bool) -> None:
        """Take over what the shell will open; the anchor has not started it yet.

        Args:
            name: The name of its session.
            session: The session that it is started from; None for a new one.
            kit: What it will open. `close` removes it.
            bash: Whether it is bash.
        """
        # Until it is known as a process it counts as one that has ended.
        super().__init__(name, session, 0, death_of(0), {number: kit.fds[file] for number, file in ENDS.items()})
        self.kit: FileKit | None = kit
        self.bash, self.inner = bash, 0
        self.limits: dict[str, tuple[int, int]] = {}

    @classmethod
    def prepare_again(cls, remembered: Mapping[str, Any], box: Path, *, bash: bool) -> "ContainerShell":
        """Prepare a shell that will be restored: what it had open has to be there again under the same names."""
        texts = {name: text.encode("latin-1") for name, text in remembered["texts"].items()}
        return cls(remembered["name"], remembered["session"], FileKit(box / remembered["folder"], texts), bash=bash)

    def remember(self) -> dict[str, Any]:
        """Return what a checkpoint has to keep of an idle shell, with its files; a disk format."""
        # CRIU restores a descriptor of a file by its path, size and offset, so the files must come back with the same
        # bytes.
        assert self.kit is not None
        folder = self.kit.folder
        texts = {name: (folder / name).read_text("latin-1") for name in SHELL_TEXTS}
        facts = {name: getattr(self, name) for name in ("name", "session", "inner", "baseline", "jobs", "runs")}
        facts |= {"knowledge": self.knowledge.hex(), "born": self.born}
        return {**facts, "limits": self.limits, "folder": folder.name, "texts": texts}

    def came_back(self, stored: Mapping[str, Any], pid: int) -> None:
        """Set the process as which CRIU restored the shell."""
        self._is_process(pid, stored["inner"])
        self.baseline, self.jobs, self.runs = stored["baseline"], tuple(stored["jobs"]), stored["runs"]
        self.knowledge, self.born = bytes.fromhex(stored.get("knowledge", "")), stored.get("born", [])
        self.limits = {name: (soft, hard) for name, (soft, hard) in stored["limits"].items()}

    def started(self, pid: int, inner: int, limits: dict[str, tuple[int, int]]) -> None:
        """Set the shell's process and its inherited limits."""
        self._is_process(pid, inner)
        # The anchor's limits: a dump stores only what differs from them.
        self.limits = limits

    def restore_limits(self) -> None:
        """Give the shell its session's resource limits."""
        if self.session is not None and self.session["limits"]:
            changed = {_LIMITS[name]: (soft, hard) for name, (soft, hard) in self.session["limits"].items()}
            with contextlib.suppress(OSError):
                _set_limits(self.pid, changed)

    def _is_process(self, pid: int, inner: int) -> None:
        self.pid, self.inner = pid, inner
        if pid:
            os.close(self.death)
            self.death = death_of(pid)

    def _orders(self, command: bytes) -> tuple[bytes, bytes]:
        orders = bash_restore.orders if self.bash else posix.orders
        return orders(self.session, command)

    def _parse_dump(self, dump: bytes) -> tuple[int, ShellSession, Jobs]:
        status, session, jobs = (sessions if self.bash else posix).parse_dump(dump)
        if not self.bash and not self.stands_at(session["cwd"]):
            # Bash reports this itself.
            session[sessions.KEPT] = sessions.MOVED
        # The shell waits for its next command here, so its limits are those that the command has left.
        now = read_limits(self.pid)
        session["limits"] = {name: list(value) for name, value in now.items() if value != self.limits.get(name)}
        return status, session, jobs

    def stands_at(self, folder: str) -> bool:
        """Return whether a name leads to the directory that the idle shell is in, and will for the next shell."""
        if is_in_proc_of(self.inner, folder):
            return False
        try:
            here, root = os.stat(f"/proc/{self.pid}/cwd"), os.open(f"/proc/{self.pid}/root", os.O_PATH)  # noqa: PTH116
        except OSError:
            return False
        try:
            # The kernel resolves the name as inside the container: links of the agent's never lead to the host.
            return os.path.samestat(here, kernel.stat_in_root(root, folder.encode("latin-1")))
        except OSError:
            return False
        finally:
            os.close(root)

    def is_as_new(self) -> bool:
        """Return whether its open descriptors are those of a shell that waits for its first command."""
        opened = _open_files(self.pid)
        # The shell has ended meanwhile.
        if opened is None:
            return False
        assert self.kit is not None
        ours = {name: _inode(os.fstat(fd)) for name, fd in self.kit.fds.items()}
        null = _inode(Path("/dev/null").stat())
        if self.bash:
            texts = {sessions.RESTORE_FD: "restore", sessions.LOOP_FD: "loop", sessions.COMMAND_FD: "command"}
            expected = {1: "out", 2: "err", **texts, sessions.GO_FD: "go", sessions.DUMP_FD: "dump"}
            return {fd: inode for fd, inode in opened.items() if fd} == {
                fd: ours[name] for fd, name in expected.items()
            }
        # While it reads its loop, a POSIX shell keeps copies of the file above descriptor 9.
        low = {fd: inode for fd, inode in opened.items() if fd < 10}
        at_rest = {1: ours["out"], 2: ours["err"]}
        known = {*ours.values(), null, opened.get(0)}
        return low in ({0: ours["go"], **at_rest}, {0: low.get(0), **at_rest}) and set(opened.values()) <= known

    def give_kit(self) -> FileKit:
        """Give away what it has open, to the next shell. It must be about to end, and nothing else may have it open."""
        assert self.kit is not None
        kit, self.kit = self.kit, None
        return kit

    def close(self) -> None:
        """Close the keeper's ends, and remove the kit unless it was given away. The caller kills the process."""
        super().close()
        os.close(self.death)
        # Closing wakes a shell that still waits: its read of `go` then returns end of file, and it exits.
        if self.kit is not None:
            self.kit.close()


def restore_script(
    session: ShellSession | None,
    workdir: str,
    environment: Mapping[str, str],
    inherited: Collection[str],
    *,
    bash: bool,
    ready: str,
    pristine: ShellSession | None,
) -> bytes:
    """Return the script that makes a fresh shell a session; see `posix.restore_script` for the arguments."""
    if not bash:
        return posix.restore_script(session, workdir, environment, inherited, ready, pristine)
    script = bash_restore.restore_script(session, workdir, pristine)
    if session is not None:
        return script
    # Bash has counted its level already.
    given = {name: value for name, value in environment.items() if name != "SHLVL"}
    return "".join(f"export {name}={quote(value)}\n" for name, value in given.items()).encode("latin-1") + script


def read_limits(pid: int) -> dict[str, tuple[int, int]]:
    """Return a process's resource limits, soft and hard; none if it has ended. 10 us."""
    try:
        return {name: resource.prlimit(pid, number) for name, number in _LIMITS.items()}
    except ProcessLookupError:
        return {}
    except PermissionError:
        # Root without CAP_SYS_RESOURCE may ask only for its own user's processes (prlimit(2)).
        return _shown_limits(pid)


def _shown_limits(pid: int) -> dict[str, tuple[int, int]]:
    """Return what /proc shows of a process's resource limits: 100 us."""
    try:
        text = Path(f"/proc/{pid}/limits").read_text()
    except OSError:
        return {}
    number = {"unlimited": resource.RLIM_INFINITY}
    texts = {name: (soft, hard) for name, soft, hard in _LIMIT.findall(text) if name in _LIMITS}
    return {name: (number.get(s) or int(s), number.get(h) or int(h)) for name, (s, h) in texts.items()}


def _set_limits(pid: int, wanted: Mapping[int, tuple[int, int]]) -> None:
    """Set resource limits of a process of any user.

    Raises:
        OSError: The kernel refuses.
    """
    try:
        for number, limits in wanted.items():
            resource.prlimit(pid, number, limits)
    except PermissionError:
        # Root without CAP_SYS_RESOURCE may do this only as the process's own user (prlimit(2)).
        user = cgroup_processes.ids(pid)

        def set_as_user() -> None:
            become_user(*user)
            for number, limits in wanted.items():
                resource.prlimit(pid, number, limits)

        processes.run_in_child(set_as_user, "resource limits")


def limit(pid: int, disk_bytes: int) -> None:
    """Limit the resources of a process and of what it starts from now on, as `confine.limit_resources` does."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    ceiling = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    wanted = {
        resource.RLIMIT_FSIZE: (disk_bytes, disk_bytes),
        resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_NOFILE: (min(1024, ceiling), ceiling),
        resource.RLIMIT_MSGQUEUE: (0, 0),
    }
    _set_limits(pid, wanted)


def _inode(status: os.stat_result) -> Inode:
    # A device is known by its number: the shell may have opened another node of it, in another /dev.
    return (-1, status.st_rdev) if stat.S_ISCHR(status.st_mode) else (status.st_dev, status.st_ino)


def _open_files(pid: int) -> dict[int, Inode] | None:
    try:
        return {int(fd): _inode(os.stat(f"/proc/{pid}/fd/{fd}")) for fd in os.listdir(f"/proc/{pid}/fd")}  # noqa: PTH116, PTH208
    except OSError:
        return None
