"""A terminal in a container: a shell that its anchor starts on one of the container's own, as the main session.

It is born as all that runs there is: in the container's groups, with its rights and no more. `localbox.pty` is the
driver's side.
"""

from sandboxes.container.exec_launch import Launch
from sandboxes.container.shell_pool import ContainerShells
from sandboxes.guest import bash_session as sessions
from sandboxes.guest.terminal import INTERACTIVE

# What the shells in between have counted and noted is not the session's.
_BASH = 'unset PWD OLDPWD SHLVL; exec /bin/bash --noprofile --rcfile "$0" -i'
# What a shell without job control starts beside itself ignores interrupts, and all below it, unless something like
# coreutils' `env` undoes that.
_SH = """ENV=$0; export ENV
if env --default-signal=INT true 2>/dev/null; then exec env --default-signal=INT,QUIT /bin/sh -i; fi
exec /bin/sh -i"""
_SH_INTERACTIVE = b"unset ENV; TERM=xterm-256color; export TERM; PS1='$PWD# '\n"


def start_shell(launch: Launch, shells: ContainerShells, *, columns: int, rows: int) -> int:
    """Start a shell on a new terminal; return our end.

    Raises:
        CannotStart: the container's shell is gone. OSError: no terminal can be had.
    """
    script = shells.restore_script("main")
    if shells.bash:
        # What a session's shell says when it is restored, nobody asks here.
        script = f"exec {sessions.DUMP_FD}>/dev/null\n".encode() + script
        script += f"exec {sessions.DUMP_FD}>&-\n".encode() + INTERACTIVE
    else:
        script += _SH_INTERACTIVE
    start = _BASH if shells.bash else _SH
    try:
        return launch.begin_terminal(lambda path: ["/bin/sh", "-c", start, path], script, rows=rows, columns=columns)
    finally:
        launch.end()
