"""The types of a shell session, as its dump describes it."""

from typing import Any

ShellSession = dict[str, Any]
"""JSON: cwd, dirs, umask, arguments, variables, functions, aliases, traps, options, disabled builtins, limits."""


Jobs = tuple[str, ...]
"""The jobs of a shell: `[2]+ 31` and ` 32` for the processes of job 2, `$! 32` for the last background process."""
