"""The scheduling of the proxy's threads: the event loop answers hits, so it runs before what misses have started.

A CPU that runs a sandbox's process does not change to the event loop at once when a request arrives: Linux lets a
process finish its slice first, and looks at that only with the timer. A thread with a shorter slice is not kept waiting
(Linux 6.12 and later), and one with a lower niceness gets the CPU more often. The control group of sandboxes has a
smaller weight, but no weight shortens the wait for a slice.

Threads of the proxy hold the interpreter's lock at times. One that had to wait for a CPU meanwhile would keep the event
loop waiting, so they are scheduled alike.

Where autogroups are on (sched(7)), Linux divides the CPU among sessions, and a niceness counts only within its session.
So the session of the proxy has a niceness too.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from sandboxes.linux.syscalls import schedule

SLICE_NS = 100_000
"""The slice of the proxy's threads, the shortest that Linux allows. With the usual one, hits wait behind misses."""
NICENESS = -5
"""The niceness of the proxy's threads: three times the weight of an ordinary process.

An administrator may have given the proxy another niceness, which it keeps then.
"""
SESSION_NICENESS = -10
"""The niceness of the proxy's session where autogroups are on: nine times the weight of another session.

With -5, the slowest percent of hits waits twice as long beside misses. With -15, misses wait as well.
"""


def raise_session(file: Path = Path("/proc/self/autogroup")) -> None:
    """Let this session run before others where Linux divides the CPU among sessions (proc_pid_autogroup(5)).

    It changes nothing if the session is another process's, or if the process or the session was given a niceness.
    """
    if os.getsid(0) == os.getpid() and os.getpriority(os.PRIO_PROCESS, 0) == 0:
        # The kernel may have no autogroups, and a negative niceness needs CAP_SYS_NICE.
        with suppress(OSError):
            if file.read_text().endswith(" nice 0\n"):
                file.write_text(str(SESSION_NICENESS))


def go_first() -> None:
    """Let this thread, but not processes that it forks, run before others, as far as rights and kernel allow."""
    own = os.getpriority(os.PRIO_PROCESS, 0)
    for niceness in (NICENESS if own == 0 else own, own):
        # Without CAP_SYS_NICE, as in most containers, the slice alone.
        with suppress(OSError):
            schedule(niceness, SLICE_NS)
            return


def make_threads() -> ThreadPoolExecutor:
    """Return the threads that the event loop's `run_in_executor` and `asyncio.to_thread` use."""
    return ThreadPoolExecutor(thread_name_prefix="proxy", initializer=go_first)
