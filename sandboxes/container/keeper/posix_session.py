"""Sessions of images without bash: a dump of what any POSIX shell can print, and its restore (pure).

As with bash, a session *is* its dump, and a fresh shell replaces the old one after each call. A POSIX shell cannot
print its functions, so a function lasts for one call only: agents source a file with them, or use an image with bash.

A dump is a sequence of fields that NUL bytes end: exit status, options, traps, variables, exported and read-only
variables, aliases, umask, directory, jobs, the pid of the last background process, and the positional parameters.
"""

import re
from collections.abc import Collection, Mapping

from sandboxes.container.boot_scripts import BOX
from sandboxes.guest.bash.session import (
    END,
    KEPT,
    LOST_MARK,
    LOST_STATUS,
    MAX_DUMP_BYTES,
    MalformedDumpError,
    exit_status,
)
from sandboxes.shell_text import Jobs, ShellSession, quote

_FIELDS = 11
"""Number of a dump's fields before the positional parameters."""

_OPTIONS = "aefuvxC"
"""Shell options that belong to a session; the others describe how the shell was started."""

_VOLATILE = frozenset(["PPID", "LINENO", "FUNCNAME", "RANDOM", "SECONDS", "EPOCHSECONDS", "EPOCHREALTIME", "_"])
"""Variables that a shell sets by itself, with values that differ between equal runs."""

_VOLATILE_PREFIXES = ("__forkpoint", "BASH", "SHELLOPTS", "DIRSTACK", "PIPESTATUS", "GROUPS", "UID", "EUID")
"""Prefixes of such variables, and of ours."""

_NOWHERE = "{ while :; do :; done & command cd /proc/$!; kill -KILL $!; wait; }"
"""See `bash.restore`: enters the directory of a process that ends then."""

_CALLS = 50
"""How many calls a loop's text has: 35 kB. dash's stack holds 9,000 files within each other, and busybox's 7,000."""

_LOST = rf"{{ \command printf {LOST_MARK}; exit {LOST_STATUS}; }}"
"""Ends a shell that cannot open its FIFOs, because the command has lowered the limit of open files."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_TOKEN = re.compile(r"""'[^']*'|"(?:[^"\\]|\\.)*"|\\.|\n|[^\n"'\\]+""", re.DOTALL)


def loop(name: str) -> str:
    """Return the loop of the shell in a directory: dump the session, wait, run the command, print its status, repeat.

    A loop of the shell cannot repeat it, because the command's `break` would end it. A file that sources itself takes
    some of the shell's stack and a descriptor each time. So the file has `_CALLS` calls, one after the other.

    `command` in front of each built-in avoids functions of the agent's with such names.
    """
    here = f"{BOX}/{name}"
    fields = ["set", "export -p", "readonly -p", "alias", "umask", "pwd", ":"]
    dumped = " ".join(f"\\command {field}; \\command printf '\\0';" for field in fields)
    once = (
        # `set +aefuvx` makes the dump itself safe: `-e` would end the shell at a failing line, `-x` would write to the
        # agent's stderr, `-u` would fail at `$!`.
        "{ { \\command printf '%s\\0' \"$-\"; \\command trap; \\command printf '\\0'; \\command set +aefuvxC; "
        f"{dumped} \\command printf '%s\\0' \"$!\" \"$@\"; \\command printf '%s\\0' {END.decode()[:-1]}; }} "
        f">{here}/dump; }} 2>/dev/null\n"
        # The shell blocks here between calls, without a CPU. If the FIFO is gone, the container is, so it exits.
        f"\\command read -r __forkpoint <{here}/go || {_LOST}; \\command unset __forkpoint\n"
        f". {here}/command\n"
        # A function does not replace a special built-in (POSIX, 2.9.1.4), so `unset` is the shell's own. It removes a
        # function that would replace `command`.
        "__forkpoint=$?; { \\unset -f command; "
        f"\\command printf '%s\\0' \"$__forkpoint\" >{here}/dump; }} 2>/dev/null\n"
    )
    return once * _CALLS + f". {here}/loop\n"


def ready(name: str) -> str:
    """Return the command that a restored shell starts with: it prints a status, which the loop's first dump needs."""
    return f"{{ command printf '0\\0' >{BOX}/{name}/dump; }} 2>/dev/null"


def parse_dump(data: bytes) -> tuple[int, ShellSession, Jobs]:
    """Return exit status, session and jobs, as `sandboxes.guest.bash.session.parse_dump` does.

    Raises:
        MalformedDumpError: A command has interfered with the dump.
    """
    # Bounds the work below; the agent decides how long its variables are.
    if len(data) > MAX_DUMP_BYTES:
        raise MalformedDumpError(f"it is longer than {MAX_DUMP_BYTES} bytes")
    fields = data[: -len(END)].decode("latin-1").split("\0")[:-1]
    if len(fields) < _FIELDS:
        raise MalformedDumpError(f"{len(fields)} fields")
    status, options, traps, variables, exported, read_only, aliases, umask, cwd, _, last, *arguments = fields
    # `jobs` would make such a shell forget those that have ended. So the last one may always be waited for.
    # A command may write to the dump's FIFO itself. A wrong form ends the session's shell instead of becoming a state.
    if (code := exit_status(status)) is None or not (re.fullmatch(r"[0-7]{3,4}\n", umask) and cwd.startswith("/")):
        raise MalformedDumpError("status, umask or directory")
    session: ShellSession = {
        "cwd": cwd.removesuffix("\n"),
        "umask": umask.strip(),
        "arguments": arguments,
        "variables": [line for line in sorted(_statements(variables)) if not _volatile(line)],
        "exported": _names(exported),
        "read_only": _names(read_only),
        "aliases": sorted(line.removeprefix("alias ") for line in _statements(aliases)),
        "traps": traps,
        "options": "".join(sorted(set(options) & set(_OPTIONS))),
        "limits": {},
    }
    return code, session, ((f"[?] {last}", f"$! {last}") if last else ())


def _statements(text: str) -> list[str]:
    """Return the statements of a text, one a line; a quoted newline does not end a statement."""
    statements, start = [], 0
    for token in _TOKEN.finditer(text):
        # A newline inside quotes is part of its token, so only newlines between statements come as tokens of their own.
        if token[0] == "\n":
            statements.append(text[start : token.start()])
            start = token.end()
    return statements


def _volatile(statement: str) -> bool:
    """Return whether an assignment is of a volatile variable."""
    match = _NAME.match(statement)
    # A command may have printed into the dump. What is no assignment would be run as a command by the restored shell.
    if match is None or statement[match.end() : match.end() + 1] != "=":
        raise MalformedDumpError(f"{statement[:40]!r} is not an assignment")
    return match[0] in _VOLATILE or match[0].startswith(_VOLATILE_PREFIXES)


def _names(text: str) -> list[str]:
    """Return the variables that `export -p` or `readonly -p` lists, sorted, without volatile ones."""
    entries = (statement.split(" ", 1)[-1] for statement in _statements(text))
    names = {match[0] for entry in entries if (match := _NAME.match(entry))}
    return sorted(name for name in names if name not in _VOLATILE and not name.startswith(_VOLATILE_PREFIXES))


def restore_script(
    session: ShellSession | None,
    workdir: str,
    environment: Mapping[str, str],
    inherited: Collection[str],
    ready: str,
    pristine: ShellSession | None = None,
) -> bytes:
    """Return the script that a fresh shell sources to become a session.

    Args:
        session: The session; None starts a new one.
        workdir: The directory of a new session.
        environment: The variables of a new session.
        inherited: Names of the variables that the shell inherits from the anchor.
        ready: The script's last line.
        pristine: A new session of this sandbox; None for the first.
    """
    # The shell is born with the anchor's protected score. A process may raise its own score, but not lower it
    # (proc_pid_oom_score_adj(5)).
    lines = ["command printf 0 >/proc/self/oom_score_adj"]
    if session is None:
        lines += [f"export {name}={quote(value)}" for name, value in environment.items()]
        lines += [f"unset {name}" for name in sorted(set(inherited) - environment.keys())]
        # See `bash.restore.restore_script`.
        folder, otherwise = (workdir, "command cd /") if pristine is None else (pristine["cwd"], "exit 1")
        lines += [f"command cd -- {quote(folder)} || {otherwise}", "unset OLDPWD"]
        return "\n".join([*lines, ready, ""]).encode("latin-1")
    # Read-only variables and positional parameters come last: an assignment to a read-only variable ends the shell.
    have = {match[0] for line in session["variables"] if (match := _NAME.match(line))}
    # A shell that cannot come back to its directory must not run a command in another one.
    otherwise = _NOWHERE if KEPT in session else "exit 1"
    lines.append(f"command cd -- {quote(session['cwd'])} || {otherwise}")
    # A variable that the session has unset would come back from the anchor's environment.
    lines += [f"unset {name}" for name in sorted({*inherited, "OLDPWD"} - have)]
    # These lines were checked to be assignments when the dump was parsed (`_volatile`).
    lines += session["variables"]
    lines += [f"export {name}" for name in session["exported"]]
    lines += [f"alias {alias}" for alias in session["aliases"]]
    lines += [f"umask {session['umask']}"]
    lines += [f"readonly {name}" for name in session["read_only"]]
    if session["arguments"]:
        lines.append("set -- " + " ".join(map(quote, session["arguments"])))
    return "\n".join([*lines, ready, ""]).encode("latin-1")


def orders(session: ShellSession | None, command: bytes) -> tuple[bytes, bytes]:
    """Return the line that lets the shell run, and what it sources then: traps and options, then the command.

    All of it is on the command's first line, so that the shell counts the command's lines from one.
    """
    prefix = ""
    if session is not None:
        # Traps come with the command and not with the restore: a trap on EXIT or DEBUG would run in the restore itself.
        prefix = "".join(f"{trap}; " for trap in _statements(session["traps"]))
        prefix += f"set -{session['options']}; " if session["options"] else ""
    return b"\n", prefix.encode("latin-1") + command + b"\n"
