"""What a proxy that is not root may have its launcher do: nothing but sandboxes.

The launcher is root, and such a proxy may have been taken over. So each name in a request is looked up here, once, and
what is found is used by its descriptor. It must be of the proxy's own, or a sandbox of this launcher's:

- Directories that are written to lie below one directory, and no link leads there.
- Files of control groups belong to the proxy's user, to whom the machine has delegated them.
- A process, or a mount namespace, is that of a child of this launcher that has left the launcher's own namespace.

Directories that are only read may lie anywhere, as a spec may name any. No device node in them can be opened.
"""

import errno
import os
import select
from collections.abc import Iterator
from contextlib import contextmanager

from sandboxes.ipc.launch_messages import LayerStack
from sandboxes.linux import syscalls as kernel
from sandboxes.linux.descriptors import Opened
from sandboxes.linux.processes import pid_of

FOR = "--for"
"""The argument of a launcher before the user and the directory of a proxy that is not root."""
_CGROUP, _CGROUP_2 = 0x27E0EB, 0x63677270
"""What statfs(2) says of control groups of both versions."""
_FOLDER = kernel.open_how(
    os.O_PATH | os.O_DIRECTORY, kernel.RESOLVE_BENEATH | kernel.RESOLVE_NO_SYMLINKS | kernel.RESOLVE_NO_MAGICLINKS
)


class Grounds:
    """The directory, the control groups and the sandboxes of one proxy."""

    def __init__(self, uid: int, folder: str) -> None:
        """Open the directory of the proxy of a user; a link in the path of it is an `OSError`."""
        self._uid, self._folder = uid, folder.rstrip("/") + "/"
        how = kernel.open_how(os.O_PATH | os.O_DIRECTORY, kernel.RESOLVE_NO_SYMLINKS)
        self._top = kernel.openat2(kernel.AT_FDCWD, os.fsencode(folder), how)
        self._own_mounts = os.stat("/proc/self/ns/mnt")  # noqa: PTH116 - pathlib is not loaded here
        # Their process descriptors: a number may be another process's when its process has ended.
        self._children: dict[int, int] = {}

    def close(self) -> None:
        """Close all descriptors, in a child of the launcher's."""
        for fd in (self._top, *self._children.values()):
            os.close(fd)

    def folder(self, path: str) -> int:
        """Return a descriptor (O_PATH) of a directory of the proxy's; `OSError` if it is none."""
        if not path.startswith(self._folder):
            raise _refused(path)
        return kernel.openat2(self._top, os.fsencode(path.removeprefix(self._folder)) or b".", _FOLDER)

    @contextmanager
    def stack(self, stack: LayerStack) -> Iterator[LayerStack]:
        """Yield a stack whose directories for writing are named by descriptors, until the block ends."""
        with Opened(self.folder(stack.upper)) as upper, Opened(self.folder(stack.work)) as work:
            yield LayerStack(stack.lowers, f"/proc/self/fd/{upper}", f"/proc/self/fd/{work}", stack.root, stack.links)

    def group(self, path: str) -> int:
        """Return a descriptor for writing of a file of a control group of the proxy's; `OSError` if it is none."""
        # Not opened before it is known: opening alone may block, or start a device.
        with Opened(os.open(path, os.O_PATH | os.O_CLOEXEC)) as file:
            if kernel.kind_of_file_system(file) not in (_CGROUP, _CGROUP_2) or os.fstat(file).st_uid != self._uid:
                raise _refused(path)
            return os.open(f"/proc/self/fd/{file}", os.O_WRONLY | os.O_CLOEXEC)

    def add(self, pid: int) -> None:
        """Note a new child of this process, and forget those that have ended."""
        for ended in [child for child, fd in self._children.items() if _has_ended(fd)]:
            os.close(self._children.pop(ended))
        self._children[pid] = os.pidfd_open(pid)

    def require_sandbox(self, process: int) -> None:
        """Raise `OSError` if a process descriptor is not that of a sandbox's pid 1."""
        if not self._is_sandbox(pid_of(process)) or _has_ended(process):
            raise _refused("a process")

    def require_mounts(self, namespace: int) -> None:
        """Raise `OSError` if a descriptor is not that of the mount namespace of a sandbox."""
        status = os.fstat(namespace)
        if not any(self._is_sandbox(child, status) for child in self._children):
            raise _refused("a namespace")

    def _is_sandbox(self, pid: int, mounts: os.stat_result | None = None) -> bool:
        if (child := self._children.get(pid)) is None:
            return False
        try:
            own = os.stat(f"/proc/{pid}/ns/mnt")  # noqa: PTH116
        except OSError:
            return False
        # Looked at afterwards: until here the number was this child's.
        is_other = not os.path.samestat(own, self._own_mounts) and not _has_ended(child)
        return is_other and (mounts is None or os.path.samestat(own, mounts))


def _refused(what: str) -> OSError:
    return OSError(errno.EPERM, f"the launcher does not touch it for this proxy: {what}")


def _has_ended(process: int) -> bool:
    poll = select.poll()
    poll.register(process, select.POLLIN)
    return bool(poll.poll(0))
