"""Starts a program as the leader of a session, without copying this process where the native helper is there.

vfork copies no page tables, but Python cannot call it: the child may not run any Python before exec. `vfork.c` does it;
this module forks where its library is missing.
"""

import ctypes
import os
from collections.abc import Mapping, Sequence
from typing import Protocol

from sandboxes.linux import syscalls as kernel

LIBRARY = f"{os.path.dirname(__file__)}/libvfork.so"  # noqa: PTH120 - pathlib is not loaded in pid 1
"""The native helper. `hatch_build.py` compiles it."""
BASH = "/bin/bash"
"""Where a machine or an image has its own bash."""
SHELL_FILES = "/dev/.shell"
"""Where a sandbox has the files of `shell_files.copies`, if they could be made. Read-only, and no layer."""
ANCHOR = f"{os.path.dirname(__file__)}/libanchor.so"  # noqa: PTH120
"""What `anchor.c` is compiled into."""
_FAILED = 127
"""The exit code of a program that cannot be executed, as shells report it."""


class Spawn(Protocol):
    """Starts a program as the leader of a new session, and returns its pid."""

    def __call__(
        self, path: str, arguments: Sequence[str], descriptors: Mapping[int, int], variables: Sequence[str] = ()
    ) -> int:
        """Start a program, with `descriptors` by its numbers for them, and no others.

        It inherits the orphans below it (PR_SET_CHILD_SUBREAPER), and handles every signal as a new process does. If
        it cannot be executed, the process ends with exit code 127.
        """
        ...


def fork_leader(
    path: str, arguments: Sequence[str], descriptors: Mapping[int, int], variables: Sequence[str] = ()
) -> int:
    """Start a program as `spawn_leader` does, without the native helper."""
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
            kernel.arrange_descriptors(descriptors)
            kernel.reset_signals()
            os.execve(path, list(arguments), dict(variable.split("=", 1) for variable in variables))  # noqa: S606
        finally:
            os._exit(_FAILED)
    return pid


def native_leader(library: str) -> Spawn | None:
    """Return the native helper's function; None if the library is missing or of another machine."""
    try:
        # PyDLL keeps the interpreter's lock: between vfork and exec no other thread may use this memory.
        start = ctypes.PyDLL(library, use_errno=True).forkpoint_spawn_leader
    except (OSError, AttributeError):
        return None

    def spawn(
        path: str, arguments: Sequence[str], descriptors: Mapping[int, int], variables: Sequence[str] = ()
    ) -> int:
        targets = sorted(descriptors)
        numbers = ctypes.c_int * len(targets)
        words, environment = (
            (ctypes.c_char_p * (len(texts) + 1))(*map(os.fsencode, texts), None) for texts in (arguments, variables)
        )
        pid = start(
            os.fsencode(path), words, environment,
            numbers(*(descriptors[target] for target in targets)), numbers(*targets), len(targets),
        )  # fmt: skip
        if pid < 0:
            raise OSError(ctypes.get_errno(), f"vfork: {os.strerror(ctypes.get_errno())}")
        return int(pid)

    return spawn


spawn_leader: Spawn = native_leader(LIBRARY) or fork_leader
