"""The OOM scores of Forkpoint's processes: which of them the kernel ends first when memory runs out."""

# Theory of operation. The kernel adds a score to the share of memory that a process holds, and ends the process with
# the largest sum (proc_pid_oom_score_adj(5)).
#
# 1. A writer with CAP_SYS_RESOURCE sets two numbers: the score, and the lowest score that the process can give itself
#    later. Every fork inherits both. So a sheltered process would let all that descend from it shelter themselves.
# 2. The proxy is sheltered. The launcher gives itself 0 again while it has the capability, so 0 is the lowest score in
#    a sandbox. Pid 1 and the anchor keep it.
# 3. Each process that runs what an agent asked for raises itself before, which takes no right. So do the zygotes.
# 4. CRIU has the capability when it writes the scores of restored processes. `let_lower` then sets their lowest
#    score to 0 again.

import contextlib
from collections.abc import Iterable

from sandboxes.linux import syscalls as kernel
from sandboxes.linux.processes import shown

PROXY = -500
"""The score of the proxy: it loses against any process unless it holds half of the memory itself."""
SANDBOX = 0
"""The score of pid 1 and of the anchor of a sandbox, and the lowest that an agent's processes can have."""


def write(score: int, process: int | str = "self") -> None:
    """Give a process a score, as far as the rights of this one go."""
    with contextlib.suppress(OSError), open(f"/proc/{process}/oom_score_adj", "w") as file:  # noqa: PTH123
        file.write(str(score))


def read(process: int | str = "self") -> int:
    """Return the score of a process."""
    return int(shown(f"/proc/{process}/oom_score_adj"))


def shelter() -> None:
    """Give this process the score of the proxy, unless it has a lower one already."""
    if read() > PROXY:
        write(PROXY)


def let_lower(pids: Iterable[int]) -> None:
    """Make `SANDBOX` the lowest score that restored processes can give themselves (with CAP_SYS_RESOURCE)."""
    permitted = kernel.permitted()
    if not permitted >> kernel.CAP_SYS_RESOURCE & 1:
        return
    scores = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            scores[pid] = max(read(pid), SANDBOX)
            write(SANDBOX, pid)
    # Without the capability, which stays permitted, a write changes the score alone.
    kernel.capset(1 << kernel.CAP_DAC_OVERRIDE, permitted)
    try:
        for pid, score in scores.items():
            write(score, pid)
    finally:
        kernel.capset(permitted)
