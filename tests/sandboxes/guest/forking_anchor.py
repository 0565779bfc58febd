"""Starts an anchor that forks its shells, beside the files that it needs: for tests of anchors."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

from sandboxes.guest.anchor import NativeAnchor
from sandboxes.linux import mounts, processes
from sandboxes.linux import syscalls as kernel


def start(files: Path, workdir: str = "/") -> NativeAnchor:
    """Start the anchor in a mount namespace of its own, which ends with it. 10 ms.

    Args:
        files: What `shell_files.make` has made.
        workdir: The anchor's working directory.
    """
    # The kernel has a mount namespace and a working directory for each thread that asks for its own (unshare(2)).
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_start, files, workdir).result()


def _start(files: Path, workdir: str) -> NativeAnchor:
    kernel.unshare(kernel.CLONE_NEWNS)
    kernel.mount("", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
    mounts.prepare(devices_from_host=False, shell_files=str(files))
    os.chdir(workdir)
    # In a sandbox no process of the agent runs yet. Here those of the machine do.
    with patch.object(processes, "list_processes", return_value=set()):
        anchor = NativeAnchor.start_with_bash()
    assert anchor is not None
    return anchor
