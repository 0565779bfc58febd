"""What a shell session is: its dump, and the texts that make bash write one and come back from one (pure).

A session *is what its dump says*. After each call the shell is replaced by a fresh bash restored from the dump, so what
a dump leaves out ($?, RANDOM's seed, the hash table, history) never crosses calls, live or restored. A shell beside
living processes is not replaced, for it may have jobs: then these and $! are process state, told beside the session.
Text is bytes read as latin-1: every byte has a place in JSON and comes back as it was.
"""

import hashlib
import json
import re

from sandboxes.session_types import Jobs, ShellSession
from sandboxes.shell_quote import quote

RESTORE_FD, LOOP_FD, COMMAND_FD, GO_FD, DUMP_FD = 29, 30, 31, 32, 33
END = b"forkpoint-end-of-dump\0"
MAX_DUMP_BYTES = 16 << 20

_TELL = " ".join(
    line.strip()
    for line in r"""
    { \builtin printf '%s\0' "$?" "$SHELLOPTS" "$BASHOPTS" >&33; \builtin trap -p >&33;
    \builtin trap - DEBUG ERR RETURN EXIT; \builtin set +abefkmnptuvxCEHPT -hB +o pipefail +o posix; }
    >/dev/null 2>&1
    """.strip().splitlines()
)
"""What begins a dump, right behind what it tells of: traps and options are off before the rest runs, and whatever they
print before that goes nowhere."""
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
    + f' {_TELL}; \\builtin eval "$(</proc/self/fd/30)"'
)
"""What the shell does for ever: tell the rest of a dump, wait, take on its session's options, run the command, begin
the next dump, again.

One line, so it is read whole before any of it runs.

`\\builtin`: no alias of the user's gets between. Our descriptors are closed for the command and its children; the
copies that bash keeps meanwhile are close-on-exec.
"""
START = '. /proc/self/fd/29 2>/dev/null; \\builtin eval "$(</proc/self/fd/30)"'
"""What `bash -c` is given: short, for `ps` shows it."""

_FIELDS = 15
_READY = f"\\builtin :; {_TELL}"
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
"""Characters, so that a pipe holds them."""
_JOB = re.compile(r"^(\[\d+\][-+ ]|) +(\d+) +(?:Running|Stopped|\|)", re.MULTILINE)
_DECLARE = re.compile(r"declare (-\S+) ([A-Za-z_][A-Za-z0-9_]*)")


class MalformedDumpError(ValueError):
    def __init__(self, reason: str) -> None:
        super().__init__(f"the shell's dump cannot be read: {reason}")


def parse_dump(data: bytes) -> tuple[int, ShellSession, Jobs]:
    """Return the exit status, the session and the jobs that a whole dump tells of.

    Raises:
        MalformedDump: a command has interfered with it. The session is then what it was before.
    """
    if len(data) > MAX_DUMP_BYTES:
        raise MalformedDumpError(f"it is longer than {MAX_DUMP_BYTES} bytes")
    fields = data[: -len(END)].decode("latin-1").split("\0")
    # A trailing separator stands before the end mark.
    fields = fields[:-1]
    if len(fields) < _FIELDS:
        raise MalformedDumpError(f"{len(fields)} fields")
    status, options, shopts, traps = fields[0], fields[1], fields[2], fields[3]
    variables, functions, names, aliases, umask, cwd, dirs, disabled, jobs, last, _, *arguments = fields[4:]
    if not (status.isdigit() and re.fullmatch(r"[0-7]{4}\n", umask) and cwd.startswith("/")):
        raise MalformedDumpError("status, umask or directory")
    found = [f"{match[1]} {match[2]}" for match in _JOB.finditer(jobs)]
    told: ShellSession = {
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
    return int(status), told, (*found, *([f"$! {last}"] if last else []))


def _statements(text: str) -> list[str]:
    """Split `declare -p` into one statement a variable, sorted by name, volatile ones left out.

    Values may hold newlines: bash before 5.1 prints them raw between double quotes.
    """
    found: dict[str, str] = {}
    for statement in _split_unquoted(text):
        match = _DECLARE.match(statement)
        if match is None:
            raise MalformedDumpError(f"{statement[:40]!r} declares nothing")
        if match[2] not in _VOLATILE:
            found[match[2]] = statement
    return [found[name] for name in sorted(found)]


_PIECE = re.compile(r"""\$'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|'[^']*'|\\.|\n|[^\n"'\\$]+|.""", re.DOTALL)


def _split_unquoted(text: str) -> list[str]:
    statements, start = [], 0
    for piece in _PIECE.finditer(text):
        if piece[0] == "\n":
            statements.append(text[start : piece.start()])
            start = piece.end()
    return statements


def restore_script(session: ShellSession | None, workdir: str) -> bytes:
    """Return what a fresh bash sources to be session; None is a session that nothing has happened in."""
    # The shell must not inherit pid 1's shelter from the OOM killer.
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
    # Exported from birth; `declare -- NAME=value` alone would leave that so.
    lines += [f"\\builtin declare +x {name}" for name in ("PWD", "OLDPWD", "SHLVL") if name in declared]
    if session["arguments"]:
        lines.append("set -- " + " ".join(quote(argument) for argument in session["arguments"]))
    # pushd prints where it stands; nobody asked.
    text = "{\n" + "\n".join(lines) + "\n} >/dev/null\n"
    # Functions before variables: a variable called as a builtin's option (POSIXLY_CORRECT) changes how they are read.
    parts = [text, session["functions"], "\n".join(session["function_marks"]), "\n".join(session["variables"])]
    parts += [session["aliases"], f"umask {session['umask']}", session["disabled"], _READY + "\n"]
    return "\n".join(parts).encode("latin-1")


def orders(session: ShellSession | None, command: bytes) -> tuple[bytes, bytes]:
    """Return the line that lets the shell go, with the options and traps of its session, and what it evaluates then.

    Not all in one: bash reads a line whole before it runs any of it, so they would be lost with a command that is none,
    and its lines would be counted from another one. What acts on our lines too stands on the command's first.
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
    # What a user's IFS takes from the end of what is read, it takes from a remark.
    line = "; ".join(early) + " # forkpoint\n" if early else "\n"
    return line.encode("latin-1"), "".join(f"{order}; " for order in late).encode("latin-1") + command


def _on_one_line(quoted: str) -> str:
    return quoted.replace("\n", "'$'\\n''")


def digest(sessions: dict[str, ShellSession]) -> bytes:
    """Return 32 bytes that equal sessions share."""
    return hashlib.blake2b(json.dumps(sessions, sort_keys=True).encode(), digest_size=32).digest()
