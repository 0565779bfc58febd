"""The POSIX shell script that becomes a process of its own, as `docker exec` starts one."""

from collections.abc import Mapping
from typing import Any

from sandboxes.shell_text import quote

TEXT_FD = 29
"""The descriptor from which bash reads the script."""


PROGRAM = f". /proc/self/fd/{TEXT_FD}"
"""The text for `bash -c`. The script may be longer than an argument can be, so bash reads it from a descriptor."""


def text(
    fields: Mapping[str, Any], env: Mapping[str, str], *, uid: int | None, redirections: str, terminal: str = ""
) -> bytes:
    """Return a script with which a POSIX shell becomes a process, or reports in Docker's words why it cannot.

    Args:
        fields: The process: argv, cwd, user, tty, detach.
        env: All of its variables; HOME may be missing where the script looks for the user.
        uid: The user that the shell runs as, from which it becomes the process's user; None if it is that user.
        redirections: Shell redirections that make its streams.
        terminal: The path of its controlling terminal; empty for none.
    """
    facts = {"cwd": fields["cwd"], "terminal": terminal, "quiet": "yes" if fields.get("detach") else ""}
    if uid is not None:
        facts |= {"user": fields.get("user") or "", "uid": str(uid)}
    # Bytes as latin-1 characters: quoting then sees one character for each byte, whatever the encoding is.
    known = (f"fp_{name}={quote(_bytes(value))}" for name, value in facts.items())
    # Quoted texts only: argv and variables are the agent's, and none of their bytes may act as shell syntax.
    words = " ".join(quote(_bytes(word)) for word in fields["argv"])
    given = " ".join(quote(_bytes(f"{name}={value}")) for name, value in env.items())
    # Docker sets HOME from /etc/passwd unless the request sets it.
    home = "" if "HOME" in env else ' "HOME=$fp_home"'
    lines = (
        # The anchor is protected from the OOM killer and its children inherit that, so the process takes an ordinary
        # score first.
        "printf 0 2>/dev/null >/proc/self/oom_score_adj", f"exec {redirections}", *known,
        f"PATH={quote(env['PATH'])}", f"set -- {words}", "" if uid is None else _LOOK_FOR_USER, _LOOK,
        f'set -- "$fp_env" -i {given}{home} "$@"', "" if uid is None else _BECOME, _RUN,
    )  # fmt: skip
    return ("\n".join(lines) + "\n").encode("latin-1")


def refusal(reason: str, redirections: str) -> bytes:
    """Return a script that reports why there is no process, and ends as Docker does."""
    return f"exec {redirections}\nprintf '%s\\r\\n' {quote(_bytes(reason))}\nexit 126\n".encode("latin-1")


def _bytes(word: str) -> str:
    return word.encode(errors="surrogateescape").decode("latin-1")


# The names begin with `fp_`, and `env -i` starts the program, so none of these variables reaches it.
# Only built-ins of the shell are used: an image may have no other program, and PATH is the agent's.
_LOOK_FOR_USER = r"""
fp_name=${fp_user%%:*} fp_group= fp_to= fp_gid=0 fp_home=/ fp_groups=
case $fp_user in *:*) fp_group=${fp_user#*:};; esac
if [ -z "$fp_name" ]; then fp_name=$fp_uid; fi
if [ -r /etc/passwd ]; then
    while IFS=: read -r fp_1 fp_2 fp_3 fp_4 fp_5 fp_6 fp_7 || [ -n "$fp_1" ]; do
        if [ "$fp_1" = "$fp_name" ] || [ "$fp_3" = "$fp_name" ]; then
            fp_name=$fp_1 fp_to=$fp_3 fp_gid=$fp_4 fp_home=${fp_6:-/}
            break
        fi
    done </etc/passwd
fi
if [ -z "$fp_to" ]; then
    case $fp_name in
    *[!0-9]*) printf 'unable to find user %s: no matching entries in passwd file\r\n' "$fp_name"; exit 126;;
    esac
    fp_to=$fp_name
fi
fp_found=
if [ -r /etc/group ]; then
    while IFS=: read -r fp_1 fp_2 fp_3 fp_4 || [ -n "$fp_1" ]; do
        if [ -n "$fp_group" ]; then
            if [ "$fp_1" = "$fp_group" ] || [ "$fp_3" = "$fp_group" ]; then fp_found=$fp_3; break; fi
        else
            case ",$fp_4," in *",$fp_name,"*) fp_groups=$fp_groups,$fp_3;; esac
        fi
    done </etc/group
fi
if [ -n "$fp_group" ]; then
    case $fp_found$fp_group in
    *[!0-9]*) if [ -z "$fp_found" ]; then
            printf 'unable to find group %s: no matching entries in group file\r\n' "$fp_group"; exit 126
        fi;;
    esac
    fp_gid=${fp_found:-$fp_group}
fi
"""
"""Finds the user where no process can be started as another user; `users.resolve` does elsewhere."""

_LOOK = r"""
fp_fail() {
    printf 'OCI runtime exec failed: exec failed: unable to start container process: %s: unknown\r\n' "$1"
    exit 126
}
case $fp_cwd in
/*) ;;
*) printf 'OCI runtime exec failed: exec failed: Cwd must be an absolute path: unknown\r\n'; exit 126;;
esac
# The anchor has gone there, because the user may be one that cannot enter the directory.
[ -z "$fp_uid" ] && [ "$PWD" != / ] || cd -- "$fp_cwd" 2>/dev/null ||
    fp_fail "chdir to cwd (\"$fp_cwd\") set in config.json failed: no such file or directory"
case $1 in
*/*)
    if [ ! -e "$1" ]; then fp_fail "exec: \"$1\": stat $1: no such file or directory"; fi
    if [ -d "$1" ] || [ ! -x "$1" ]; then fp_fail "exec: \"$1\": permission denied"; fi;;
*)
    fp_rest=$PATH: fp_found=
    while [ -n "$fp_rest" ]; do
        fp_1=${fp_rest%%:*} fp_rest=${fp_rest#*:}
        if [ -x "${fp_1:-.}/$1" ] && [ ! -d "${fp_1:-.}/$1" ]; then fp_found=yes; break; fi
    done
    if [ -z "$fp_found" ]; then fp_fail "exec: \"$1\": executable file not found in \$PATH"; fi;;
esac
case $1 in *=*) set -- /bin/sh -c 'exec "$0" "$@"' "$@";; esac
fp_env=/usr/bin/env
if [ ! -x "$fp_env" ]; then fp_env=/bin/env; fi
"""
"""Finds the directory and the program, all of it inside the sandbox, where no link leads out.

Texts and the exit code equal Docker 20.10 with runc 1.1.
"""


# The subshell forks, because setsid(2) fails for the leader of a process group. The parent passes the exit code on.
_ON_TERMINAL = r"""
if [ -n "$fp_terminal" ] && PATH=/usr/bin:/bin command -v setsid >/dev/null 2>&1; then
    exec 2>/dev/null
    (PATH=/usr/bin:/bin; exec setsid /bin/sh -c 'exec 0<>"$0" 1>&0 2>&0; exec "$@"' "$fp_terminal" "$@")
    exit "$?"
fi
"""
"""Makes the terminal the controlling one: the leader of a new session that opens a terminal gets it.

Without `setsid` in the image the process has the terminal as its streams alone.
"""


# Images differ: util-linux has setpriv, and GNU coreutils has chroot with a user. Busybox has neither, but usually su.
# PATH is fixed here, so that the agent's PATH cannot supply these programs.
_BECOME = r"""
if [ "$fp_to" != "$fp_uid" ] || [ -n "$fp_group" ]; then
    PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
    case $(setpriv --help 2>&1) in
    *--reuid*) set -- setpriv "--reuid=$fp_to" "--regid=$fp_gid" "--groups=$fp_gid$fp_groups" "$@";;
    *) case $(chroot --help 2>&1) in
        *--userspec*) set -- chroot "--userspec=$fp_to:$fp_gid" "--groups=$fp_gid$fp_groups" --skip-chdir / "$@";;
        *) set -- su -s /bin/sh -c 'exec "$0" "$@"' "$fp_name" "$@";;
        esac;;
    esac
fi
"""
"""Changes the user with what the base has for that."""

_RUN = (
    _ON_TERMINAL
    + r"""if [ -n "$fp_quiet" ]; then exec >/dev/null 2>&1; fi
exec "$@"
"""
)
"""Becomes the program."""
