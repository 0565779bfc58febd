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

import hashlib
import json
import re

from sandboxes.shell_text import Jobs, ShellSession, quote

RESTORE_FD, LOOP_FD, COMMAND_FD, GO_FD, DUMP_FD = 29, 30, 31, 32, 33
"""The shell's descriptors: high, so that commands do not meet them by chance."""
END = b"forkpoint-end-of-dump\0"
"""The end of every dump."""
MAX_DUMP_BYTES = 16 << 20
"""The largest session that is kept. A larger one fails its call; it would be sent with every answer."""

_BEGIN_DUMP = " ".join(
    line.strip()
    for line in r"""
    { \builtin printf '%s\0' "$?" "$SHELLOPTS" "$BASHOPTS" >&33; \builtin trap -p >&33;
    \builtin trap - DEBUG ERR RETURN EXIT; \builtin set +abefkmnptuvxCEHPT -hB +o pipefail +o posix; }
    >/dev/null 2>&1
    """.strip().splitlines()
)
"""The beginning of a dump, right after the command.

It reads $?, options and traps first, and then turns traps and options off, so that the rest of the dump runs as in a
new shell. What they print before that goes nowhere.
"""
LOOP = (
    " ".join(
        line.strip()
        for line in r"""
    { { \builtin printf '\0'; \builtin declare -p; \builtin printf '\0'; \builtin declare -f; \builtin printf '\0';
    \builtin declare -F; \builtin printf '\0'; \builtin alias -p; \builtin printf '\0'; \builtin umask;
    \builtin printf '\0'; \builtin pwd; \builtin printf '\0'; \builtin dirs -l -p; \builtin printf '\0';
    \builtin enable -n; \builtin printf '\0'; \builtin jobs -l;
    \builtin printf '\0%s' "$!" "$#" "$@"; \builtin printf '\0%s\0' forkpoint-end-of-dump; } >&33;
    \builtin hash -r; [[ '' =~ ^ ]]; } >/dev/null 2>&1;
    \builtin read -r -u 32 __forkpoint || \builtin exit;
    \builtin eval "\builtin unset -v __forkpoint; \builtin : ''; $__forkpoint";
    \builtin eval "$(</proc/self/fd/31)" 29<&- 30<&- 31<&- 32<&- 33>&-;
    """.strip().splitlines()
    )
    + f' {_BEGIN_DUMP}; \\builtin eval "$(</proc/self/fd/30)"'
)
"""The loop that the shell runs: finish a dump, wait, take on options, run the command, begin the next dump, repeat.

It is one line, so bash reads it whole before any of it runs. Our descriptors are closed for the command and its
children. The copies that bash keeps meanwhile are close-on-exec.
"""
START = '. /proc/self/fd/29 2>/dev/null; \\builtin eval "$(</proc/self/fd/30)"'
"""The text for `bash -c`. It is short, because `ps` shows it to the agent."""

_FIELDS = 15
"""The smallest number of fields in a whole dump."""
_READY = f"\\builtin :; {_BEGIN_DUMP}"
_DEFAULT_OPTIONS = frozenset({"braceexpand", "hashall", "interactive-comments"})
_DEFAULT_SHOPTS = [
    "checkwinsize",
    "cmdhist",
    "complete_fullquote",
    "expand_aliases",
    "extquote",
    "force_fignore",
    "globasciiranges",
    "globskipdots",
    "hostcomplete",
    "interactive_comments",
    "patsub_replacement",
    "progcomp",
    "promptvars",
    "sourcepath",
]
_VOLATILE = frozenset(
    [
        "BASH",
        "BASHOPTS",
        "BASHPID",
        "BASH_ALIASES",
        "BASH_ARGC",
        "BASH_ARGV",
        "BASH_ARGV0",
        "BASH_CMDS",
        "BASH_COMMAND",
        "BASH_EXECUTION_STRING",
        "BASH_LINENO",
        "BASH_MONOSECONDS",
        "BASH_REMATCH",
        "BASH_SOURCE",
        "BASH_SUBSHELL",
        "BASH_TRAPSIG",
        "BASH_VERSINFO",
        "BASH_VERSION",
        "COMP_WORDBREAKS",
        "DIRSTACK",
        "EPOCHREALTIME",
        "EPOCHSECONDS",
        "EUID",
        "FUNCNAME",
        "GROUPS",
        "HISTCMD",
        "LINENO",
        "PIPESTATUS",
        "PPID",
        "RANDOM",
        "SECONDS",
        "SHELLOPTS",
        "SRANDOM",
        "UID",
        "_",
        "__forkpoint",
    ]
)
_BORN_WITH = [
    "HOSTNAME",
    "HOSTTYPE",
    "IFS",
    "MACHTYPE",
    "OLDPWD",
    "OPTERR",
    "OPTIND",
    "OSTYPE",
    "PATH",
    "PS4",
    "PWD",
    "SHLVL",
    "TERM",
]
_SHOWING, _DEBUG = ("verbose", "xtrace"), " DEBUG"
_MAX_EARLY = 1 << 15
"""The most characters of orders on the line that lets the shell go on: a pipe has to hold them."""
_JOB = re.compile(r"^(\[\d+\][-+ ]|) +(\d+) +(?:Running|Stopped|\|)", re.MULTILINE)
_DECLARE = re.compile(r"declare (-\S+) ([A-Za-z_][A-Za-z0-9_]*)")


class MalformedDumpError(ValueError):
    """A dump cannot be read, because a command has interfered with it."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the shell's dump cannot be read: {reason}")


def parse_dump(data: bytes) -> tuple[int, ShellSession, Jobs]:
    """Return the exit status, the session and the jobs of a whole dump.

    Raises:
        MalformedDumpError: A command has interfered with the dump. The session is then what it was before.
    """
    if len(data) > MAX_DUMP_BYTES:
        raise MalformedDumpError(f"it is longer than {MAX_DUMP_BYTES} bytes")
    fields = data[: -len(END)].decode("latin-1").split("\0")
    # The last field is empty: a separator precedes the end mark.
    fields = fields[:-1]
    if len(fields) < _FIELDS:
        raise MalformedDumpError(f"{len(fields)} fields")
    status, options, shopts, traps = fields[0], fields[1], fields[2], fields[3]
    variables, functions, names, aliases, umask, cwd, dirs, disabled, jobs, last, _, *arguments = fields[4:]
    if not (status.isdigit() and re.fullmatch(r"[0-7]{4}\n", umask) and cwd.startswith("/")):
        raise MalformedDumpError("status, umask or directory")
    running = [f"{match[1]} {match[2]}" for match in _JOB.finditer(jobs)]
    session: ShellSession = {
        "cwd": cwd.removesuffix("\n"),
        "dirs": dirs.splitlines()[1:],
        "umask": umask.strip(),
        "arguments": arguments,
        "variables": _statements(variables),
        "functions": functions,
        "function_marks": [line for line in names.splitlines() if not line.startswith("declare -f ")],
        "aliases": aliases,
        "traps": traps,
        "options": sorted(set(options.split(":")) - {""}),
        "shopts": sorted(set(shopts.split(":")) - {""}),
        "disabled": disabled,
        "limits": {},
    }
    return int(status), session, (*running, *([f"$! {last}"] if last else []))


def _statements(text: str) -> list[str]:
    """Split the output of `declare -p` into one statement for each variable, sorted by name, without volatile ones."""
    declared: dict[str, str] = {}
    for statement in _split_unquoted(text):
        match = _DECLARE.match(statement)
        if match is None:
            raise MalformedDumpError(f"{statement[:40]!r} declares nothing")
        if match[2] not in _VOLATILE:
            declared[match[2]] = statement
    return [declared[name] for name in sorted(declared)]


_PIECE = re.compile(r"""\$'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|'[^']*'|\\.|\n|[^\n"'\\$]+|.""", re.DOTALL)


def _split_unquoted(text: str) -> list[str]:
    """Split a text at the newlines that are not quoted; bash before 5.1 prints values with raw newlines."""
    statements, start = [], 0
    for piece in _PIECE.finditer(text):
        if piece[0] == "\n":
            statements.append(text[start : piece.start()])
            start = piece.end()
    return statements


def restore_script(session: ShellSession | None, workdir: str) -> bytes:
    """Return what a fresh bash sources to become a session.

    Args:
        session: The session; None for a new one.
        workdir: The directory of a new session.
    """
    # Pid 1 is sheltered from the OOM killer, and the shell must not inherit that.
    lines = ["\\builtin printf 0 >/proc/self/oom_score_adj"]
    if session is None:
        lines += ["shopt -s expand_aliases", f"\\builtin cd -- {quote(workdir)} || \\builtin cd /", "unset -v OLDPWD"]
        return "\n".join([*lines, _READY, ""]).encode("latin-1")
    shopts = session["shopts"]
    lines.append("shopt -s " + " ".join(shopts) if shopts else ":")
    lines += [f"shopt -u {name}" for name in _DEFAULT_SHOPTS if name not in shopts]
    lines.append(f"\\builtin cd -- {quote(session['cwd'])} || \\builtin cd /")
    lines += [f"pushd -n -- {quote(folder)}" for folder in reversed(session["dirs"])]
    declared = {match[2] for line in session["variables"] if (match := _DECLARE.match(line))}
    lines += [f"unset -v {name}" for name in _BORN_WITH if name not in declared]
    # Bash exports these three from birth, and `declare -- NAME=value` alone does not undo that.
    lines += [f"\\builtin declare +x {name}" for name in ("PWD", "OLDPWD", "SHLVL") if name in declared]
    if session["arguments"]:
        lines.append("set -- " + " ".join(quote(argument) for argument in session["arguments"]))
    # pushd and cd print directories.
    text = "{\n" + "\n".join(lines) + "\n} >/dev/null\n"
    # Functions come before variables: POSIXLY_CORRECT, once set, changes how functions are read.
    parts = [text, session["functions"], "\n".join(session["function_marks"]), "\n".join(session["variables"])]
    parts += [session["aliases"], f"umask {session['umask']}", session["disabled"], _READY + "\n"]
    return "\n".join(parts).encode("latin-1")


def orders(session: ShellSession | None, command: bytes) -> tuple[bytes, bytes]:
    """Return the line that lets the shell go on, and the text that it evaluates then.

    The session's options and traps are on the line, not in the text: bash parses the text whole before it runs any of
    it, so a command with a syntax error would lose them, and line numbers in errors would be wrong. Only what would act
    on our own lines too (xtrace, verbose, DEBUG traps) is put at the beginning of the command.

    Args:
        session: The session that the shell was restored from; None for a new one.
        command: The agent's command.
    """
    if session is None:
        return b"\n", command
    options = set(session["options"])
    early = [f"\\builtin set +o {name}" for name in sorted(_DEFAULT_OPTIONS - options)]
    extra = sorted(options - _DEFAULT_OPTIONS, key=lambda name: (name in {"errexit", "verbose", "xtrace"}, name))
    early += [f"\\builtin set -o {name}" for name in extra if name not in _SHOWING]
    traps = [f"\\builtin {_on_one_line(trap)}" for trap in _split_unquoted(session["traps"])]
    early += [trap for trap in traps if not trap.endswith(_DEBUG)]
    late = [trap for trap in traps if trap.endswith(_DEBUG)]
    late += [f"set -o {name}" for name in extra if name in _SHOWING]
    if sum(map(len, early)) > _MAX_EARLY:
        early, late = [], early + late
    # `read` strips characters of the user's IFS from the end of a line; here it can strip only from a comment.
    line = "; ".join(early) + " # forkpoint\n" if early else "\n"
    return line.encode("latin-1"), "".join(f"{order}; " for order in late).encode("latin-1") + command


def _on_one_line(quoted: str) -> str:
    return quoted.replace("\n", "'$'\\n''")


def digest(sessions: dict[str, ShellSession]) -> bytes:
    """Return 32 bytes that are equal for equal sessions."""
    return hashlib.blake2b(json.dumps(sessions, sort_keys=True).encode(), digest_size=32).digest()
