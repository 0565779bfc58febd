"""The script for bash that becomes a process of its own, as `docker exec` starts one."""

import resource
from collections.abc import Mapping, Sequence
from typing import Any

from sandboxes.guest.bash.session import OURS
from sandboxes.shell_text import BECOME_AGENT, quote

TEXT_FD = OURS
"""The descriptor from which bash reads the script."""
_MOST_STACK_BYTES, _POINTER_BYTES = 6 << 20, 8
"""The most that arguments and variables may take of any stack, and what each takes beside its text (execve(2))."""


OCI_FAILED = "OCI runtime exec failed: exec failed"
PROGRAM = f". /proc/self/fd/{TEXT_FD}"
"""The text for `bash -c`. The script may be longer than an argument can be, so bash reads it from a descriptor."""


def text(fields: Mapping[str, Any], env: Mapping[str, str], *, redirections: str, terminal: str = "") -> bytes:
    """Return a script with which bash becomes a process, or reports in Docker's words why it cannot."""
    if is_too_long([*fields["argv"], *(f"{name}={value}" for name, value in env.items())]):
        start = f"exec {fields['argv'][0]}"
        return refusal(
            f"{OCI_FAILED}: unable to start container process: {start}: argument list too long: unknown", redirections
        )
    facts = {"cwd": fields["cwd"], "terminal": terminal, "quiet": "yes" if fields.get("detach") else ""}
    # Bytes as latin-1 characters: quoting then sees one character for each byte, whatever the encoding is.
    known = (f"fp_{name}={quote(_bytes(value))}" for name, value in facts.items())
    # Quoted texts only: argv and variables are the agent's, and none of their bytes may act as shell syntax.
    words = " ".join(quote(_bytes(word)) for word in fields["argv"])
    given = " ".join(quote(_bytes(f"{name}={value}")) for name, value in env.items())
    lines = (
        BECOME_AGENT, f"exec {redirections}", *known,
        f"PATH={quote(env['PATH'])}", f"set -- {words}", _LOOK, f"fp_given=({given})", _BECOME,
        _RUN,
    )  # fmt: skip
    return ("\n".join(lines) + "\n").encode("latin-1")


def is_too_long(words: Sequence[str]) -> bool:
    """Return whether the kernel takes no such arguments and variables: one is too long, or all together (execve(2))."""
    sizes = [len(_bytes(word)) + 1 for word in words]
    stack = resource.getrlimit(resource.RLIMIT_STACK)[0]
    room = _MOST_STACK_BYTES if stack == resource.RLIM_INFINITY else min(stack // 4, _MOST_STACK_BYTES)
    return max(sizes) > 32 * resource.getpagesize() or sum(sizes) + _POINTER_BYTES * len(sizes) > room


def refusal(reason: str, redirections: str) -> bytes:
    """Return a script that reports why there is no process, and ends as Docker does."""
    return f"exec {redirections}\nprintf '%s\\r\\n' {quote(_bytes(reason))}\nexit 126\n".encode("latin-1")


def _bytes(word: str) -> str:
    return word.encode(errors="surrogateescape").decode("latin-1")


# The names begin with `fp_`, and none of these variables is exported, so none reaches the program.
# Only built-ins of the shell are used: an image may have no other program, and PATH is the agent's.
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
"""Finds the directory and the program, all of it inside the sandbox, where no link leads out. Texts and the exit code
equal Docker 20.10 with runc 1.1."""


_BECOME = r"""
if [ -x "$fp_env" ]; then
    set -- "$fp_env" -i "${fp_given[@]}" "$@"
else
    unset $(compgen -e)
    export "${fp_given[@]}" 2>/dev/null
fi
"""
"""Sets the variables. Without `env` in the image, those that bash can have: names of letters, digits and `_`."""


# The subshell forks, because setsid(2) fails for the leader of a process group. The parent passes the exit code on.
_ON_TERMINAL = r"""
if [ -n "$fp_terminal" ] && PATH=/usr/bin:/bin command -v setsid >/dev/null 2>&1; then
    exec 2>/dev/null
    (PATH=/usr/bin:/bin; exec setsid /bin/sh -c 'exec 0<>"$0" 1>&0 2>&0; exec "$@"' "$fp_terminal" "$@")
    exit "$?"
fi
"""
"""Makes the terminal the controlling one: the leader of a new session that opens a terminal gets it. Without `setsid`
in the image the process has the terminal as its streams alone."""


_RUN = (
    _ON_TERMINAL
    + r"""if [ -n "$fp_quiet" ]; then exec >/dev/null 2>&1; fi
exec "$@"
"""
)
"""Becomes the program."""
