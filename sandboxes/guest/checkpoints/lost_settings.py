"""What processes have set and CRIU does not save: it is set again after a restore, or nothing is dumped."""

# Theory of operation.
#
# Whatever a process can set was compared before a dump and after a restore by CRIU 4.2
# (`tests/sandboxes/local/test_what_comes_back.py`). What differed is one of three kinds:
#
# 1. Nothing shows it from outside, and programs do without it. The filter of a sandbox refuses to set it (`confine`).
# 2. It can be set again from outside. It is noted at the dump, and set again before the restored processes run.
# 3. All else. A process that has it is not dumped, and its state is reached by replay.
#
# All of it is looked at by a child of the operator, because only that has the sandbox's pids, and while CRIU holds the
# processes still.

import contextlib
import fcntl
import json
import os
import stat
from collections.abc import Iterable

from sandboxes.guest.checkpoints.held_sockets import HeldSockets, set_options
from sandboxes.guest.checkpoints.held_terminals import require_quiet_master, require_quiet_terminal
from sandboxes.guest.checkpoints.looking import NotDumpableError, described, in_child, kernel_text, taken
from sandboxes.linux.descriptors import Opened, unread_bytes
from sandboxes.linux.live_state import MASTER, TERMINALS, inherited

_FILES = {"coredump_filter": "0x", "timerslack_ns": ""}
"""Files of a thread in /proc that are written again, and what stands before the number that they show."""
_O_TMPFILE = 0o20000000
"""Part of the flags of a file that was made without a name (`fdinfo`, proc_pid_fdinfo(5))."""
_PLAIN_EVENTS = 0xFFF
"""The events of a watch (inotify(7)). Above them are options, such as IN_ONESHOT."""
MAX_NOTED = 5_000
"""Limits what is set again, about 20 us each while the processes stand still. Each TCP socket counts once."""

Noted = dict[str, str]
"""What is set again: texts of files by their paths, and values of sockets' options, as hexadecimal digits, by the
process, the descriptor, the level and the option."""


def look(pids: Iterable[int], held: Iterable[tuple[int, int, bytes]]) -> Noted:
    """Return what a restore has to set again; to be run in the sandbox's pid namespace (`in_child`).

    `held` has the processes' descriptors: the process, the number, and what the kernel calls it.
    """
    noted, sockets = Noted(), HeldSockets()
    # Restored processes begin with what pid 1 has: CRIU is its child then.
    own = {name: kernel_text("/proc/1", name) for name in _FILES}
    born, personality = inherited(1)[1:3], kernel_text("/proc/1", "personality")
    looked_at: set[bytes] = set()
    for pid in pids:
        threads = os.listdir(f"/proc/{pid}/task")  # noqa: PTH208 - pathlib is not loaded in pid 1
        for thread in threads:
            _require_restorable(int(thread), born, personality)
            # A thread has a directory of its own beside the processes, which is not listed (proc_tid(5)).
            texts = {name: kernel_text(f"/proc/{thread}", name) for name in _FILES}
            changed = [name for name, now in texts.items() if now not in ("", own[name])]
            noted |= {f"/proc/{thread}/{name}": _FILES[name] + texts[name] for name in changed}
    for pid, number, target in held:
        if not target.startswith(b"socket:["):
            _require_saved(pid, number, os.fsdecode(target))
        elif target not in looked_at:
            sockets.look(pid, number)
        looked_at.add(target)
    sockets.require_whole()
    noted |= sockets.options
    if len(noted) > MAX_NOTED:
        raise NotDumpableError(f"the processes have changed more than {MAX_NOTED} settings of threads and sockets")
    return noted


def put_back(noted: Noted) -> None:
    """Set what was noted again, before the restored processes run. `OSError` says that it cannot be set."""
    files = {name: text for name, text in noted.items() if name.startswith("/proc/")}
    for path, text in files.items():
        with open(path, "w") as file:  # noqa: PTH123
            file.write(text)
    options = {name: value for name, value in noted.items() if name not in files}
    if options:
        try:
            in_child(lambda: set_options(options))
        except NotDumpableError as error:
            raise OSError(str(error)) from error


def as_bytes(noted: Noted) -> bytes:
    """Return what was noted as an answer of `in_child`."""
    return json.dumps(noted).encode()


def from_bytes(data: bytes) -> Noted:
    """Return what `as_bytes` was given."""
    noted: Noted = json.loads(data)
    return noted


def _require_restorable(thread: int, born: list[str], personality: str) -> None:
    now = inherited(thread)
    if now and born and now[1:3] != born:
        raise NotDumpableError(
            "the CPUs or the priority of I/O of a process were changed, and a checkpoint does not hold that"
        )
    if kernel_text(f"/proc/{thread}", "personality") != personality:
        raise NotDumpableError(f"process {thread} has another personality (setarch), and a checkpoint does not hold it")


def _require_saved(pid: int, number: int, target: str) -> None:
    where = f"process {pid} holds "
    if target == "anon_inode:[eventfd]" and ("eventfd-semaphore", "1") in described(pid, number):
        raise NotDumpableError(f"{where}an eventfd that is a semaphore, and a checkpoint does not hold that")
    if target == "anon_inode:[eventpoll]":
        watched = [line.partition("ino:")[2] for name, line in described(pid, number) if name == "tfd"]
        # All nameless files share one inode, and CRIU tells those apart.
        nameless = _nameless_inode()
        named = [file for file in watched if not file.startswith(nameless)]
        if len(named) != len(set(named)):
            raise NotDumpableError(f"{where}an epoll that watches one file twice, which no checkpoint brings back")
    if target == "anon_inode:inotify":
        _require_plain_watches(pid, number, where)
    if target.startswith("/"):
        _require_saved_file(pid, number, target)


def _require_saved_file(pid: int, number: int, target: str) -> None:
    status, where = os.stat(f"/proc/{pid}/fd/{number}"), f"process {pid} holds "  # noqa: PTH116
    if stat.S_ISCHR(status.st_mode) and os.major(status.st_rdev) in TERMINALS:
        require_quiet_terminal(f"/proc/{pid}/fd/{number}", f"{target} of process {pid}")
    if status.st_rdev == MASTER:
        require_quiet_master(pid, number)
    if stat.S_ISDIR(status.st_mode):
        _require_unwatched(pid, number, f"{where}{target}")
    if stat.S_ISREG(status.st_mode) and not status.st_nlink:
        flags = next((int(flags, 8) for name, flags in described(pid, number) if name == "flags"), 0)
        if flags & _O_TMPFILE:
            raise NotDumpableError(f"{where}a file that may still get a name, and a checkpoint does not hold that")


def _require_plain_watches(pid: int, number: int, where: str) -> None:
    with taken(pid, number) as fd:
        if unread_bytes(fd):
            raise NotDumpableError(f"{where}an inotify queue with unread events, and a checkpoint does not hold them")
    watches = [line.partition("mask:")[2].split() for name, line in described(pid, number) if name == "inotify wd"]
    if any(int(mask[0], 16) & ~_PLAIN_EVENTS for mask in watches):
        raise NotDumpableError(f"{where}a watch with options (IN_ONESHOT, IN_EXCL_UNLINK), which a checkpoint loses")


def _require_unwatched(pid: int, number: int, subject: str) -> None:
    # With a descriptor that only names a directory (`O_PATH`), nobody can watch it.
    with taken(pid, number) as fd, contextlib.suppress(OSError):
        # The kernel makes who watches a directory the owner of its descriptor (fcntl(2), F_NOTIFY).
        if fcntl.fcntl(fd, fcntl.F_GETOWN):
            raise NotDumpableError(f"{subject}, whose changes are signalled to it, and a checkpoint does not hold that")


def _nameless_inode() -> str:
    """Return how the inode of all nameless files shows in what epoll watches."""
    with Opened(os.eventfd(0, os.EFD_CLOEXEC)) as fd:
        return f"{os.fstat(fd).st_ino:x} "
