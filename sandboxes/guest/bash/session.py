"""What a shell session is: its dump, and the texts that make bash write one and come back from one (pure)."""

# Theory of operation.
#
# A session *is what its dump says*. After each call the shell is replaced by a fresh bash that is restored from the
# dump. So what a dump leaves out ($?, RANDOM's seed, the hash table, history) never crosses calls, in a live sandbox as
# little as in a restored one.
#
# A shell beside survivors is not replaced, because it may have jobs. Its jobs and $! are process state then, reported
# beside the session.
#
# Bash runs one endless loop, in this order:
#   1. finish the dump that the last command has begun, or the first one;
#   2. wait for a line on GO_FD;
#   3. take on the session's options and run the command, which is in the file at COMMAND_FD;
#   4. begin the next dump with what later steps would destroy ($?, options, traps); go to 1.
#
# The agent's command runs in the same bash. It may redefine anything: `\builtin` keeps aliases and functions out, the
# loop is one line that bash has read before it runs, and a dump that does not parse is a failed call and changes no
# session.
#
# Text is bytes read as latin-1: every byte has a character in JSON and comes back as it was.

import functools
import hashlib
import json
import re

from sandboxes.shell_text import Jobs, ShellSession

OURS = 1000
"""The first of our descriptors in a shell, as in `linux/anchor.c`. Commands use descriptors up to some hundred, and
close all of those. The lowest usual limit is 1,024, which is also how many bash can wait for (select(2)). Ours are
close-on-exec, so no program has them."""
RESTORE_FD, LOOP_FD, COMMAND_FD, GO_FD, DUMP_FD = range(OURS, OURS + 5)
"""The shell's descriptors."""
END = b"session-end-of-dump\0"
"""The end of every dump."""
KEPT = "kept"
"""The member of a session that no fresh shell can take on; it gives the reason, and other sessions lack it. Such a
session goes on in its own shell, as beside a background process."""
MOVED = "its directory is no longer where its name leads"
"""The reason if a directory was moved, removed, or is behind a changed link, or cannot be entered any more."""
FORGOTTEN = "bash no longer knows the name of its directory"
"""The reason if `pwd` fails. In a removed directory it prints the old name until `pwd -P` has failed."""
UNREADABLE = "bash cannot read its functions or aliases again"
"""The reason if bash prints something in a form that it does not understand itself."""
NOWHERE = "/proc/self/fd/5"
"""The name of a directory that was removed, where bash has none: equal in each sandbox, and it leads nowhere."""
MAX_DUMP_BYTES = 16 << 20
"""The largest session that is kept. A larger one fails its call; it would be sent with every answer."""

BEGIN_DUMP = " ".join(
    line.strip()
    for line in r"""
    { __session=("$?" "$0" "$-" "$SHELLOPTS"); \builtin set +x; \builtin trap -p >&1004;
    \builtin trap - DEBUG ERR RETURN EXIT; \builtin printf '\0%s' "${__session[@]}" '' >&1004;
    \builtin shopt -q expand_aliases || \builtin printf off >&1004;
    \builtin set +abefkmnptuvxCEHPT -hB +o pipefail; \builtin shopt -u expand_aliases;
    \builtin eval '[[ x ]]'; } >&1000 2>&1000
    """.strip().splitlines()
)
"""The beginning of a dump, right after the command. It reads $?, options and traps first, and then turns traps, options
and aliases off, so that the rest of the dump is read and runs as in a new shell. A trace goes on for two commands,
which show where BASH_XTRACEFD leads. After a command with an unfinished `[[`, bash fails at the next one, so there is
one that is meant for that. `shopt` also brings $BASHOPTS up to date, which the POSIX mode does not. What they print
before that goes to a descriptor that takes no output: a restricted shell (`set -r`) may not open /dev/null for
writing."""
LOST_STATUS = 144
LOST_MARK = "session-lost-its-descriptors"
_LOST = rf"{{ \builtin printf {LOST_MARK}; \builtin exit {LOST_STATUS}; }}"
"""Ends a shell that has lost our descriptors. A command can close them. Under a low limit of open files bash cannot
redirect anything. The mark goes to stdout without a redirection, since none works then."""
RUN = r'\builtin eval "${__session_below:+${BASH_VERSINFO[LINENO=0]+}}$(</proc/self/fd/1002)"'
"""Runs the command. Bash would keep copies of descriptors that it closed for this from 10 on, which commands use. A
command below a line of ours begins with line 1 nevertheless."""
AGAIN = r'\builtin eval "$(</proc/self/fd/1001)"; ' + _LOST
NEEDED = {
    "alias", "builtin", "declare", "enable", "eval", "exit", "hash", "jobs", "printf", "pwd", "read", "set", "shopt",
    "trap", "umask", "unset",
}  # fmt: skip
"""The builtins that our lines use, which a command may disable (`enable -n printf`)."""
_BUILTINS_BACK = (
    r"; { __session_off=$(\builtin enable -n) || { __session_off=$(\enable -n); \enable builtin; }; "
    rf"\builtin enable {' '.join(sorted(NEEDED))}; }} >&1000 2>&1000"
)
"""Notes which builtins are disabled, and enables those that the dump needs."""
_FUNCTION_AWAY = (
    r"; { \declare -f builtin >&1004 || \unset -f builtin; \unset -f builtin; \builtin printf '\0' >&1004; }"
    " >&1000 2>&1000"
)
"""Writes the text of a function that replaces `builtin` before the dump, and removes it."""


def wary_run(*, function: bool, disabled: bool) -> str:
    """Return the text that runs a command after which `builtin` may be a function, or builtins may be disabled."""
    mended = (_BUILTINS_BACK if disabled else "") + (_FUNCTION_AWAY if function else "")
    begin = BEGIN_DUMP.replace('"$?"', '"$__session"')
    return f"{RUN}; {{ __session=$?; }} >&1000 2>&1000{mended}; {begin}; {AGAIN}"


_READ = '-n x"${BASH_SUBSHELL-}${HISTCMD-}${LINENO-}${COMP_WORDBREAKS-}${BASH_ARGV0-}${GROUPS[@]-}"'
"""Reads variables that bash computes, before each command; it is true. Bash remembers the value when one is read, and
`declare -p` shows it from then on. So a call that only read one would show in a shell that stays, but not for a rollout
that found this call's answer in the tree."""
_CALL = (
    " ".join(
        line.strip()
        for line in r"""
    { { \builtin printf '\0%s\0' "$BASHOPTS"; \builtin declare -p; \builtin printf '\0'; \builtin declare -f;
    \builtin printf '\0'; \builtin declare -F; \builtin printf '\0'; \builtin alias -p; \builtin printf '\0';
    \builtin umask; \builtin printf '\0'; \builtin pwd || \builtin printf '!%s\n' "$PWD";
    [[ . -ef ${DIRSTACK[0]} && -x . ]];
    \builtin printf '\0%s' "$?" "${#DIRSTACK[@]}" "${DIRSTACK[@]}" ''; \builtin enable -n;
    \builtin printf '%s\0' "${__session_off-}"; \builtin unset -v __session_off; \builtin jobs -l;
    \builtin printf '\0%s' "$!" "$#" "$@"; \builtin printf '\0%s\0' session-end-of-dump; } >&1004 &&
    \builtin hash -r && [[ @READ@ && '' =~ ^ ]] && \builtin set +o posix; } >&1000 2>&1000 || @LOST@;
    \builtin read -t 2147483647 -r -u 1003 __session || \builtin exit;
    \builtin eval "\builtin unset -v __session; \builtin shopt -s expand_aliases; $__session"; \builtin eval '';
    """.replace("@LOST@", _LOST)
        .replace("@READ@", _READ)
        .strip()
        .splitlines()
    )
    + f" {RUN}; {BEGIN_DUMP}"
)
"""One turn of the loop: finish a dump, wait, take on options, run the command, begin the next dump. The empty `eval`
leaves `$_` empty."""
_ONCE = (
    rf"__session=$(</proc/self/fd/1001) || {_LOST}; "
    r'\builtin eval "\builtin unset -v __session; ${__session:0:%d}"' % len(_CALL)
)
"""Runs the loop's first part, which is one call. To find its end by a pattern takes bash 0.1 ms longer."""
_MANY_TIMES = (
    r'\builtin eval "$(\builtin printf '
    f"'%.0s{_ONCE.replace(chr(92), 2 * chr(92))}; ' {{1..200}}"
    ')"'
)
"""Runs 200 calls, one after the other. A `;` between commands takes some of the stack too, so there are no more."""
LOOP = f"{_CALL}{3 * f'; {_ONCE}'}; {_MANY_TIMES}; {AGAIN}"
"""The loop that the shell runs: finish a dump, wait, take on options, run the command, begin the next dump, repeat. A
loop of bash cannot repeat it, because the command's `break` would end it. An `eval` within an `eval` takes a kilobyte
of the shell's stack each time, and 8 MB are full after 8,000 calls. So the first part is followed by itself: three
times for the shells of a few calls, then 200 times, and only then by an `eval` of the whole. It is one line, so bash
reads it whole before any of it runs. The copies of descriptors that bash keeps meanwhile are close-on-exec. A shell
that cannot write its dump, because a command has closed our descriptors, exits: nothing waits for a dump that cannot
come. The limit of `read` overrides TMOUT."""
_CLOSE_COPIES = " ".join(f"{40 + number}<&-" for number in range(5))
HIDE = (
    f"exec {' '.join(f'{40 + number}<&{OURS + number} {OURS + number}<&-' for number in range(5))}; "
    f"{{ exec {' '.join(f'{OURS + number}<&{11 + number}' for number in range(5))}; }} {_CLOSE_COPIES}; "
    f"exec {_CLOSE_COPIES}"
)
"""Makes our descriptors close-on-exec in a bash that was executed with them and sources this (`START`). To open a
descriptor again after a redirection, bash keeps a copy of it, which is close-on-exec, as its own copies are. The first
number of such a copy is 10, which `START` has taken. It has to be `exec` itself: what `builtin` runs makes no copy
close-on-exec."""
FUNCTIONS = "__session_functions"
"""The variable in which the restoring script leaves the statements that define the session's functions."""
DEFINE = f'\\builtin eval "${{{FUNCTIONS}-}}"'
"""Defines the functions, outside of any file that is sourced: bash names that file in a function's errors."""
START = f'. /proc/self/fd/1000 2>/dev/null; {DEFINE}; \\builtin eval "$(</proc/self/fd/1001)"'
"""The text for `bash -c`. It is short, because `ps` shows it to the agent."""

_FIELDS = 19
"""The number of fields in a whole dump, without the directory stack and the arguments."""
_VOLATILE = {
    "BASH", "BASHOPTS", "BASHPID", "BASH_ALIASES", "BASH_ARGC", "BASH_ARGV", "BASH_ARGV0", "BASH_CMDS", "BASH_COMMAND",
    "BASH_EXECUTION_STRING", "BASH_LINENO", "BASH_MONOSECONDS", "BASH_REMATCH", "BASH_SOURCE", "BASH_SUBSHELL",
    "BASH_TRAPSIG", "BASH_VERSINFO", "BASH_VERSION", "COMP_WORDBREAKS", "DIRSTACK", "EPOCHREALTIME", "EPOCHSECONDS",
    "EUID", "FUNCNAME", "GROUPS", "HISTCMD", "LINENO", "PIPESTATUS", "PPID", "RANDOM", "SECONDS", "SHELLOPTS",
    "SRANDOM", "UID", "_",
}  # fmt: skip
_OWN = "__session"
"""The beginning of the names of our own variables."""
_OFF = "off"
"""What a dump says if aliases are not expanded: no write of its own in the usual case."""
_DYNAMIC = {
    "BASHPID": "i", "BASH_COMMAND": "", "BASH_SUBSHELL": "", "COMP_WORDBREAKS": "", "DIRSTACK": "", "FUNCNAME": "",
    "GROUPS": "", "HISTCMD": "i", "LINENO": "", "RANDOM": "i", "SECONDS": "",
}  # fmt: skip
"""Variables that bash computes until they are unset, with an attribute that they have until then."""
_JOB = re.compile(r"^(\[\d+\][-+ ]|) +(\d+) +(?:Running|Stopped|\|)", re.MULTILINE)
_NUMBER = re.compile(r"[0-9]{1,9}")
_MAX_STATUS = 255
DECLARE = re.compile(r"declare (-\S+) ([A-Za-z_][A-Za-z0-9_]*)")


def is_lost(status: int, out: bytes, err: bytes) -> bool:
    """Return whether a shell that ended without a dump had lost our descriptors."""
    # Bash writes on its standard error that it cannot open the loop; a command may have redirected that.
    return status == LOST_STATUS and (out.endswith(LOST_MARK.encode()) or b": /proc/self/fd/1001: " in err)


def without_loss(out: bytes, err: bytes) -> tuple[bytes, bytes]:
    """Return the output of a shell that has lost our descriptors without what bash and our lines say about them."""
    return out.removesuffix(LOST_MARK.encode()), _LOSS.sub(b"", err)


_LOSS = re.compile(
    rb"(?:^[^\n]*: (?:(?:1000|/proc/self/fd/1001): |redirection error: cannot duplicate fd: )[^\n]*\n)+\Z", re.MULTILINE
)


class MalformedDumpError(ValueError):
    """A dump cannot be read, because a command has interfered with it."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the shell's dump cannot be read: {reason}")


def number(text: str) -> int | None:
    """Return a number that bash has printed; None for any other text, which a command may have written (pure)."""
    # `isdigit` is true of `²` and of any number of digits, and `int` accepts neither.
    return int(text) if _NUMBER.fullmatch(text) else None


def exit_status(text: str) -> int | None:
    """Return an exit status that a shell has printed; None if the text is no number up to 255 (pure)."""
    status = number(text)
    return status if status is not None and status <= _MAX_STATUS else None


def parse_dump(data: bytes) -> tuple[int, ShellSession, Jobs]:
    """Return exit status, session and jobs of a whole dump; `MalformedDumpError` if a command interfered."""
    # Most shells print what the last ones have printed, byte by byte. So the last results are kept.
    if len(data) > MAX_DUMP_BYTES:
        raise MalformedDumpError(f"it is longer than {MAX_DUMP_BYTES} bytes")
    if len(data) > _KEPT_BYTES:
        return _parse(data)
    status, session, jobs = _parse_or_recall(data)
    # A copy, to which callers add members.
    return status, session.copy(), jobs


def _parse(data: bytes) -> tuple[int, ShellSession, Jobs]:
    fields = data[: -len(END)].decode("latin-1").split("\0")
    # The last field is empty: a separator precedes the end mark.
    fields = fields[:-1]
    # After a wary run there is one field more: the text of a function that replaces `builtin`.
    builtin = fields.pop(0) if fields[1:] and number(fields[1]) is None else ""
    if len(fields) < _FIELDS or (depth := number(fields[14])) is None or len(fields) < _FIELDS + depth:
        raise MalformedDumpError(f"{len(fields)} fields")
    traps, status, name, flags, options, off, shopts = fields[:7]
    printed, functions, marks, aliases, umask, cwd, here, _, *dirs = fields[7 : 15 + depth]
    disabled, jobs, last, _, *arguments = fields[15 + depth :]
    forgotten, cwd = cwd.startswith("!"), cwd.removeprefix("!").removesuffix("\n")
    if here != "0" and not cwd.startswith("/"):
        # After `cd ..` in a removed directory, bash calls it so.
        cwd = NOWHERE
    if (code := exit_status(status)) is None or not (re.fullmatch(r"[0-7]{4}\n", umask) and cwd.startswith("/")):
        raise MalformedDumpError("status, umask or directory")
    variables, unset = _statements(printed)
    # Only to see that it can be split, when the traps are set again.
    split_unquoted(traps)
    expanding = set() if off == _OFF else {"expand_aliases"}
    running = [f"{match[1]} {match[2]}" for match in _JOB.finditer(jobs)]
    restricted = {"restricted"} if "r" in flags else set()
    session: ShellSession = {
        "cwd": cwd,
        "dirs": dirs[1:],
        "umask": umask.strip(),
        "arguments": arguments,
        "variables": variables,
        "functions": functions,
        "function_marks": [line for line in marks.splitlines() if not line.startswith("declare -f ")],
        "aliases": aliases,
        "traps": traps,
        "options": sorted((set(options.split(":")) | restricted) - {""}),
        "shopts": sorted({*shopts.split(":"), *expanding} - {""}),
        # A wary run prints those again that it has enabled.
        "disabled": "".join(f"{line}\n" for line in sorted({*disabled.splitlines()})),
        "limits": {},
    }
    if builtin:
        session["builtin"] = builtin
    if name != "bash":
        session["name"] = name
    if unset:
        session["unset"] = unset
    if forgotten or here != "0" or dirs[:1] != [cwd]:
        session[KEPT] = FORGOTTEN if forgotten else MOVED
    return code, session, (*running, *([f"$! {last}"] if last else []))


_parse_or_recall = functools.lru_cache(maxsize=8)(_parse)
"""Eight: the first and the last dumps of the shells of a few sessions."""
_KEPT_BYTES = 1 << 15
"""The longest dump whose result is kept. A plain session's has 3 kB."""


def _statements(text: str) -> tuple[list[str], list[str]]:
    """Return the statements of `declare -p` by name, without volatile ones, and names that bash no longer computes."""
    declared: dict[str, str] = {}
    ordinary = set(_DYNAMIC)
    for statement in split_unquoted(text):
        match = DECLARE.match(statement)
        if match is None:
            raise MalformedDumpError(f"{statement[:40]!r} declares nothing")
        if match[2].startswith(_OWN):
            continue
        # A volatile one without its attribute was unset and set again: since then it is an ordinary variable.
        if match[2] not in _VOLATILE or _DYNAMIC.get(match[2], "") not in match[1]:
            declared[match[2]] = statement
        else:
            ordinary.discard(match[2])
        if match[2] in _VOLATILE and "x" in match[1] and match[2] not in declared:
            # Its value is bash's own, but that children see it is the agent's doing.
            declared[match[2]] = f"declare -x {match[2]}"
    return [declared[name] for name in sorted(declared)], sorted(ordinary)


_STATEMENT = re.compile(
    r"""(?:[^\n"'\\$]++|\$'[^'\\]*+(?:\\.[^'\\]*+)*+'|"[^"\\]*+(?:\\.[^"\\]*+)*+"|'[^']*+'|\\.|\$(?!'))*+\n""",
    re.DOTALL,
)
"""A statement to the end of its line. Its repetitions never give back what they took, so no text takes long."""


def split_unquoted(text: str) -> list[str]:
    """Split a text at the newlines that are not quoted; bash before 5.1 prints values with raw newlines."""
    statements, position = [], 0
    while position < len(text):
        match = _STATEMENT.match(text, position)
        if match is None:
            raise MalformedDumpError(f"{text[position : position + 40]!r} does not end")
        statements.append(match[0][:-1])
        position = match.end()
    return statements


def digest(sessions: dict[str, ShellSession]) -> bytes:
    """Return 32 bytes that are equal for equal sessions."""
    return hashlib.blake2b(json.dumps(sessions, sort_keys=True).encode(), digest_size=32).digest()
