"""The files of a container that differ from its image, and copies of them for frozen states.

The keeper reads the container's upper directory, in which overlayfs keeps everything that was written. `look` compares
signatures (inode, size, times), and reads only entries with another one. A file whose signature equals the last copy's
is hard-linked from it, so a copy costs what changed. After a restore everything is read once, and must have the digest
of what was frozen. Small copies keep the rows of that moment, so that the error can name the path that differs.
"""

import json
import os
from pathlib import Path
from typing import Any

from sandboxes.container.keeper import copies
from sandboxes.container.keeper.cgroup_processes import ContainerProcesses
from sandboxes.guest.bash import session as session_texts
from sandboxes.guest.files import delta
from sandboxes.guest.files.changes import FOLDER, WrittenFiles
from sandboxes.guest.files.row_table import CLOCKED, GONE
from sandboxes.guest.files.scan import TRUSTED_MARKS
from sandboxes.guest.files.state_rows import StateRows
from sandboxes.guest.files.tracker import Digests, FileTracker
from sandboxes.ipc.launch_messages import ForkKeeper
from sandboxes.shell_text import ShellSession

_KEPT_ROWS = 256
"""The most rows that are kept with a copy, some 25 kB. They only name paths in an error, so large states have none."""

KeptRows = dict[str, list[int | str]]
"""The members of a state's rows by path: the kind, the hash in hexadecimal, and the modification time in ns."""


class DamagedCopyError(Exception):
    """A copy does not give the files that were frozen; the text says which path differs in what."""


class ContainerChanges(WrittenFiles):
    """The files of one container, compared with what they were before a call and with its image."""

    def __init__(self, members: ContainerProcesses, roots: delta.DeltaRoots, order: ForkKeeper) -> None:
        super().__init__(roots, FileTracker(TRUSTED_MARKS, 0, StateRows()), order.disk_bytes, order.reserve_bytes)
        self._members = members
        # The last copy's path, and the signatures of that moment: a file that has the same signature now has the same
        # content as in the copy.
        self._copied: tuple[str, dict[str, bytes]] = ("", {})

    def begin(self, born_ns: int, copy: str) -> None:
        """Start a sandbox.

        Args:
            born_ns: When the spec's root state was built, in ns since 1970.
            copy: The path of the copy to lay over the image; empty to start with the container as it is.

        Raises:
            DamagedCopyError: The copy is not what was frozen.
        """
        self.tracker = FileTracker(TRUSTED_MARKS, born_ns, StateRows())
        if not copy:
            self.look()
            return
        meta = json.loads((Path(copy) / "meta.json").read_bytes())
        # The target is reached through pid 1's root link, that is through the container's overlay (proc_pid_root(5)). A
        # write into the upper directory itself, below a live mount, has undefined results (overlayfs.rst, "Changes to
        # underlying filesystems").
        source, target = os.open(f"{copy}/diff", FOLDER), self._top()
        try:
            copies.lay_over(source, target, meta["links"])
        finally:
            os.close(source)
            os.close(target)
        # Everything is read again: what the container has now is what counts, and it must be what was copied.
        self.look()
        # An image that was imported has no digest here: the proxy has compared it with its tar.
        if self._digest != meta.get("digest", self._digest):
            raise DamagedCopyError(difference(meta.get("rows"), self._kept_rows))
        self._copied = (copy, self.tracker.scan.signatures)

    @property
    def _digest(self) -> str:
        """A digest of all files, for copies: they have no sessions."""
        return self.tracker.now.digests(b"")[0].hex()

    @property
    def _kept_rows(self) -> KeptRows:
        return {path: [row.kind, row.what.hex(), row.mtime_ns] for path, row in self.tracker.now.items()}

    def _top(self) -> int:
        return os.open(f"/proc/{self._members.pid}/root", FOLDER)

    def digests(self, sessions: dict[str, ShellSession], *, alive: bool) -> Digests:
        """Return the state's digest, or its witness if processes run."""
        if self.too_deep:
            return None, None
        return self.tracker.digests(session_texts.digest(sessions), self._members.written_paths() if alive else None)

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
            copy.take(self.roots.upper, target)
        finally:
            os.close(target)
        meta: dict[str, Any] = {"links": copy.links, "added_bytes": copy.added_bytes, "digest": self._digest}
        if self.tracker.now.count <= _KEPT_ROWS:
            meta["rows"] = self._kept_rows
        # Last: a state without `meta.json` does not exist (`StateCopies.exists`).
        (folder / "meta.json").write_text(json.dumps(meta, separators=(",", ":")))
        # The path after the proxy's rename. If the proxy throws the copy away instead, linking fails and the file is
        # copied (`Copy._leaf`).
        self._copied = (becomes, self.tracker.scan.signatures)
        return copy.added_bytes

    def _unchanged(self, path: str) -> str | None:
        """Return the path of a file in the last copy if it did not change since; None otherwise."""
        copy, signatures = self._copied
        now = self.tracker.scan.signatures.get(path)
        return f"{copy}/diff/{path}" if copy and now is not None and signatures.get(path) == now else None


def difference(was: KeptRows | None, now: KeptRows) -> str:
    """Return in what a state differs from the one that was frozen: the first path, and how many others (pure).

    Args:
        was: The rows of the frozen state; None if they were not kept.
        now: The rows of the present state.
    """
    if was is None:
        return "it has too many files to name the one that differs"
    paths = sorted(path for path in was.keys() | now.keys() if was.get(path) != now.get(path))
    if not paths:
        return "no file differs, only the digest of all files"
    first, *others = paths
    before, after = _words(was.get(first)), _words(now.get(first))
    return f"{'/' + first!a} was {before} and is {after}; {len(others)} other paths differ"


def _words(row: list[int | str] | None) -> str:
    if row is None:
        return "as in the image"
    kind, what, mtime_ns = row
    if kind == GONE:
        return "removed"
    # The hash covers content, owner, mode and attributes. It is empty for a directory that differs in its time only.
    return f"{what or 'a directory'} with the {'clock' if kind == CLOCKED else 'set'} time {mtime_ns} ns"
