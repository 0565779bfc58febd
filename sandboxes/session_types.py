"""Types of a shell session as its dump describes it."""

from typing import Any

ShellSession = dict[str, Any]
"""JSON: cwd, dirs, umask, arguments, variables, functions, aliases, traps, options, disabled builtins, limits."""


Jobs = tuple[str, ...]
"""What a shell that is not replaced has beside its session: `[2]+ 31` and ` 32` for job 2's processes, `$! 32`."""
