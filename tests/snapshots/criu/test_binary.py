"""The program of CRIU and the probe of the kernel."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.machine import wait_until

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="CRIU needs root")


def _running(program: Path) -> list[str]:
    """Return the processes whose command line names a program."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.fsencode(program) in (process / "cmdline").read_bytes():
                found.append(f"{process.name} {(process / 'stat').read_text()}")
        except OSError:
            continue
    return found


def test_check_ends_with_a_killed_proxy(tmp_path: Path) -> None:
    """A proxy is killed while `criu check` waits for a process that it has stopped: none of them stays behind."""
    criu, stopped = tmp_path / "criu", tmp_path / "stopped"
    criu.write_text(f"#!/bin/sh\n# /run/criu.kdat\0\nsh -c 'kill -STOP $$' \"$0\" &\necho >{stopped}\nwait\n")
    criu.chmod(0o755)
    program = "import sys, pathlib; from snapshots.criu.binary import CriuBinary as B; "
    program += f"B.prepare(pathlib.Path({str(tmp_path / 'copy')!r}), pathlib.Path(sys.stdin.read()))"
    proxy = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE)
    assert proxy.stdin
    with proxy.stdin:
        proxy.stdin.write(os.fsencode(criu))
    try:
        wait_until(lambda: stopped.exists() and any(") T " in process for process in _running(criu)), "none is stopped")
    finally:
        proxy.kill()
        proxy.wait()
    wait_until(lambda: not _running(criu), "the check goes on without its proxy")
