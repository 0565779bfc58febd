"""Whether this process has root's rights over the files of sandboxes.

A proxy that is root has them, as has one of another user beside a launcher that is root (`LAUNCHER`), with the
capabilities of `NEEDED`: root in a sandbox is then the machine's root. Without them sandboxes are in a user namespace,
and all files belong to the proxy's user.
"""

import os
from functools import cache
from pathlib import Path

from sandboxes.linux import syscalls as kernel

LAUNCHER = "FORKPOINT_LAUNCHER"
"""The variable of the environment that names the socket of a launcher that is root (`rights.launcher_service`)."""
NEEDED = {"CHOWN": 0, "DAC_OVERRIDE": 1, "FOWNER": 3, "FSETID": 4, "KILL": 5, "SETFCAP": 31}
"""The capabilities for work on files of any owner and mode, and to end sandboxes, by number (linux/capability.h)."""


def launcher_socket() -> str:
    """Return the path of the socket of a launcher that is root; empty if the proxy starts its own launcher."""
    return os.environ.get(LAUNCHER, "")


def has_privileged_launcher() -> bool:
    """Return whether this proxy's launcher is the machine's root, without a user namespace."""
    return os.geteuid() == 0 or bool(launcher_socket())


@cache
def missing() -> tuple[str, ...]:
    """Return the capabilities of `NEEDED` that this process lacked when it first asked: each file asks."""
    permitted = kernel.permitted()
    return tuple(name for name, number in NEEDED.items() if not permitted >> number & 1)


def over_files() -> bool:
    """Return whether this process may read, change and give away files of all owners in the layers of sandboxes."""
    return has_privileged_launcher() and not missing()


def give_to_root(tree: Path) -> None:
    """Give root what this process has made of a tree that is the machine's root's to a sandbox."""
    if (own := os.geteuid()) == 0 or not over_files():
        return
    for path in (tree, *tree.rglob("*")):
        if path.lstat().st_uid == own:
            os.chown(path, 0, 0, follow_symlinks=False)
