"""How processes ended that were started as a sandbox's shells are."""

import subprocess

import pytest

from sandboxes.guest.anchor import ShellStartError
from sandboxes.guest.local_shells import LocalShells
from sandboxes.guest.shell_pool import known


def test_an_exit_code_that_nobody_knows_is_no_result() -> None:
    """The process has been collected by one that was killed then. Any code would be made up."""
    ended = subprocess.Popen(["/bin/true"])
    ended.wait()
    status = LocalShells({}, "/", {}, None).status_of(ended.pid)
    assert status is None
    with pytest.raises(ShellStartError, match="exit code"):
        known(status)


def test_an_orphan_is_waited_for() -> None:
    """It becomes a child of this process a moment after its parent's end, and is collected then."""
    orphan = subprocess.Popen(["/bin/sh", "-c", "sleep 0.2; exit 4"])
    assert LocalShells({}, "/", {}, None).status_of(orphan.pid) == 4
    orphan.returncode = 4
