"""CRIU's program: finds it, makes a copy that is safe to run inside a sandbox, and probes the kernel once.

CRIU runs inside a sandbox's namespaces, where an agent may have put anything into the file system
(docs/decisions/0011-criu.md). So it starts with a directory as its root that holds the program, its libraries
and nothing else of the host. It must load nothing from the sandbox:

- No configuration file and no plug-in: `ARGUMENTS` turn the first off, and look for the second in /dev.
- No other program: CRIU's search path is an empty directory (`criu_launch`).
- Its cache of kernel features normally lies in /run. In our copy of the program that path is replaced by the
  descriptor `KERNEL_FD`, through which the launch passes a file of the host.
"""

import os
import shutil
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

from sandboxes.ipc.inherited import FEATURES, KERNEL_FD, LIBRARIES, PROGRAM, SOCKET_FD
from sandboxes.linux import syscalls as kernel
from sandboxes.linux.files import remove_tree

ARGUMENTS = ("criu", "--no-default-config", "--libdir", "/dev", "swrk", str(SOCKET_FD))
"""CRIU's arguments: serve one client on an inherited socket ("swrk", service worker)."""

PROBE_TIMEOUT_S = 60
"""Longest run of `criu check`, which takes 0.1 s. The value is an estimate."""

_PATHS = ("/usr/local/sbin/criu", "/usr/sbin/criu")
"""Where packages and docker/install-criu.sh install CRIU; a user's PATH often lacks these directories."""

_CACHE_PATH = b"/run/criu.kdat\0"
"""The path of the kernel feature cache, as the program contains it."""

_CACHE_FD_PATH = f"/dev/fd/{KERNEL_FD}".encode().ljust(len(_CACHE_PATH), b"\0")
"""Its replacement, of the same length, so that no other byte of the program moves."""


class CriuMissingError(RuntimeError):
    """No CRIU works here; the text says why, and how to get one."""


class CriuUntriedError(CriuMissingError):
    """The machine failed while CRIU was tried: a later attempt may succeed."""


@dataclass(frozen=True, slots=True)
class CriuBinary:
    """A CRIU that is ready to run in sandboxes."""

    root: Path  # Has our copy of the program, its libraries and its cache of this kernel's features.

    @classmethod
    def prepare(cls, directory: Path, criu: Path | None = None) -> "CriuBinary":
        """Copy CRIU, the machine's if none is given, into a directory made again; probe the kernel. Blocking."""
        # CRIU is driven by the proxy, and who drives it makes processes with any right.
        if os.geteuid() != 0:
            raise CriuMissingError(
                "checkpoints of live processes need a proxy that is root: CRIU restores with all rights"
            )
        # `criu check` does not notice: only a restore sets the clocks of a time namespace (time_namespaces(7)).
        if not kernel.holds(kernel.CAP_SYS_TIME):
            raise CriuMissingError("checkpoints of live processes need the capability SYS_TIME: a restore sets clocks")
        candidates = [criu] if criu else [Path(path) for path in (shutil.which("criu"), *_PATHS) if path]
        installed = [path for path in dict.fromkeys(candidates) if path.is_file()]
        if not installed:
            raise CriuMissingError("criu is not installed: run docker/install-criu.sh; Debian 13: apt install criu")
        for path in installed:
            try:
                # The unpatched program is probed: it writes its cache to /run, where `_probe_kernel` reads it.
                program, features = _patched(path), _probe_kernel(path)
                break
            except CriuMissingError:
                # A distribution's old CRIU may be installed beside a newer one that works.
                if path == installed[-1]:
                    raise
        # A kill -9 here leaves half a program. The next process prepares everything again before its first use.
        if directory.exists():
            remove_tree(directory)
        # Only root may look into it. The launch reaches it through a descriptor, which no process of the agent has.
        directory.mkdir(parents=True, mode=0o700)
        (directory / PROGRAM).write_bytes(program)
        (directory / PROGRAM).chmod(0o700)
        (directory / FEATURES).write_bytes(features)
        _copy_libraries(path, directory)
        return cls(directory)


def _patched(criu: Path) -> bytes:
    program = criu.read_bytes()
    if program.count(_CACHE_PATH) != 1:
        raise CriuMissingError(f"{criu} is an unknown build of CRIU: it does not keep its kernel cache in /run")
    # Exactly one place, checked above: a second one would still read /run of the sandbox, which the agent controls.
    return program.replace(_CACHE_PATH, _CACHE_FD_PATH)


def _copy_libraries(criu: Path, directory: Path) -> None:
    """Copy what the loader would load for a program: its libraries, and the loader itself under its own path."""
    (directory / LIBRARIES).mkdir(parents=True)
    try:
        listed = subprocess.run(["ldd", str(criu)], capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=True)  # noqa: S603, S607
    except (OSError, subprocess.SubprocessError) as error:
        raise CriuMissingError(f"the libraries of {criu} cannot be listed: {error}") from error
    for line in listed.stdout.splitlines():
        name, arrow, rest = line.strip().partition(" => ")
        source = Path((rest if arrow else name).split(" (")[0])
        # The kernel reads the loader's path from the program; an option of the loader says where the libraries are.
        target = directory / LIBRARIES / name if arrow else directory / str(source).lstrip("/")
        # The first line is the kernel's own code, which is no file (vdso(7)).
        if source.is_absolute():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
            target.chmod(0o700)


def _probe_kernel(criu: Path) -> bytes:
    # CRIU writes the cache only where /run is a tmpfs. In a mount namespace of its own it always is, and the host's
    # /run stays untouched.
    script = 'mount -t tmpfs none /run && "$1" check >&2 && cat /run/criu.kdat'
    # A check stops processes of its own with ptrace, which nothing continues once it is killed. In a pid namespace all
    # of them end with its pid 1. That one ends with `unshare`, and `unshare` with this thread.
    command = ["setpriv", "--pdeathsig", "KILL", "sh", "-c", '[ "$PPID" = "$0" ] && exec "$@"', str(os.getpid())]
    command += ["unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child", "--mount-proc"]
    command += ["sh", "-c", script, "sh", str(criu)]
    try:
        result = subprocess.run(command, capture_output=True, timeout=PROBE_TIMEOUT_S, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired) as error:
        kind = CriuMissingError if isinstance(error, FileNotFoundError) else CriuUntriedError
        raise kind(f"{criu} check failed: {error}") from error
    if result.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL):
        raise CriuUntriedError(f"{criu} check was killed")
    if result.returncode or not result.stdout:
        output = result.stderr.decode(errors="replace").strip().splitlines() or ["it wrote no error"]
        raise CriuMissingError(f"{criu} does not work on this kernel: {output[-1]}")
    return result.stdout
