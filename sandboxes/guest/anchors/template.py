"""A template: a session's shell that waits for its first command for good, and forks shells that run commands."""

# Theory of operation.
#
# After each call the session's shell is replaced by a fresh one that is restored from the session's dump. After most
# calls the session is as before, so the fresh shell is as the last one was before its command. A template is a shell
# that has come to that point and stops there (`linux/anchor.c`). Each fork of it is the fresh shell. It has the pid,
# times, random numbers, descriptors and directory of a new one, and all else that bash knows was the same anyway.
#
# A template stands for fresh shells as long as these hold:
#
# 1. The session is the one that it was restored from.
# 2. The files that bash has read meanwhile are as they were: bash, its libraries and locales, and /etc/passwd. These
#    are in system directories (`SYSTEM`). So a template ends when a call has changed anything in one of them.
#    Variables can name others (`_LOOKUPS`, and PATH); a shell with such a variable is no template.
# 3. Nothing has touched it. It hides as the anchor does, so a command can change its limits and scheduling, send it
#    signals, and no more. These are compared after each call.
#
# A template is a process that `ps` shows, as a second `anchor`. So there is one in each sandbox that has one session
# and no processes of the agent, live or restored, and none in any other.

import contextlib
import os
import select
import signal
import struct
import time
from collections.abc import Collection, Mapping

from sandboxes.guest.anchors.shell_kit import TEMPLATE_REPLIES, TEMPLATE_REQUESTS, ShellKit
from sandboxes.guest.anchors.starter import PATIENCE_S, AnchorLostError, Starter
from sandboxes.guest.bash.session import KEPT
from sandboxes.linux import processes
from sandboxes.linux.descriptors import unread_bytes
from sandboxes.linux.live_state import passed_on
from sandboxes.shell_text import ShellSession

SYSTEM = ("bin", "etc", "lib", "lib32", "lib64", "libx32", "sbin", "usr")
"""The directories whose files bash reads before a session's first command."""
_LOOKUPS = ("BASH_ENV", "GCONV_PATH", "LOCPATH", "NLSPATH")
"""Variables that name other files which bash reads by itself (bash(1), locale(7))."""
_ACCEPTED, _CAN_FORK = b"0\n", 1
"""What a template says when it begins, and when it waits for requests."""
_STOPS_MS = 2
"""How long pid 1 waits for the second before it looks whether the template sleeps. It takes 0.2 ms."""
_COLLECTED_S = 0.0001
"""How often a look is taken whether a process was collected. It takes microseconds on an idle machine."""


def can_stand_for(session: ShellSession | None, script: bytes, environment: Mapping[str, str]) -> bool:
    """Return whether a shell may be a template, by the script and variables that make its session (pure)."""
    # With a directory stack, restoring depends on more directories than one. Limits may keep a process from forking.
    if session is not None and (KEPT in session or session["dirs"] or session["limits"]):
        return False
    if any(name in environment or name.encode() in script for name in _LOOKUPS):
        return False
    # bash looks for itself in PATH when it starts.
    folders = environment.get("PATH", "/usr").split(":")
    return all(folder.startswith("/") and folder.split("/")[1] in SYSTEM for folder in folders)


def spares(written: Collection[str]) -> bool:
    """Return whether templates may outlive changes of paths, given without / and with all their parents (pure)."""
    return not any(name in written for name in SYSTEM)


class ShellTemplate(Starter):
    """Pid 1's end of the conversation with a template. If it is gone, requests raise `AnchorLostError`."""

    def __init__(self, pid: int, kit: ShellKit, session: ShellSession | None) -> None:
        try:
            death = os.pidfd_open(pid)
        except ProcessLookupError as error:
            raise AnchorLostError("it ended") from error
        super().__init__((kit.ours[TEMPLATE_REQUESTS], kit.ours[TEMPLATE_REPLIES]), death)
        # `session`: the session that it was restored from; None for a new one.
        # `death`: a descriptor that is readable once it has ended.
        # `ready`: whether it waits for requests.
        self.pid, self.session, self.ready, self.death = pid, session, False, death
        # What it passes on to its forks (`live_state.passed_on`); empty until it is ready.
        self.settings: list[str] = []
        self.last_fork = 0  # The process of the shell that it has forked before and that has ended; 0 for none.
        self._kit = kit

    @staticmethod
    def is_one(kit: ShellKit) -> bool:
        """Return whether the shell that the anchor has just started on the kit is a template, which says so."""
        fd = kit.ours[TEMPLATE_REPLIES]
        return unread_bytes(fd) > 0 and os.read(fd, len(_ACCEPTED)) == _ACCEPTED

    def await_ready(self) -> None:
        """Wait until it can fork. It has made its first dump, and has its session's limits."""
        if not self.ready:
            waiting = select.poll()
            for fd in (self.ends[1], self.death):
                waiting.register(fd, select.POLLIN)
            # Another bash waits for its command in another way: it sleeps, and says nothing more.
            if not waiting.poll(_STOPS_MS) and not processes.wait_until_asleep(self.pid, lambda: self.has_unread):
                raise AnchorLostError("it does not stop")
            if self.receive() != _CAN_FORK:
                raise AnchorLostError("it cannot stand for new shells")
            self.ready, self.settings = True, passed_on(self.pid)

    def fork(self, folder: str) -> int:
        """Return the pid of a new shell in a directory (latin-1), once it has its descriptors."""
        # AnchorLostError also if the shell cannot be started or cannot enter the directory.
        self.await_ready()
        self._await_collected()
        path = folder.encode("latin-1") + b"\0"
        pid = self.ask(struct.pack("=I", len(path)) + path)
        if not pid:
            raise AnchorLostError("it cannot start a shell")
        return pid

    def _await_collected(self) -> None:
        """Wait until the anchor has collected the last fork: `ps` would show it as a zombie. Nearly always it has."""
        deadline = time.monotonic() + PATIENCE_S
        while self.last_fork and processes.parent(self.last_fork):
            if time.monotonic() > deadline:
                raise AnchorLostError("its parent collects no process")
            time.sleep(_COLLECTED_S)

    @property
    def was_touched(self) -> bool:
        """Whether a command may have changed what its forks inherit."""
        return self.has_unread or processes.is_stopped(self.pid) or passed_on(self.pid) != self.settings

    @property
    def is_ready(self) -> bool:
        """Whether it lives, and waits for requests."""
        return self.ready and not select.select([self.death], [], [], 0)[0]

    def end(self) -> None:
        """Kill it, and take what is left in its pipes, which the next template gets."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.death, signal.SIGKILL)
        select.select([self.death], [], [], PATIENCE_S)
        os.close(self.death)
        # A kit that is closed is not used again.
        for fd in (self._kit.theirs[TEMPLATE_REQUESTS], self.ends[1]) if self._kit.theirs else ():
            if unread := unread_bytes(fd):
                os.read(fd, unread)
