"""Reads and writes OOM scores (proc_pid_oom_score_adj(5)); `sandboxes.oom_scores` says which process has which."""

import contextlib
from collections.abc import Iterable

from sandboxes import oom_scores
from sandboxes.linux import syscalls as kernel
from sandboxes.linux.processes import shown


def write(score: int, process: int | str = "self") -> None:
    """Give a process a score, as far as the rights of this one go."""
    with contextlib.suppress(OSError), open(f"/proc/{process}/oom_score_adj", "w") as file:  # noqa: PTH123
        file.write(str(score))


def read(process: int | str = "self") -> int:
    """Return the score of a process."""
    return int(shown(f"/proc/{process}/oom_score_adj"))


def shelter() -> None:
    """Give this process the score of the proxy, unless it has a lower one already."""
    if read() > oom_scores.PROXY:
        write(oom_scores.PROXY)


def let_lower(pids: Iterable[int]) -> None:
    """Make `SANDBOX` the lowest score that restored processes can give themselves; they keep their scores.

    Without CAP_SYS_RESOURCE nothing has set another lowest score.
    """
    permitted = kernel.permitted()
    if not permitted >> kernel.CAP_SYS_RESOURCE & 1:
        return
    scores = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            scores[pid] = max(read(pid), oom_scores.SANDBOX)
            write(oom_scores.SANDBOX, pid)
    # Without the capability, which stays permitted, a write changes the score alone.
    kernel.capset(1 << kernel.CAP_DAC_OVERRIDE, permitted)
    try:
        for pid, score in scores.items():
            write(score, pid)
    finally:
        kernel.capset(permitted)
