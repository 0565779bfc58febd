"""The shell texts that run inside a container, and the names of what they meet there (pure).

All of it lies in one directory that is bound read-only at `BOX`; FIFOs can be written to there all the same.

    start       pid 1: runs the anchor, and runs it again when the agent has killed it and `again` says so
    tini        a static init, where this machine has one: a subreaper, so one tree holds all that the anchor starts
    anchor      starts shells: reads `start N` and `wait PID` from `orders`, answers on `news`
    N/          one shell: out err go dump (FIFOs), restore loop command (texts)
"""

from sandboxes.guest import bash_session as sessions

BOX = "/dev/.box"
FIFOS = ("orders", "news", "again")
SHELL_FIFOS = ("out", "err", "go", "dump")
SHELL_TEXTS = ("restore", "loop", "command")

START = f"""\
while :; do
    if [ -x {BOX}/tini ]; then {BOX}/tini -s -- /bin/sh {BOX}/anchor; else /bin/sh {BOX}/anchor; fi
    read -r again <{BOX}/again
done
"""

_BASH = f"""( exec 3>&- 4>&- 0</dev/null 1>$d/out 2>$d/err {sessions.RESTORE_FD}<$d/restore {sessions.LOOP_FD}<$d/loop \
{sessions.COMMAND_FD}<$d/command {sessions.GO_FD}<$d/go {sessions.DUMP_FD}>$d/dump
            exec -c -a bash /bin/bash --noprofile --norc -c '{sessions.START}' bash ) &"""
_SH = """( exec 3>&- 4>&- 0</dev/null 1>$d/out 2>$d/err; exec /bin/sh -c ". $d/restore 2>/dev/null; . $d/loop" sh ) &"""
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
"""Job control (`set -m`) gives each shell a process group of its own, and leaves it SIGINT as it should be."""
ANCHOR_SH = 'printf \'ready sh %s %s\\n\' "$$" "$PPID" >&4\n' + _LOOP % {"box": BOX, "shell": _SH}

PROGRAMS = {"start": START, "anchor": ANCHOR, "anchor-sh": ANCHOR_SH}
