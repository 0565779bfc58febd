"""Looks at every name that the processes of a sandbox hold, while CRIU keeps these processes still."""

# Theory of operation.
#
# CRIU saves what a process holds by the name that the kernel gives for it, and a restore opens that name again with all
# rights. The kernel's own names contain no symbolic link. So where one meets a link, the agent has put it there after
# the process opened the file, and CRIU would be led away. A dump is therefore refused unless all of this holds:
#
# 1. Every thread stands still: CRIU traces it. Then nothing can change between this look and the dump.
# 2. No process has namespaces of its own, so that all names mean the same.
# 3. Every name of a working directory, root, program, descriptor, mapping or bound socket leads to what is held,
#    without a link. A file that was deleted needs its directory, because CRIU makes the file there for a moment, and so
#    the directory must not be read-only: the pipes of a container's shells are in such a place, and a shell that is
#    killed leaves them to its children. A directory that was deleted is refused: CRIU would make it again by its path.
# 4. No name leads into the kernel's file systems, except to a few harmless files and to what tells about the process
#    itself. The content of others depends on the rights of the process that opens them, and that would be CRIU. Side
#    services of a container see them at further places.
# 5. No descriptor is under way in a socket, where nobody can look at its name.
#
# The restore does not rely on this (`criu_launch`). It makes the difference between a state that is reached by replay
# and a restore that fails.
#
# A restore makes deleted files for a moment, and binds sockets again. It thereby changes the times of their directories
# and of the sockets, which programs see. The look notes these times, and the restore puts them back before any process
# runs.

import errno
import fcntl
import os
import re
import stat

from sandboxes.guest.checkpoints import lost_settings
from sandboxes.guest.checkpoints.looking import NotDumpableError, in_child, taken
from sandboxes.linux import syscalls as kernel
from sandboxes.linux.descriptors import Opened, memory_device
from sandboxes.linux.user_counts import under_way

_DELETED = b" (deleted)"
"""What the kernel appends to the name of a file without a directory entry (proc_pid_fd(5))."""
_NO_FILE = (b"/memfd:", b"/SYSV", b"/dev/zero")
"""How the names of shared memory begin, which looks like a file."""
_NAMELESS = (b"socket:[", b"pipe:[", b"anon_inode:", b"pidfd:")
"""How the kernel describes what has no path, and CRIU rebuilds without one."""
_KERNEL_FILES = frozenset(
    b"/proc /proc/cpuinfo /proc/filesystems /proc/loadavg /proc/meminfo /proc/stat /proc/uptime /proc/version "
    b"/proc/vmstat".split()
)
"""Files of the kernel that tell every reader the same. Monitors such as `top` keep them open."""
_OWN_FILE = re.compile(rb"/proc/(\d+)/(?:task/\d+/)?(?:cmdline|io|limits|maps|smaps|stat|statm|status)")
"""Files that tell about one process. It may hold them itself, since a restore opens those of the same process."""
MAX_NAMES = 20_000
"""Limits the names of one look, which takes about 40 us a name. The processes stand still for that time. The value is
an estimate: programs hold some hundred names, and CRIU itself takes longer for each of them."""
_MAX_NOTED_BYTES = 1 << 18
"""Limits the paths whose times are noted. The proxy reads and writes them on its event loop."""
_SIOCUNIXFILE = 0x89E0
"""An ioctl that opens the file which a Unix socket is bound to (linux/un.h)."""
_NAMESPACES = ("mnt", "pid", "user")
_ENDED = (b"Z", b"X")
_EXIT_CODE = 49
"""Place of the exit status behind the name in proc_pid_stat(5)."""
_CUT_BITS = 0x8080
"""Bits of an exit status (wait(2)): the highest of a code, and whether memory was written to a file."""


class UnsafeNameError(NotDumpableError):
    """A process holds something that CRIU must not look up; the text says which process and what."""


class HeldNames:
    """One look at all processes of a sandbox but its pid 1."""

    def __init__(self, tracer: int) -> None:
        """Look, in the sandbox's mount namespace and root; `tracer` is CRIU, as the sandbox numbers it."""
        self.mapped: dict[str, str] = {}  # CRIU's names of mapped files that it cannot open by itself, and their paths.
        # Times of the last access and change, in ns since 1970, by path: of what a restore touches.
        self.times: dict[str, list[int]] = {}
        self._plain: set[bytes] = set()
        # As `maps` has it (proc_pid_maps(5)).
        self._memory = b"%02x:%02x" % (os.major(memory_device()), os.minor(memory_device()))
        self._mounts: dict[bytes, int] = {}
        self._descriptors: list[tuple[int, int, bytes]] = []
        self._count = self._noted_bytes = 0
        # Pid 1 is ours, and its mount namespace is the sandbox's.
        self._namespaces = [os.readlink(f"/proc/1/ns/{name}") for name in _NAMESPACES]  # noqa: PTH115
        with open("/proc/1/mountinfo", "rb") as file:  # noqa: PTH123
            mounts = [line.split() for line in file]
        self._listed = {int(mount[0]) for mount in mounts}
        # The type of a mount follows the separator (proc(5)).
        self._kernel_mounts = tuple(m[4] + b"/" for m in mounts if m[m.index(b"-") + 1] in {b"proc", b"sysfs"})
        names = filter(str.isdigit, os.listdir("/proc"))  # noqa: PTH208
        pids = [name for name in names if int(name) not in {1, tracer} and _stands_still(name, tracer)]
        for name in pids:
            self._process(name)
        bound = self._bound()

        def look() -> list[bytes]:
            noted = lost_settings.as_bytes(lost_settings.look(map(int, pids), self._descriptors))
            return [noted, *_plain_sockets(bound, self._descriptors)]

        noted, *paths = in_child(look)
        # What the processes have set and CRIU does not save; see `lost_settings`.
        self.noted = lost_settings.from_bytes(noted)
        for path in paths:
            self._note_times(os.path.dirname(path) or b"/")  # noqa: PTH120
            if not path.endswith(_DELETED):
                self._note_times(path)

    def _process(self, pid: str) -> None:
        if [os.readlink(f"/proc/{pid}/ns/{name}") for name in _NAMESPACES] != self._namespaces:  # noqa: PTH115
            raise UnsafeNameError(f"process {pid} has namespaces of its own")
        for link in ("cwd", "root", "exe", *(f"fd/{name}" for name in os.listdir(f"/proc/{pid}/fd"))):  # noqa: PTH208
            self._held(pid, link)
        with open(f"/proc/{pid}/maps", "rb") as file:  # noqa: PTH123
            for line in file:
                self._mapping(pid, line.rstrip(b"\n").split(b" ", 5))

    def _count_name(self) -> None:
        self._count += 1
        if self._count > MAX_NAMES:
            raise UnsafeNameError(f"the processes hold more than {MAX_NAMES} names")

    def _held(self, pid: str, link: str) -> None:
        self._count_name()
        where = f"/proc/{pid}/{link}"
        path = os.readlink(os.fsencode(where))  # noqa: PTH115
        if link.startswith("fd/"):
            self._descriptors.append((int(pid), int(link[3:]), path))
        if link == "exe" and path.startswith(b"/memfd:"):
            raise UnsafeNameError(f"process {pid} runs a program that has no file")
        if path.startswith(b"/"):
            held, subject = os.stat(where), f"process {pid} holds {_text(path)}"  # noqa: PTH116
            if (own := _OWN_FILE.fullmatch(path)) and int(own[1]) == int(pid):
                _require_same(path, held, subject)
                return
            self._require_no_kernel_file(path, subject)
            _require_plain(path, held, subject)
            self._note_deleted(path)
        elif not path.startswith(_NAMELESS) or b"io_uring" in path:
            # Namespaces, and names that the kernel cannot reach from this root. With io_uring the kernel itself writes
            # while the processes stand still.
            raise UnsafeNameError(f"process {pid} holds {_text(path)}")
        elif path.startswith(b"socket:[") and under_way(f"/proc/{pid}/fdinfo/{link[3:]}"):
            raise UnsafeNameError(f"process {pid} has a socket with descriptors under way")

    def _require_no_kernel_file(self, path: bytes, subject: str) -> None:
        if path.startswith(self._kernel_mounts) and path not in _KERNEL_FILES:
            raise UnsafeNameError(f"{subject}, a file of the kernel")

    def _mapping(self, pid: str, fields: list[bytes]) -> None:
        path = fields[5].lstrip(b" ") if len(fields) > 5 else b""
        self._count_name()
        if not path.startswith(b"/"):
            return
        if fields[3] == self._memory and path.startswith(_NO_FILE):
            # Of a memfd the agent has chosen the name, and CRIU restores shared memory as one of its own.
            return
        if path not in self._plain:
            self._plain.add(path)
            self._require_no_kernel_file(path, f"process {pid} has mapped {_text(path)}")
            _require_plain(path, None, f"process {pid} has mapped {_text(path)}")
        self._note_deleted(path)
        if not path.startswith((*_NO_FILE, b"/dev/")) and not path.endswith(_DELETED):
            self._note_if_below(pid, fields, path)

    def _note_if_below(self, pid: str, fields: list[bytes], path: bytes) -> None:
        """Note a file that is mapped from below the sandbox's root."""
        # If the base is an overlay itself (the host's view), the kernel reports mappings in that lower overlay, whose
        # mount no namespace lists (Linux 6.18: backing_file_mmap of stacked overlays). CRIU cannot name such files, so
        # they become `external` and are opened again by path.
        device, inode = fields[3], int(fields[4])
        if device not in self._mounts:
            # One file tells the mount of all files of its device: opening one is the costly part.
            # Its name there has no zeros before the numbers, and `maps` has some.
            begin, end = (int(place, 16) for place in fields[0].split(b"-"))
            self._mounts[device] = kernel.mount_id(f"/proc/{pid}/map_files/{begin:x}-{end:x}")
        if self._mounts[device] not in self._listed:
            self.mapped[f"file[{self._mounts[device]:x}:{inode:x}]"] = path.decode(errors="surrogateescape")

    def _note_deleted(self, path: bytes) -> None:
        if path.endswith(_DELETED) and not path.startswith(_NO_FILE):
            self._note_times(os.path.dirname(path) or b"/")  # noqa: PTH120

    def _note_times(self, path: bytes) -> None:
        if (name := path.decode(errors="surrogateescape")) in self.times:
            return
        self._noted_bytes += len(path)
        if self._noted_bytes > _MAX_NOTED_BYTES:
            raise UnsafeNameError("the processes hold deleted files or sockets in too many places")
        # As it is now: nothing runs that could change it until the dump is complete.
        status = os.lstat(path)
        self.times[name] = [status.st_atime_ns, status.st_mtime_ns]

    def _bound(self) -> dict[bytes, bytes]:
        """Return the names that Unix sockets are bound to: the agent's own words, maybe relative or out of date."""
        bound: dict[bytes, bytes] = {}
        with open("/proc/1/net/unix", "rb") as file:  # noqa: PTH123
            next(file)
            for line in file:
                fields = line.rstrip(b"\n").split(None, 7)
                path = fields[-1] if len(fields) > 7 else b""
                if path.startswith(b"/"):
                    _require_plain(path + _DELETED, None, f"a socket is bound to {_text(path)}")
                if path and not path.startswith(b"@"):
                    bound[b"socket:[%d]" % int(fields[6])] = path
        return bound


def _stands_still(pid: str, tracer: int) -> bool:
    try:
        tracers = {}
        for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208
            with open(f"/proc/{pid}/task/{thread}/status", "rb") as file:  # noqa: PTH123
                status = dict(line.split(b":", 1) for line in file if line.startswith((b"State:", b"TracerPid:")))
            if status[b"State"].split()[0] not in _ENDED:
                tracers[thread] = int(status[b"TracerPid"])
            elif thread == pid:
                _require_small_code(pid)
    except (FileNotFoundError, ProcessLookupError):
        # It ended before CRIU came to it, and nothing of it is left to look up.
        return False
    # CRIU takes a process whose first thread has ended for a process that has ended, and lets its other threads run.
    if tracers and (pid not in tracers or set(tracers.values()) != {tracer}):
        raise UnsafeNameError(
            f"process {pid} is not part of the tree that is dumped, or runs on without its main thread"
        )
    return bool(tracers)


def _require_small_code(pid: str) -> None:
    """Raise if a process has ended with a code that CRIU cuts, because it keeps seven bits, and nobody has asked."""
    with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123
        status = int(file.read().rpartition(b")")[2].split()[_EXIT_CODE])
    if status & _CUT_BITS:
        raise UnsafeNameError(
            f"process {pid} has ended with code {status >> 8 or status}, its parent has not asked yet, and a "
            "checkpoint changes codes above 127"
        )


def _require_same(path: bytes, held: os.stat_result, subject: str) -> None:
    status = _look_up(path, subject)
    if status is None or not os.path.samestat(status, held):
        raise UnsafeNameError(f"{subject}, which is not there any more")


def _require_plain(path: bytes, held: os.stat_result | None, subject: str) -> None:
    """Raise unless a name leads to what is held, without a link, or to the place of a file that was deleted."""
    # Of what is known by its name only, `held` is None.
    if path.startswith((b"/proc/", b"/sys/")) and path not in _KERNEL_FILES:
        raise UnsafeNameError(f"{subject}, a file of the kernel")
    status = _look_up(path, subject)
    if status is not None and (held is None or os.path.samestat(status, held)):
        return
    if not path.endswith(_DELETED) or (held is not None and stat.S_ISDIR(held.st_mode)):
        raise UnsafeNameError(f"{subject}, which is not there any more")
    place = path[: -len(_DELETED)]
    folder = _look_up(os.path.dirname(place) or b"/", subject)  # noqa: PTH120
    if folder is None or not stat.S_ISDIR(folder.st_mode):
        raise UnsafeNameError(f"{subject}, whose directory is not there any more")
    # A link that now has the name of the deleted file.
    _look_up(place, subject)
    # What is mapped may be shared memory, which only looks like a file (`/dev/zero`), and CRIU makes no file for it.
    is_file = held is not None and not path.startswith(b"/memfd:")
    if is_file and os.statvfs(os.path.dirname(place) or b"/").f_flag & os.ST_RDONLY:  # noqa: PTH120
        raise UnsafeNameError(f"{subject}, which was in a directory where no file can be made again")


def _look_up(path: bytes, subject: str) -> os.stat_result | None:
    """Return what a name leads to, or None. A link on the way, or at its end, is an `UnsafeNameError`."""
    try:
        fd = kernel.open_without_links(path, os.O_PATH | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno in {errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG}:
            return None
        if error.errno == errno.ELOOP:
            raise UnsafeNameError(f"{subject}, and a link has taken a place in that path") from error
        raise
    with Opened(fd):
        status = os.fstat(fd)
    if stat.S_ISLNK(status.st_mode):
        raise UnsafeNameError(f"{subject}, and a link has taken that name")
    return status


def _plain_sockets(wanted: dict[bytes, bytes], descriptors: list[tuple[int, int, bytes]]) -> list[bytes]:
    """Compare the names that sockets are bound to with the kernel's names of their files; return these."""
    paths = []
    for pid, number, description in descriptors:
        if description in wanted:
            # The kernel opens what the socket is bound to (unix(7), SIOCUNIXFILE).
            with taken(pid, number) as held, Opened(fcntl.ioctl(held, _SIOCUNIXFILE)) as bound:
                path = os.readlink(b"/proc/self/fd/%d" % bound)  # noqa: PTH115
                _require_plain(path, os.fstat(bound), f"process {pid} has a socket bound to {_text(path)}")
            name = wanted[description]
            # CRIU binds a socket again to its own name, with the root of the sandbox. The name has no link on its way
            # (`HeldNames._bound`), so what `..` in it means shows from its words.
            # Two slashes at the beginning are kept by `normpath`.
            name = os.path.normpath(b"/" + name.lstrip(b"/")) if name.startswith(b"/") else path
            if path not in (name, name + _DELETED):
                raise UnsafeNameError(
                    f"process {pid} has a socket bound to {_text(name)}, a name of another root or of a moved file"
                )
            paths.append(path)
    return paths


def _text(name: bytes) -> str:
    return ascii(name.decode(errors="backslashreplace"))[1:-1]
