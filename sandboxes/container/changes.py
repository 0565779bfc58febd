"""What a container's files differ in from its image, kept up to date in its keeper; copies of it out and in."""

import json
import os
from collections.abc import Callable
from pathlib import Path

from sandboxes.container import copies
from sandboxes.container.cgroup_processes import Household
from sandboxes.guest import file_delta as delta
from sandboxes.guest.changes import Digests, digests_of, disk_watch, free_bytes
from sandboxes.ipc.launch_messages import ForkKeeper
from sandboxes.session_types import ShellSession

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class ContainerChanges:
    """The files of one container, compared with what they were before a call and with its image.

    Attributes:
        disk_bytes: How much the container may write.
        reserve_bytes: With less free disk than this, failures are the machine's.
        now: The delta to the image; None if it is too large to know.
    """

    def __init__(self, house: Household, roots: delta.DeltaRoots, order: ForkKeeper) -> None:
        self._house, self._roots = house, roots
        self.disk_bytes, self.reserve_bytes = order.disk_bytes, order.reserve_bytes
        self._born_ns = 0
        self.now: delta.Delta | None = {}
        self._signatures: dict[str, delta.Signature] = {}
        self._copied: tuple[str, dict[str, delta.Signature]] = ("", {})

    def begin(self, born_ns: int, copy: str) -> None:
        """Begin with what there is over the image, or with a copy, which is laid over it."""
        self._born_ns = born_ns
        if not copy:
            self.look()
            return
        meta = json.loads((Path(copy) / "meta.json").read_bytes())
        source, target = os.open(f"{copy}/diff", FOLDER), os.open(f"/proc/{self._house.pid}/root", FOLDER)
        try:
            copies.lay_over(source, target, meta["links"])
        finally:
            os.close(source)
            os.close(target)
        told = meta["delta"]
        self.now = None if told is None else {path: (what, at) for path, (what, at) in told.items()}
        self._signatures = delta.signatures(self._roots.upper)
        self._copied = (copy, self._signatures)

    def look(self) -> bool:
        """Update the delta; return whether anything differs from before."""
        found = delta.signatures(self._roots.upper)
        if found == self._signatures:
            return False
        before, self._signatures = self.now, found
        try:
            self.now = delta.merge({}, self._roots, copies.OPAQUE)
        except delta.DeltaTooLargeError:
            self.now = None
            return True
        return self.now != before

    def digests(self, sessions: dict[str, ShellSession], *, alive: bool) -> Digests:
        """Return the state's digest, or its witness if processes run."""
        return digests_of(self.now, sessions, self._born_ns, self._house.written_paths() if alive else None)

    def copy(self, folder: Path, becomes: str) -> int:
        """Copy the container's own files to a new directory; return the bytes that no earlier copy shares.

        becomes: the path that folder will have.
        """
        (folder / "diff").mkdir(parents=True)
        target = os.open(folder / "diff", FOLDER)
        copy = copies.Copy(self._unchanged)
        try:
            copy.take(self._roots.upper, target)
        finally:
            os.close(target)
        meta = {"delta": self.now, "links": copy.links, "added_bytes": copy.added_bytes}
        (folder / "meta.json").write_text(json.dumps(meta, separators=(",", ":")))
        self._copied = (becomes, self._signatures)
        return copy.added_bytes

    def _unchanged(self, path: str) -> str | None:
        copy, signatures = self._copied
        return f"{copy}/diff/{path}" if copy and signatures.get(path) == self._signatures.get(path) else None

    def free_bytes(self) -> int:
        """Return what the disk has left where Docker keeps containers."""
        return free_bytes(self._roots.upper)

    def disk_watch(self) -> Callable[[], str | None]:
        """See `localbox.changes.disk_watch`."""
        return disk_watch(self._roots.upper, self.disk_bytes, self.reserve_bytes)
