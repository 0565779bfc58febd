"""The lock by which one process owns a driver's data directory."""

import fcntl
import os
from pathlib import Path

from sandboxes.errors import SandboxError
from sandboxes.linux.descriptors import Opened

_NAME = "lock"


class DirLock:
    """An exclusive lock on a data directory. The kernel releases it when the process ends, however it ends."""

    def __init__(self, data_dir: Path) -> None:
        self._data_dir = data_dir
        self._lock: int | None = None

    def acquire(self, mode: int | None = 0o700) -> None:
        """Own the directory until `release`; it is made if missing. SandboxError if another process owns it."""
        self._data_dir.mkdir(parents=True, exist_ok=True)
        lock = os.open(self._data_dir / _NAME, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        if not _locked(lock):
            os.close(lock)
            raise SandboxError(
                f"{self._data_dir} is in use by another process. Stop it, or choose another data directory."
            )
        self._lock = lock
        if mode is not None:
            self._data_dir.chmod(mode)

    def release(self) -> None:
        """Release the directory. Idempotent."""
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)


def is_unowned(data_dir: Path) -> bool:
    """Return whether no process of this machine owns a data directory. True too if there is no such directory."""
    try:
        lock = os.open(data_dir / _NAME, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return True
    with Opened(lock):
        return _locked(lock)


def _locked(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
