"""The OOM scores of Forkpoint's processes: whom the kernel ends first when memory runs out (pure)."""

# Theory of operation. The kernel adds a score to the share of memory that a process holds, and ends the process with
# the largest sum (proc_pid_oom_score_adj(5)).
#
# 1. A writer with CAP_SYS_RESOURCE sets two numbers: the score, and the lowest score that the process can give itself
#    later. Every fork inherits both. So a sheltered process would let all that descend from it shelter themselves.
# 2. The proxy is sheltered. The launcher and the zygotes give themselves 0 again while they have the capability, so 0
#    is the lowest score in a sandbox. Pid 1 and the anchor keep it.
# 3. Each process that runs what an agent asked for raises itself before, which takes no right.
# 4. CRIU has the capability when it writes the scores of restored processes. `linux.oom_score` then sets their lowest
#    score to 0 again.

PROXY = -500
"""The score of the proxy: it loses against any process unless it holds half of the memory itself."""
SANDBOX = 0
"""The score of pid 1 and of the anchor of a sandbox, and the lowest that an agent's processes can have."""
AGENT = 500
"""The score of processes that run what an agent asked for."""
BECOME_AGENT = f"\\builtin printf {AGENT} 2>/dev/null >/proc/self/oom_score_adj"
"""What a shell runs to get an agent's score. Without /proc it keeps its own."""
