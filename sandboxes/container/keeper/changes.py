"""The files of a container that differ from its image: their delta, and copies of them for frozen states.

The keeper reads the container's upper directory, in which overlayfs keeps everything that was written. `look` compares
signatures (inode, size, times) first, and computes a delta only if they differ. A file whose signature equals the
last copy's is hard-linked from it, so a copy costs what changed.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path

from sandboxes.container.keeper import copies
from sandboxes.container.keeper.cgroup_processes import ContainerProcesses
from sandboxes.guest.files import delta
from sandboxes.guest.files.changes import Digests, digests_of, disk_watch, free_bytes
from sandboxes.ipc.launch_messages import ForkKeeper
from sandboxes.shell_text import ShellSession

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
"""How a directory is opened."""


class ContainerChanges:
    """The files of one container, compared with what they were before a call and with its image.

    Attributes:
        disk_bytes: How much the container may write.
        reserve_bytes: With less free disk than this, failures are the machine's.
        now: The delta to the image; None if it is too large to know.
    """

    def __init__(self, members: ContainerProcesses, roots: delta.DeltaRoots, order: ForkKeeper) -> None:
        self._members, self._roots = members, roots
        self.disk_bytes, self.reserve_bytes = order.disk_bytes, order.reserve_bytes
        self._born_ns = 0
        self.now: delta.Delta | None = {}
        self._signatures: dict[str, delta.Signature] = {}
        # The last copy's path, and the signatures of that moment: a file that has the same signature now has the same
        # content as in the copy.
        self._copied: tuple[str, dict[str, delta.Signature]] = ("", {})

    def begin(self, born_ns: int, copy: str) -> None:
        """Start a sandbox.

        Args:
            born_ns: When the spec's root state was built, in ns since 1970.
            copy: The path of the copy to lay over the image; empty to start with the container as it is.
        """
        self._born_ns = born_ns
        if not copy:
            self.look()
            return
        meta = json.loads((Path(copy) / "meta.json").read_bytes())
        # The target is reached through pid 1's root link, that is through the container's overlay (proc_pid_root(5)). A
        # write into the upper directory itself, below a live mount, has undefined results (overlayfs.rst, "Changes to
        # underlying filesystems").
        source, target = os.open(f"{copy}/diff", FOLDER), os.open(f"/proc/{self._members.pid}/root", FOLDER)
        try:
            copies.lay_over(source, target, meta["links"])
        finally:
            os.close(source)
            os.close(target)
        stored = meta["delta"]
        # JSON has no tuples.
        self.now = None if stored is None else {path: (what, at) for path, (what, at) in stored.items()}
        # Laying over has changed inodes and times, so the signatures are taken afterwards. The delta is stored, because
        # computing it would read all files.
        self._signatures = delta.signatures(self._roots.upper)
        self._copied = (copy, self._signatures)

    def look(self) -> bool:
        """Update the delta; return whether anything differs from before."""
        signatures = delta.signatures(self._roots.upper)
        # Most calls write nothing. A walk of the upper directory costs far less than a delta, which reads contents.
        if signatures == self._signatures:
            return False
        before, self._signatures = self.now, signatures
        try:
            self.now = delta.merge({}, self._roots, copies.OPAQUE)
        # None counts as a change: it is not known what differs, and a wrong "nothing" would record the call as one
        # without effects.
        except delta.DeltaTooLargeError:
            self.now = None
            return True
        return self.now != before

    def digests(self, sessions: dict[str, ShellSession], *, alive: bool) -> Digests:
        """Return the state's digest, or its witness if processes run."""
        return digests_of(self.now, sessions, self._born_ns, self._members.written_paths() if alive else None)

    def copy(self, folder: Path, becomes: str) -> int:
        """Copy the container's own files.

        Args:
            folder: The directory to make.
            becomes: The path that it will have later, from which the next copy links unchanged files.

        Returns:
            The bytes that no earlier copy shares.
        """
        (folder / "diff").mkdir(parents=True)
        # A kill -9 from here on leaves a `.part` directory; `StateCopies.open` removes it at the next start.
        target = os.open(folder / "diff", FOLDER)
        copy = copies.Copy(self._unchanged)
        try:
            copy.take(self._roots.upper, target)
        finally:
            os.close(target)
        meta = {"delta": self.now, "links": copy.links, "added_bytes": copy.added_bytes}
        # Last: a state without `meta.json` does not exist (`StateCopies.exists`).
        (folder / "meta.json").write_text(json.dumps(meta, separators=(",", ":")))
        # The path after the proxy's rename. If the proxy throws the copy away instead, linking fails and the file is
        # copied (`Copy._leaf`).
        self._copied = (becomes, self._signatures)
        return copy.added_bytes

    def _unchanged(self, path: str) -> str | None:
        """Return the path of a file in the last copy if it did not change since; None otherwise."""
        copy, signatures = self._copied
        return f"{copy}/diff/{path}" if copy and signatures.get(path) == self._signatures.get(path) else None

    def free_bytes(self) -> int:
        """Return the free bytes of the disk on which Docker keeps containers."""
        return free_bytes(self._roots.upper)

    def disk_watch(self) -> Callable[[], str | None]:
        """Return a check of the upper directory against the limit, and of the free disk against the reserve."""
        return disk_watch(self._roots.upper, self.disk_bytes, self.reserve_bytes)
