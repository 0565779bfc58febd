"""Commands that run in a shell of their own, on a rollout whose shell keeps its state. Pure.

Harnesses expect `docker exec`: directory, variables, user and standard input belong to one command. The line that this
module returns runs it in a subshell of the rollout's session, which stays as it is.
"""

import base64
import shlex
from collections.abc import Mapping, Sequence

_RUNUSER = "/usr/sbin/runuser"
"""By its absolute path, because a command may have changed what `PATH` finds."""
_ROOT = ("root", "0")
"""What harnesses call the user root."""


def line_of(
    argv: Sequence[str],
    *,
    cwd: str | None = None,
    env: Mapping[str, str] | None = None,
    user: str | None = None,
    stdin: bytes | None = None,
    stdin_path: str | None = None,
    posix: bool = False,
) -> str:
    """Return a line for bash, or for any POSIX shell, that runs a program in a subshell.

    None is the session's directory and user, and no standard input; `stdin` becomes part of the line, `stdin_path` is a
    file in the sandbox. A line for any POSIX shell (`posix`) has no `user`.
    """
    words = list(argv)
    if user is not None and user not in _ROOT:
        words = [_RUNUSER, "-u", user, "--", *words]
    steps = [] if cwd is None else [f"cd -- {shlex.quote(cwd)}"]
    steps += [f"export {name}={shlex.quote(value)}" for name, value in sorted((env or {}).items())]
    before = ""
    if user in _ROOT:
        # Most shells are root's already, and small images have no runuser. Nothing can change EUID in bash.
        steps.append(f"set -- && {{ ((EUID == 0)) || set -- {_RUNUSER} -u root --; }}")
        before = '"$@" '
    piped = stdin is not None and posix
    steps.append(f"exec {before}{shlex.join(words)}" + ("" if piped else f" <{_input(stdin, stdin_path)}"))
    line = f"({' && '.join(steps)})"
    # `printf` is part of every shell, and base64 is not in every image.
    return f"printf '{_escaped(stdin or b'')}' | {line}" if piped else line


def _input(stdin: bytes | None, path: str | None) -> str:
    if stdin is None:
        return shlex.quote(path or "/dev/null")
    # In base 64, bytes and line ends of any kind reach the program as they are.
    return f" <(exec base64 -d <<< '{base64.b64encode(stdin).decode()}')"


def _escaped(content: bytes) -> str:
    """Return bytes as a format of `printf` in single quotes, which prints them as they are."""
    return "".join(_ESCAPES.get(byte, chr(byte)) for byte in content)


_ESCAPES = {byte: f"\\{byte:03o}" for byte in range(256) if not 32 <= byte < 127 or chr(byte) in "'-%\\"}
"""Bytes that mean something else in such a format or at its begin, or are no printable ASCII."""
