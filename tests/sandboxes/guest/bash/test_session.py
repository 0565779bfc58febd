"""The loop of a shell that stays for many calls, in a plain bash."""

import os
import subprocess
from pathlib import Path

from sandboxes.guest.bash import session as sessions

CALLS = 9_000
"""More than 8,167: so many `eval`s within each other filled the stack of 8 MB."""


def test_a_kept_shell_serves_thousands_of_calls(tmp_path: Path) -> None:
    """A shell beside a background process is never replaced. Its stack does not grow with its calls."""
    texts = {
        sessions.RESTORE_FD: f"\\builtin :; {sessions.BEGIN_DUMP}\n", sessions.LOOP_FD: sessions.LOOP,
        sessions.COMMAND_FD: "echo $LINENO; break 2>/dev/null", sessions.GO_FD: "\n" * CALLS, sessions.DUMP_FD: "",
    }  # fmt: skip
    opened = []
    for number, text in texts.items():
        (tmp_path / str(number)).write_text(text)
        opened.append(f"{number}{'>>' if number == sessions.DUMP_FD else '<'}{tmp_path / str(number)}")
    start = f"exec {' '.join(opened)}; exec -a bash bash --noprofile --norc -c '{sessions.START}' bash"
    ended = subprocess.run(
        ["bash", "-c", start], capture_output=True, text=True, check=False, timeout=300, env=os.environ
    )
    # At the end of the lines `read` fails, and the shell exits.
    assert (ended.returncode, ended.stderr) == (1, "")
    assert ended.stdout == "1\n" * CALLS
    dumps = (tmp_path / str(sessions.DUMP_FD)).read_bytes()
    assert dumps.count(sessions.END) == CALLS + 1
