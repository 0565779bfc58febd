"""Recognises main commands that only keep their container running, so that they need not be executed (pure)."""

import re

_WAITING_SLEEP_S = 60
"""Shortest `sleep` as a main command that counts as waiting. A shorter one is executed: its end is of interest."""
_SLEEP = re.compile(r"(?:exec +)?(?:/(?:usr/)?bin/)?sleep +(?:(inf\w*)|(\d+)(?:\.\d*)?([smhd]?))")
"""A sleep: for ever (group 1), or a number (2) of a unit (3)."""
_WAITS = re.compile(
    r"(?:exec +)?tail +(?:-f|-F|--follow) +/dev/null|"
    r"(?:trap [^;]*; *)?(?:exec +)?sleep +inf\w*( *& *wait)?|"
    r"while +(?:true|:|\[ 1 \]) *; *do +sleep +\S+ *; *done|/?pause"
)
"""Shell commands that wait for ever."""
_SHELLS = frozenset({"sh", "bash", "ash", "dash", "zsh", "cat", "python", "python3"})
"""Programs that read commands or text from stdin if they have no arguments."""
_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
"""Seconds of each unit of `sleep`."""


def waits(argv: tuple[str, ...], *, interactive: bool) -> bool:
    """Return whether a main command only keeps its container running; `interactive`: its stdin stays open."""
    if not argv:
        return True
    name = argv[0].rpartition("/")[2]
    # A shell or `cat` alone reads stdin: it waits if nothing sends input, and ends at once if stdin is closed.
    if len(argv) == 1 and name in _SHELLS:
        return interactive
    # `sh -c script`: the script decides, not the shell.
    script = argv[2] if name in _SHELLS and len(argv) == 3 and argv[1] in {"-c", "-lc", "-ec"} else " ".join(argv)
    script = script.strip().rstrip(";").strip()
    sleep = _SLEEP.fullmatch(script)
    if sleep is not None:
        return bool(sleep[1]) or int(sleep[2]) * _UNITS[sleep[3]] >= _WAITING_SLEEP_S
    return _WAITS.fullmatch(script) is not None
