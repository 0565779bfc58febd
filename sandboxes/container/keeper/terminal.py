"""A terminal in a container: a shell with the main session, which the anchor starts on a pseudo-terminal.

The terminal is one of the container's own, and the shell has the container's rights and control groups like every other
process in it. `sandboxes.host.pty` is the proxy's end.
"""

from sandboxes.container.keeper.exec_launch import Launch
from sandboxes.container.keeper.shell_pool import ContainerShells
from sandboxes.guest.bash import session as sessions
from sandboxes.guest.terminal import INTERACTIVE

# Shells in between have set these variables, which do not belong to the session.
_BASH = 'unset PWD OLDPWD SHLVL; exec /bin/bash --noprofile --rcfile "$0" -i'
# A shell without job control starts background processes with SIGINT ignored (POSIX, 2.11), and so does everything that
# they start. Only a program like coreutils' `env` can undo this.
_SH = """ENV=$0; export ENV
if env --default-signal=INT true 2>/dev/null; then exec env --default-signal=INT,QUIT /bin/sh -i; fi
exec /bin/sh -i"""
_SH_INTERACTIVE = b"unset ENV; TERM=xterm-256color; export TERM; PS1='$PWD# '\n"


def start_shell(launch: Launch, shells: ContainerShells, *, columns: int, rows: int) -> int:
    """Start a shell on a new terminal; return the keeper's end of the terminal.

    Raises:
        ShellStartError: The anchor is gone.
        OSError: The container has no free terminal.
    """
    script = shells.restore_script("main")
    if shells.bash:
        # Nothing reads this shell's dumps.
        script = f"exec {sessions.DUMP_FD}>/dev/null\n".encode() + script
        script += f"exec {sessions.DUMP_FD}>&-\n".encode() + INTERACTIVE
    else:
        script += _SH_INTERACTIVE
    start = _BASH if shells.bash else _SH
    try:
        return launch.begin_terminal(lambda path: ["/bin/sh", "-c", start, path], script, rows=rows, columns=columns)
    finally:
        launch.end()
