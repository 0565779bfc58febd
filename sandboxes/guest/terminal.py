"""A terminal in a sandbox, opened by pid 1; `host.pty` is the proxy's end. It prevents checkpoints while open."""

import fcntl
import os
import termios

from sandboxes.guest.anchors.anchor import ShellStartError
from sandboxes.guest.bash import session as session_texts
from sandboxes.guest.bash.restore import restore_script
from sandboxes.guest.driver_link import DriverLink
from sandboxes.guest.shells import Shells
from sandboxes.ipc.messages import TerminalFailed, TerminalOpened
from sandboxes.linux import confine
from sandboxes.linux import syscalls as kernel
from sandboxes.linux.descriptors import set_size
from sandboxes.linux.spawn import BASH, SHELL_FILES

INTERACTIVE = (
    session_texts.DEFINE.encode()
    + b"""
shopt -s expand_aliases; set -mH; export TERM=xterm-256color; unset PROMPT_COMMAND; PS1='\\w\\$ '
"""
)
"""What turns a restored session's shell into one for people: aliases, job control, history, a prompt."""


def give(link: DriverLink, shells: Shells, *, columns: int, rows: int) -> None:
    """Answer `OpenTerminal`: start a shell on a terminal, and give the proxy our end."""
    try:
        end = _start_shell(shells, columns, rows)
    except (OSError, ShellStartError) as error:
        link.send(TerminalFailed(f"no terminal can be had: {error}"))
        return
    link.hand_over(TerminalOpened(), [end])


def _start_shell(shells: Shells, columns: int, rows: int) -> int:
    """Start a bash in the main session's state on a new terminal; return the master end."""
    # In the sandbox's own devpts instance, so the number is free there and the host sees no terminal.
    master, slave = os.openpty()
    try:
        set_size(slave, columns, rows)
        os.fchown(slave, shells.user.uid, -1)
        if os.fork() == 0:
            _become_shell(slave, shells)
    except OSError:
        os.close(master)
        raise
    finally:
        # The child has its copy. With this one open, the master would not see the end of the shell.
        os.close(slave)
    return master


def _become_shell(slave: int, shells: Shells) -> None:
    session = shells.sessions.get("main")
    try:
        # The leader of a new session without a terminal gets the one that it asks for.
        os.setsid()
        fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
        script = os.memfd_create("text", os.MFD_CLOEXEC)
        os.pwrite(script, restore_script(session, shells.workdir) + INTERACTIVE, 0)
        # The script ends with a dump, which nothing reads here.
        null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        numbers = {0: slave, 1: slave, 2: slave, session_texts.RESTORE_FD: script, session_texts.DUMP_FD: null}
        kernel.arrange_descriptors(numbers)
        kernel.reset_signals()
        # A session that is not new brings its own variables along.
        variables = shells.environment if session is None else {}
        options = ["--noprofile", "--rcfile", f"/proc/self/fd/{session_texts.RESTORE_FD}", "-i"]
        program, argv = BASH, ["bash", *options]
        if os.access(f"{SHELL_FILES}/loader", os.X_OK):
            # As `linux/anchor.c` has it. Its variables must not lead its children to the libraries of our bash.
            program, bash = f"{SHELL_FILES}/loader", f"{SHELL_FILES}/bash"
            argv = ["bash", "--library-path", SHELL_FILES, "--argv0", "bash", bash, *options]
        if not shells.user.is_root:
            confine.become_user(shells.user.uid, shells.user.gid, shells.user.groups)
        os.execve(program, argv, {"PATH": os.defpath, **variables})  # noqa: S606
    finally:
        os._exit(127)
