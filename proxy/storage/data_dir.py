"""The data directory: one process uses it, and only the proxy's own user may look into it.

It holds all calls and answers of all tasks, files of other users inside layers, and images of processes' memory.
"""

import json
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog

from proxy.storage.errors import StoreError
from sandboxes.errors import SandboxError
from sandboxes.linux.dir_lock import DirLock, is_unowned
from sandboxes.linux.file_flags import spread_below
from sandboxes.linux.files import write_whole

log = structlog.get_logger()

STORE = "forkpoint.sqlite"
"""Name of the store's file."""
WORKERS = "workers.json"
"""Name of the file that says how many workers have a data directory; see `proxy.workers`."""

_FORMAT = 1
"""Version of the rule that divides tasks, see `Share`."""

_ENDING_S = 105.0
"""How long the workers of a killed proxy may take to end: they wait for open requests (`proxy.server.GRACE_S`, 30 s).
Members of a cluster hand their tasks over (`proxy.engine.HAND_OVER_S`, 60 s), and sandboxes end after that."""

_MODE = 0o700
"""The mode of the data directory. What lies below needs no mode of its own: no other user reaches it by a path."""


def make_private(data: Path) -> None:
    """Take every right in the data directory, made if need be, from others. Raises StoreError for a shared one."""
    data.mkdir(mode=_MODE, parents=True, exist_ok=True)
    status = data.stat()
    # Closing one of these would lock every other program of the machine out of it.
    if status.st_mode & stat.S_ISVTX or data.resolve() in (Path("/"), Path("~").expanduser()):
        raise StoreError(f"{data} belongs to other programs too. Set `data` to a directory of its own below it.")
    # Each call that changes files makes a file in `snapshots`, which must not lie where other programs delete theirs.
    spread_below(str(data))
    if stat.S_IMODE(status.st_mode) == _MODE:
        return
    try:
        data.chmod(_MODE)
    except PermissionError:
        # A volume of a container platform may belong to another user, with rights for the proxy's group.
        log.warning("other users can read the data directory: it belongs to another user", data=str(data))
        return
    if status.st_mode & 0o077:
        log.warning("other users could look into the data directory until now", data=str(data), uid=os.geteuid())


def workers_of(data: Path) -> int | None:
    """Return between how many workers a data directory is divided, or None. Raises StoreError if that is unknown."""
    try:
        value = json.loads((data / WORKERS).read_bytes())
        if value["format"] != _FORMAT:
            raise StoreError(f"{data / WORKERS} has format {value['format']}, which this Forkpoint does not read.")
        return int(value["workers"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{data / WORKERS} cannot be read: {error}. Restore it, or use another data.") from error


def write_workers(data: Path, count: int) -> None:
    """Write that a data directory is divided between so many workers."""
    write_whole(data / WORKERS, json.dumps({"format": _FORMAT, "workers": count}).encode())


def directory_of(data: Path, number: int) -> Path:
    """Return the data directory of a worker."""
    return data / f"worker-{number}"


def require_undivided(data: Path) -> None:
    """Raise StoreError if a data directory has a store for each of several workers, instead of one store."""
    count = workers_of(data)
    if count is not None:
        raise StoreError(
            f"{data} is divided between {count} workers. Use the directory of each of them: {data}/worker-0 to "
            f"{data}/worker-{count - 1}."
        )


@contextmanager
def owning(data: Path) -> Iterator[DirLock]:
    """Own the data directory (`make_private`) within the block. Raises StoreError if another process uses it."""
    make_private(data)
    ownership = DirLock(data)
    below = [lock.parent for lock in data.glob("*/lock")]
    try:
        ownership.acquire(mode=None)
    except SandboxError as error:
        raise StoreError(str(error)) from error
    try:
        # Nobody has the directory itself. So these are workers whose proxy was killed, and which end too, or an earlier
        # version, which locks only the directories of its drivers and does not end.
        until_s = time.monotonic() + _ENDING_S
        while used := [directory for directory in below if not is_unowned(directory)]:
            if time.monotonic() > until_s or not all(each.name.startswith("worker-") for each in used):
                raise StoreError(f"{data} is in use by another process. Stop it, or choose another data directory.")
            time.sleep(0.05)
        yield ownership
    finally:
        ownership.release()
