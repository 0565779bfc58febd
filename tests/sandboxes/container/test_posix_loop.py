"""The loop of a POSIX shell that stays for many calls, in the machine's own shells."""

import shutil
import subprocess
from pathlib import Path

import pytest

from sandboxes.container.boot_scripts import BOX
from sandboxes.container.keeper import posix_session
from sandboxes.guest.bash.session import END, LOST_MARK, LOST_STATUS

CALLS = 9_100
"""More than 9,023 and 7,071: so many files that source each other filled the stacks of dash and busybox."""


@pytest.mark.parametrize("shell", [["dash"], ["busybox", "sh"]])
def test_a_kept_shell_serves_thousands_of_calls(shell: list[str], tmp_path: Path) -> None:
    if shutil.which(shell[0]) is None:
        pytest.skip(f"needs {shell[0]}")
    folder = tmp_path / "1"
    folder.mkdir()
    # Files stand in for the FIFOs: the lines come from one descriptor, and the dumps are counted at the end.
    loop = posix_session.loop("1").replace(BOX, str(tmp_path))
    loop = loop.replace(f"<{folder}/go", "<&9").replace(f">{folder}/dump", f">>{folder}/dump")
    (folder / "loop").write_text(loop)
    (folder / "command").write_text("echo on; break\n")
    (folder / "go").write_text("\n" * CALLS)
    start = [*shell, "-c", f"exec 9<{folder}/go; . {folder}/loop"]
    ended = subprocess.run(start, capture_output=True, text=True, check=False, timeout=300)
    # The lines have ended, so the shell cannot read the next one: it says that it has lost its FIFOs.
    assert (ended.returncode, ended.stderr) == (LOST_STATUS, "")
    assert ended.stdout == "on\n" * CALLS + LOST_MARK
    assert (folder / "dump").read_bytes().count(END) == CALLS + 1
