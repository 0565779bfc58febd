"""A session's calls, run twice: in one plain bash, and in a fresh shell for each call, which a dump restores."""

import select
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from sandboxes.guest.shells import Shells
from sandboxes.guest.survivors import holding, kept

ENVIRONMENT = {"HOME": "/tmp", "LANG": "C.UTF-8", "PATH": "/usr/bin:/bin"}
MARK = b"\n@@ end of call @@\n"
CALL_S = 20.0

_LEFT_OUT = (
    "RANDOM|SRANDOM|SECONDS|EPOCH[A-Z]*|LINENO|HISTCMD|PIPESTATUS|FUNCNAME|GROUPS|DIRSTACK|COMP_WORDBREAKS|SHLVL"
)
PROBE = rf"""
\builtin declare -p | \builtin command grep -avE '^declare -[-a-zA-Z]* (BASH[A-Z_0-9]*|_|PPID|{_LEFT_OUT})(=|$)'
\builtin set +o; \builtin shopt; \builtin trap -p; \builtin alias -p; \builtin umask; \builtin dirs -l -p
\builtin declare -f; \builtin declare -F; \builtin printf '<%s>' "$#" "$@" "$-"; \builtin ulimit -a; \builtin enable -n
\builtin pwd; \builtin pwd -P; \builtin command ls -a; \builtin command ls /proc/self/fd | \builtin command wc -l
"""
"""Shows all that a session has; run as the last call."""


def plain(calls: Sequence[str], folder: Path) -> list[bytes]:
    """Return what each call prints in one bash that goes through all of them."""
    texts = _renew(folder)
    for number, call in enumerate(calls):
        (texts / str(number)).write_bytes(call.encode(errors="surrogateescape"))
    # All of it is one line, so the lines of each call are counted from 1.
    script = "shopt -s expand_aliases; unset OLDPWD" + "".join(
        f"; \\builtin eval \"$(<{texts}/{number})\"; \\builtin printf '\\n@@ end of call @@\\n'"
        for number in range(len(calls))
    )
    # As our shells do: a test that was started in the background of a script ignores SIGINT and SIGQUIT.
    argv = ["env", "--default-signal", "bash", "--noprofile", "--norc", "-c", script, "bash"]
    done = subprocess.run(
        argv, cwd=folder, env={**ENVIRONMENT, "PWD": str(folder)}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, check=False, timeout=CALL_S, start_new_session=True,
    )  # fmt: skip
    return done.stdout.split(MARK)[:-1]


class RestoredRuns:
    """The shells of a session in the test's own process, outside of any sandbox.

    Attributes:
        shells: The pool that sandboxes have, too.
    """

    def __init__(self, folder: Path) -> None:
        _renew(folder)
        self.shells = Shells(ENVIRONMENT, str(folder), {}, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shells.end()

    def call(self, command: str, session: str = "main") -> bytes:
        """Return what a call prints; then have its shell replaced, unless nothing but it has the session."""
        self.shells.ready_all()
        shell = self.shells.ready(session)
        shell.run(command.encode(errors="surrogateescape"))
        deadline = time.monotonic() + CALL_S
        while True:
            ready, _, _ = select.select([shell.out.fd, shell.err.fd, shell.dump_fd, shell.death], [], [], 1.0)
            for output in (shell.out, shell.err):
                output.drain(1 << 24)
            if shell.dump_fd in ready and shell.read_dump():
                break
            assert shell.death not in ready, f"{command!r} ended its shell: {bytes(shell.err.data)!r}"
            assert time.monotonic() < deadline, f"{command!r} hangs"
        self.shells.take_dump(shell)
        for output in (shell.out, shell.err):
            output.drain(1 << 24)
        shell.err.take()
        out = shell.out.take()
        if not kept(self.shells) and not holding(self.shells) and not shell.jobs:
            self.shells.renew([session])
        return out


def restored(calls: Sequence[str], folder: Path) -> list[bytes]:
    """Return what each call prints in a session that goes from shell to shell."""
    with RestoredRuns(folder) as runs:
        return [runs.call(call) for call in calls]


def _renew(folder: Path) -> Path:
    """Empty a directory, and one beside it, whose path is returned."""
    beside = folder.with_name(f"{folder.name}.calls")
    for path in (folder, beside):
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
    return beside
