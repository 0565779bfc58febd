"""The shell programs that run inside a container before any command does, and the names of their files (pure).

All of them are in the box, a directory that is mounted read-only at `BOX`. FIFOs can be written to there all the same.

    start       runs as pid 1: starts the anchor, and starts it again when a line arrives on `again`
    tini        a static init, if this machine has one; as a subreaper it keeps all processes in one tree
    anchor      starts shells: reads `start N` and `wait PID` from `orders`, and replies on `news`
    N/          the files of one shell: out err go dump (FIFOs), restore loop command (programs)
"""

from sandboxes.guest.bash import session as sessions

BOX = "/dev/.box"
"""Where a container sees its box. /dev is mounted by Docker, so no image has a file there."""

SERVICES = "/.services"
"""The directory of a container that has the files of its side services, a directory for each."""

SHARED = f"{SERVICES}/.shared"
"""A file with a line for each shared directory: its path, a tab, and the path where it is mounted too."""

FIFOS = ("orders", "news", "again")
"""The FIFOs between the keeper and the anchor."""

SHELL_FIFOS = ("out", "err", "go", "dump")
"""The FIFOs of one shell: its output, its errors, the line that lets it run a command, and the dump of its session."""

SHELL_TEXTS = ("restore", "loop", "command")
"""The programs of one shell: what restores its session, its loop, and the next command."""

# `tini -s` registers as a subreaper, so orphans become its children and stay in the tree that CRIU dumps (prctl(2),
# PR_SET_CHILD_SUBREAPER). Without tini an orphan goes to pid 1, and a freeze with it is refused.
# The `read` blocks until the keeper writes to `again`. So a dead anchor is replaced only when the keeper has cleaned up
# after it.
START = f"""\
while :; do
    if [ -x {BOX}/tini ]; then {BOX}/tini -s -- /bin/sh {BOX}/anchor; else /bin/sh {BOX}/anchor; fi
    read -r again <{BOX}/again
done
"""

# The anchor's own FIFOs (3 and 4) are closed first: a shell must not read the orders. `exec -c` starts bash with an
# empty environment, because the restore script sets all variables of the session.
_BASH = f"""( exec 3>&- 4>&- 0</dev/null 1>$d/out 2>$d/err {sessions.RESTORE_FD}<$d/restore {sessions.LOOP_FD}<$d/loop \
{sessions.COMMAND_FD}<$d/command {sessions.GO_FD}<$d/go {sessions.DUMP_FD}>$d/dump
            exec -c -a bash /bin/bash --noprofile --norc -c '{sessions.START}' bash ) &"""
# The loop sources itself again at its end (`posix_session.loop`). Errors of the restore script are hidden, because they
# would count as output of the first command.
_SH = """( exec 3>&- 4>&- 0</dev/null 1>$d/out 2>$d/err; exec /bin/sh -c ". $d/restore 2>/dev/null; . $d/loop" sh ) &"""
# `$!` is the shell's inner pid. `wait N` returns 127 for a pid that this anchor did not start (POSIX, wait), as after
# the death of an earlier anchor.
_LOOP = """\
while read -r verb n <&3; do
    d=%(box)s/$n
    case $verb in
    start)
        %(shell)s
        printf 'started %%s %%s\\n' "$n" "$!" >&4;;
    wait) wait "$n"; printf 'ended %%s %%s\\n' "$n" "$?" >&4;;
    esac
done
"""
# `<>` opens a FIFO at both ends, so the anchor neither waits for the keeper nor reads end of file when the keeper's end
# closes (fifo(7)).
ANCHOR = (
    f"""\
if [ -z "$BASH_VERSION" ] && [ -x /bin/bash ]; then exec /bin/bash --noprofile --norc {BOX}/anchor; fi
[ -x /bin/bash ] || {{ exec 3<>{BOX}/orders 4<>{BOX}/news 2>/dev/null; . {BOX}/anchor-sh; }}
set -m
exec 3<>{BOX}/orders 4<>{BOX}/news 2>/dev/null
printf 'ready bash %s %s\\n' "$$" "$PPID" >&4
"""
    + _LOOP % {"box": BOX, "shell": _BASH}
)
"""The anchor. Job control (`set -m`) gives each shell a process group of its own, in which SIGINT is not ignored."""
ANCHOR_SH = 'printf \'ready sh %s %s\\n\' "$$" "$PPID" >&4\n' + _LOOP % {"box": BOX, "shell": _SH}

PROGRAMS = {"start": START, "anchor": ANCHOR, "anchor-sh": ANCHOR_SH}
"""The programs of a box, by file name."""
