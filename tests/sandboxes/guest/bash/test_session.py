"""The loop of a shell that stays for many calls, in a plain bash."""

import os
import subprocess
from pathlib import Path

import pytest

from sandboxes.guest.bash import session as sessions

CALLS = 9_000
"""More than 8,167: so many `eval`s within each other filled the stack of 8 MB."""


def run_shell(tmp_path: Path, command: str, calls: int) -> tuple[subprocess.CompletedProcess[str], bytes]:
    """Run a shell's loop until its calls are over; return what it printed, and its dumps."""
    texts = {
        sessions.RESTORE_FD: f"\\builtin :; {sessions.BEGIN_DUMP}\n", sessions.LOOP_FD: sessions.LOOP,
        sessions.COMMAND_FD: command, sessions.GO_FD: "\n" * calls, sessions.DUMP_FD: "",
    }  # fmt: skip
    opened = []
    for number, text in texts.items():
        (tmp_path / str(number)).write_text(text)
        opened.append(f"{number}{'>>' if number == sessions.DUMP_FD else '<'}{tmp_path / str(number)}")
    start = f"exec {' '.join(opened)}; exec -a bash bash --noprofile --norc -c '{sessions.START}' bash"
    ended = subprocess.run(
        ["bash", "-c", start], capture_output=True, text=True, check=False, timeout=300, env=os.environ
    )
    return ended, (tmp_path / str(sessions.DUMP_FD)).read_bytes()


def test_a_kept_shell_serves_thousands_of_calls(tmp_path: Path) -> None:
    """A shell beside a background process is never replaced. Its stack does not grow with its calls."""
    ended, dumps = run_shell(tmp_path, "echo $LINENO; break 2>/dev/null", CALLS)
    # At the end of the lines `read` fails, and the shell exits.
    assert (ended.returncode, ended.stderr) == (1, "")
    assert ended.stdout == "1\n" * CALLS
    assert dumps.count(sessions.END) == CALLS + 1


def test_a_dump_that_came_before_gives_an_equal_session_of_its_own(tmp_path: Path) -> None:
    """Callers add members to a session. The session of the next equal dump does not have them."""
    _, dumps = run_shell(tmp_path, "variable=1", 1)
    before, after = (dump + sessions.END for dump in dumps.split(sessions.END)[:-1])
    status, session, jobs = sessions.parse_dump(after)
    session["limits"] = {"RLIMIT_CORE": [0, 0]}
    again = sessions.parse_dump(after)
    assert (status, jobs) == (again[0], again[2])
    assert again[1] == {**session, "limits": {}}
    assert sessions.parse_dump(before)[1] != again[1]


def test_a_number_that_bash_does_not_print_is_a_malformed_dump(tmp_path: Path) -> None:
    """A command may write to the dump's pipe. `"²".isdigit()` is true, and `int` takes at most 4,300 digits."""
    _, dumps = run_shell(tmp_path, "true", 1)
    whole = dumps.split(sessions.END)[1] + sessions.END
    assert sessions.parse_dump(whole)[0] == 0
    for index in (1, 14):
        for text in (b"\xb2", b"9" * 5000, b"-1", b"999"):
            fields = whole.split(b"\0")
            fields[index] = text
            with pytest.raises(sessions.MalformedDumpError):
                sessions.parse_dump(b"\0".join(fields))


def test_reading_a_computed_variable_leaves_no_trace(tmp_path: Path) -> None:
    """Rollouts that find such a call in the tree do not run it, and see what those see that have run it."""
    names = ["BASH_SUBSHELL", "HISTCMD", "LINENO", "COMP_WORDBREAKS", "BASH_ARGV0", "GROUPS", "DIRSTACK"]
    reads = "".join(f"${{{name}[@]}}" for name in names)
    command = f'declare -p | grep -E "^declare -[^ ]+ ({"|".join(names)})(=|$)"; : "{reads}"'
    ended, _ = run_shell(tmp_path, command, 3)
    shown = ended.stdout.splitlines()
    assert len(shown) == 3 * len(names), shown
    assert shown[: len(names)] == shown[len(names) : 2 * len(names)] == shown[2 * len(names) :]
