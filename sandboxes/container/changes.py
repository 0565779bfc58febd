"""What a container's files differ in from its image, kept up to date in its keeper; copies of it out and in."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sandboxes.container import copies
from sandboxes.container.cgroup_processes import Household
from sandboxes.guest import bash_session as sessions
from sandboxes.guest import file_delta as delta
from sandboxes.guest.changes import disk_watch, free_bytes
from sandboxes.session_types import ShellSession

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class ContainerChanges:
    """Those of one container. `now`: None where it is too much to know."""

    def __init__(self, house: Household, roots: delta.DeltaRoots, fields: dict[str, Any]) -> None:
        self._house, self._roots = house, roots
        self.disk_bytes: int = fields["disk_bytes"]
        self.reserve_bytes: int = fields["reserve_bytes"]
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

    def state(self, told: dict[str, ShellSession], *, alive: bool) -> dict[str, Any]:
        """Return the state's digests, or beside live processes its witness, with the sessions told."""
        if self.now is None:
            return {"state": None, "witness": None}
        digest, now_ns = sessions.digest(told), time.time_ns()
        if not alive:
            exact, content = delta.digests(self.now, digest, born_ns=self._born_ns, now_ns=now_ns)
            return {"state": [exact.hex(), content.hex()], "witness": None}
        # What lives may go on writing where it writes: only the rest says what the call itself did.
        written = self._house.written_paths()
        still = {path: entry for path, entry in self.now.items() if path not in written}
        return {"state": None, "witness": delta.digests(still, digest, born_ns=self._born_ns, now_ns=now_ns)[1].hex()}

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
