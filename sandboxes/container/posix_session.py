"""Sessions of images that have no bash: a dump of what any POSIX shell can print, and the way back (pure).

As with bash a session *is* its dump, and the shell is replaced by a fresh one after each call. A POSIX shell cannot
print its functions, so they last for one call: `. ./functions.sh` where they are needed, or use an image with bash.
"""

import re
from collections.abc import Collection, Mapping

from sandboxes.container.boot_scripts import BOX
from sandboxes.guest.bash_session import END, MAX_DUMP_BYTES, MalformedDumpError
from sandboxes.session_types import Jobs, ShellSession
from sandboxes.shell_quote import quote

_FIELDS = 11
_OPTIONS = "aefuvxC"
_VOLATILE = frozenset(["PPID", "LINENO", "FUNCNAME", "RANDOM", "SECONDS", "EPOCHSECONDS", "EPOCHREALTIME", "_"])
_VOLATILE_PREFIXES = ("__forkpoint", "BASH", "SHELLOPTS", "DIRSTACK", "PIPESTATUS", "GROUPS", "UID", "EUID")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PIECE = re.compile(r"""'[^']*'|"(?:[^"\\]|\\.)*"|\\.|\n|[^\n"'\\]+""", re.DOTALL)


def loop(name: str) -> str:
    """Return what the shell in directory name does for ever: dump, wait, run the command, tell its status, again."""
    here = f"{BOX}/{name}"
    fields = ["set", "export -p", "readonly -p", "alias", "umask", "pwd", "jobs -l"]
    dumped = " ".join(f"command {field}; command printf '\\0';" for field in fields)
    return (
        "{ { command printf '%s\\0' \"$-\"; command trap; command printf '\\0'; command set +aefuvxC; "
        f"{dumped} command printf '%s\\0' \"$!\" \"$@\"; command printf '%s\\0' {END.decode()[:-1]}; }} "
        f">{here}/dump; }} 2>/dev/null\n"
        f"command read -r __forkpoint <{here}/go || exit; command unset __forkpoint\n"
        f". {here}/command\n"
        f"{{ command printf '%s\\0' \"$?\" >{here}/dump; }} 2>/dev/null\n"
        f". {here}/loop\n"
    )


def ready(name: str) -> str:
    """Return what the shell in directory name says when it is restored: a status, as the loop's first dump follows."""
    return f"{{ command printf '0\\0' >{BOX}/{name}/dump; }} 2>/dev/null"


def parse_dump(data: bytes) -> tuple[int, ShellSession, Jobs]:
    """Return exit status, session and jobs, as `sandboxes.guest.bash_session.parse_dump` does.

    Raises:
        MalformedDump: a command has interfered with it.
    """
    if len(data) > MAX_DUMP_BYTES:
        raise MalformedDumpError(f"it is longer than {MAX_DUMP_BYTES} bytes")
    fields = data[: -len(END)].decode("latin-1").split("\0")[:-1]
    if len(fields) < _FIELDS:
        raise MalformedDumpError(f"{len(fields)} fields")
    status, options, traps, variables, exported, read_only, aliases, umask, cwd, jobs, last, *arguments = fields
    if not (status.isdigit() and re.fullmatch(r"[0-7]{3,4}\n", umask) and cwd.startswith("/")):
        raise MalformedDumpError("status, umask or directory")
    told: ShellSession = {
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
    return int(status), told, (*sorted(jobs.splitlines()), *([f"$! {last}"] if last else []))


def _statements(text: str) -> list[str]:
    statements, start = [], 0
    for piece in _PIECE.finditer(text):
        if piece[0] == "\n":
            statements.append(text[start : piece.start()])
            start = piece.end()
    return statements


def _volatile(statement: str) -> bool:
    match = _NAME.match(statement)
    if match is None or statement[match.end() : match.end() + 1] != "=":
        raise MalformedDumpError(f"{statement[:40]!r} is no assignment")
    return match[0] in _VOLATILE or match[0].startswith(_VOLATILE_PREFIXES)


def _names(text: str) -> list[str]:
    words = (statement.split(" ", 1)[-1] for statement in _statements(text))
    found = {match[0] for word in words if (match := _NAME.match(word))}
    return sorted(name for name in found if name not in _VOLATILE and not name.startswith(_VOLATILE_PREFIXES))


def restore_script(
    session: ShellSession | None, workdir: str, environment: Mapping[str, str], inherited: Collection[str], ready: str
) -> bytes:
    """Return what a fresh shell sources to be session. inherited: variables it was born with; ready: its last line."""
    lines = ["command printf 0 >/proc/self/oom_score_adj"]
    if session is None:
        lines += [f"export {name}={quote(value)}" for name, value in environment.items()]
        lines += [f"unset {name}" for name in sorted(set(inherited) - environment.keys())]
        lines += [f"command cd -- {quote(workdir)} || command cd /", "unset OLDPWD"]
        return "\n".join([*lines, ready, ""]).encode("latin-1")
    have = {match[0] for line in session["variables"] if (match := _NAME.match(line))}
    lines.append(f"command cd -- {quote(session['cwd'])} || command cd /")
    lines += [f"unset {name}" for name in sorted({*inherited, "OLDPWD"} - have)]
    lines += session["variables"]
    lines += [f"export {name}" for name in session["exported"]]
    lines += [f"alias {alias}" for alias in session["aliases"]]
    lines += [f"umask {session['umask']}"]
    lines += [f"readonly {name}" for name in session["read_only"]]
    if session["arguments"]:
        lines.append("set -- " + " ".join(map(quote, session["arguments"])))
    return "\n".join([*lines, ready, ""]).encode("latin-1")


def orders(session: ShellSession | None, command: bytes) -> tuple[bytes, bytes]:
    """Return the line that lets the shell go, and what it sources then: first the traps and options of its session.

    On the command's first line, so that its lines are counted from one; a command that is none ends this shell anyway.
    """
    arming = ""
    if session is not None:
        arming = "".join(f"{trap}; " for trap in _statements(session["traps"]))
        arming += f"set -{session['options']}; " if session["options"] else ""
    return b"\n", arming.encode("latin-1") + command + b"\n"
