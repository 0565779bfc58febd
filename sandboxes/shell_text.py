"""Shell sessions as text: the types of a session's dump, and quoting for POSIX shells."""

from typing import Any

ShellSession = dict[str, Any]
"""JSON: cwd, dirs, umask, arguments, variables, functions, aliases, traps, options, disabled builtins, limits."""

Jobs = tuple[str, ...]
"""The jobs of a shell: `[2]+ 31` and ` 32` for the processes of job 2, `$! 32` for the last background process."""

AGENT_SCORE = 500
"""The OOM score of processes that run what an agent asked for; see `linux.oom_score`."""
BECOME_AGENT = f"\\builtin printf {AGENT_SCORE} 2>/dev/null >/proc/self/oom_score_adj"
"""What a shell runs to get that score. Without /proc it keeps its own."""


def quote(text: str) -> str:
    """Return text without NUL as one word of any POSIX shell, always quoted, so that equal scripts are equal bytes."""
    return "'" + text.replace("'", "'\\''") + "'"
