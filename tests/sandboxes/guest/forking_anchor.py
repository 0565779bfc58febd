"""Starts an anchor that forks its shells, beside the files that it needs; and what shows of a shell."""

import os
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

from sandboxes.guest.anchors.native_anchor import NativeAnchor
from sandboxes.linux import mounts, processes, spawn
from sandboxes.linux import syscalls as kernel

FORK, EXECUTABLE = f"{spawn.SHELL_FILES}/bash", str(Path(spawn.BASH).resolve())
"""The programs of a shell that is a fork, and of another one."""
PROGRAM = "readlink /proc/$$/exe"
"""Prints the program of the shell that runs it."""
SHOWN = r"""
tr '\0' '\n' </proc/$$/environ; tr '\0' '\n' </proc/$$/cmdline
(cd /proc/$$; cat comm limits oom_score_adj timerslack_ns personality)
mapfile -t lines </proc/$$/status
printf '%s\n' "${lines[@]}" | grep -vE '^(Pid|PPid|Tgid|NStgid|NSpid|NSpgid|NSsid|Vm.*|Rss.*|.*ctxt_switches|SigQ):'
unset lines
for f in /proc/$$/fd/*; do l=$(readlink "$f") && echo "${f##*/} ${l%%[0-9]*}"; done; unset f l
ls -l /proc/self/fd | sed -E 's/.* [0-9:]+ //; s/[0-9]{2,}//g'
[[ $$ == "$BASHPID" && $(ps -o pgid= $$) -eq $$ ]]; echo "$?"
[[ $(ps -o sid= $$) -eq $PPID && $(tr '\0' ' ' </proc/$PPID/cmdline) == anchor* ]]
echo "$?"
declare -p | grep -vE '^declare -[a-z-]* (RANDOM|SRANDOM|SECONDS|EPOCH.*|BASHPID|PPID|BASH_EXECUTION_STRING|_)='
declare -f; alias; set -o; shopt; trap -p; ulimit -a; umask; enable; jobs; hash; type -a bash
echo "$0 $# $- $_ $! $?" "${DIRSTACK[@]}"; history; locale; echo ~ ~root; env | sort
python3 -c 'import os, signal; print(signal.pthread_sigmask(0, []), os.getpriority(0, 0), os.sched_getaffinity(0))'
"""
"""Prints what an agent may look at, except for what differs between any two shells.

The shell reads its signal masks itself: it blocks SIGCHLD for moments while it waits for another program.
"""
SHOWN_SORTED = SHOWN.replace("</proc/$$/environ;", "</proc/$$/environ | sort;")
"""The same, but for the order in which a shell was given its variables: a bash that executes shells has its own."""


def start(files: Path, workdir: str = "/", others: Collection[processes.Process] = ()) -> NativeAnchor:
    """Start the anchor in a mount namespace of its own, which ends with it. 10 ms.

    Args:
        files: What `copies.make` has made.
        workdir: The anchor's working directory.
        others: The agent's processes that it is told of. Here the machine's run; in a sandbox none do yet.
    """
    # The kernel has a mount namespace and a working directory for each thread that asks for its own (unshare(2)).
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_start, files, workdir, others).result()


def _start(files: Path, workdir: str, others: Collection[processes.Process]) -> NativeAnchor:
    kernel.unshare(kernel.CLONE_NEWNS)
    kernel.mount("", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
    mounts.prepare(devices_from_host=False, shell_files=str(files))
    os.chdir(workdir)
    with patch.object(processes, "list_processes", return_value=set(others)):
        anchor = NativeAnchor.start()
    assert anchor is not None
    return anchor
