"""Watches of directories: each reports events as a background process reports output, one line of JSON for each."""

# Theory of operation.
#
# The events are inotify's, in the words of Go's fsnotify, which E2B's servers use. The directory is opened by a child
# that has become the caller's user, so nothing is watched that this user could not read.
#
# A recursive watch needs an inotify watch for each directory. When a directory is created, entries may be made in it
# before its watch exists. So its entries are listed once the watch exists and reported as created (`_reported`); an
# event for the same entry that comes later is then dropped.

import contextlib
import json
import os
import socket
import struct
from collections.abc import Callable, Mapping
from typing import Any

from sandboxes.guest.background import BackgroundProcess, BackgroundProcesses, PendingOutput, ProcessAnswer
from sandboxes.guest.files import user_files
from sandboxes.ipc.frames import receive
from sandboxes.ipc.messages import UseBackgroundProcess
from sandboxes.linux import syscalls as kernel
from sandboxes.linux.descriptors import close_all
from sandboxes.linux.trees import MAX_PATH_BYTES
from sandboxes.process_output import ERR, OUT

MAX_FOLDERS = 4096
"""The most directories of one watch. The kernel allows 8192 watches for each user by default on small machines."""
_HEAD = struct.Struct("iIII")
_ATTRIB, _MODIFY, _MOVED_FROM, _MOVED_TO = 0x4, 0x2, 0x40, 0x80
_CREATE, _DELETE, _DELETE_SELF, _MOVE_SELF = 0x100, 0x200, 0x400, 0x800
_IGNORED, _IS_FOLDER = 0x8000, 0x40000000
_WANTED = _ATTRIB | _MODIFY | _MOVED_FROM | _MOVED_TO | _CREATE | _DELETE | _DELETE_SELF | _MOVE_SELF
_TYPES = (
    (_CREATE | _MOVED_TO, "create"), (_DELETE | _DELETE_SELF, "remove"), (_MODIFY, "write"),
    (_MOVED_FROM | _MOVE_SELF, "rename"), (_ATTRIB, "chmod"),
)  # fmt: skip
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_SOCKET_FD = 3


class TooManyWatchesError(Exception):
    """A directory contains more directories than one watch may have."""


class WatchEvents(PendingOutput):
    """The events of a directory, which were not polled yet, as lines of JSON."""

    def __init__(self, folder: int, *, recursive: bool) -> None:
        """Begin to watch a directory, whose descriptor is owned from now on, or also all directories below it."""
        super().__init__(kernel.inotify())
        self._recursive = recursive
        self._folders: dict[int, tuple[str, int]] = {}
        self._reported: set[str] = set()
        self._add(folder, "", new=False)

    def drain(self, max_bytes: int) -> None:
        """Read events without waiting."""
        while self.fd >= 0:
            try:
                data = os.read(self.fd, 1 << 16)
            except BlockingIOError:
                return
            at = 0
            while at < len(data):
                # Events are packed one after the other; a name is padded with NULs to the given size.
                watch, mask, _, size = _HEAD.unpack_from(data, at)
                at += _HEAD.size
                self._happened(watch, mask, data[at : at + size].rstrip(b"\0"), max_bytes)
                at += size

    def close(self) -> None:
        """End the watch."""
        super().close()
        for _, folder in self._folders.values():
            os.close(folder)
        self._folders.clear()

    def _happened(self, watch: int, mask: int, name: bytes, limit: int) -> None:
        where, folder = self._folders.get(watch, ("", -1))
        if folder < 0:
            return
        # The kernel has removed this watch, because its directory is gone.
        if mask & _IGNORED:
            os.close(folder)
            del self._folders[watch]
            return
        shown = f"{where}{_shown(name)}"
        came = bool(mask & (_CREATE | _MOVED_TO))
        # An event without a name concerns the watched directory itself; for one below, its parent has an event too.
        if (name or not where) and not (came and shown in self._reported):
            for kinds, type_name in _TYPES:
                if mask & kinds:
                    self._report(shown or ".", type_name, limit)
        self._reported.discard(shown)
        if self._recursive and name and came and mask & _IS_FOLDER:
            with contextlib.suppress(OSError, TooManyWatchesError):
                self._add(os.open(name, _FOLDER, dir_fd=folder), f"{shown}/", new=True, limit=limit)

    def _report(self, name: str, type_name: str, limit: int) -> None:
        line = json.dumps({"name": name, "type": type_name}).encode() + b"\n"
        # Only whole lines: half an event could not be parsed.
        if len(self.data) + len(line) <= limit:
            self.data += line

    def _add(self, folder: int, where: str, *, new: bool, limit: int = 0) -> None:
        """Watch a directory, which is owned from now on; new: entries may have been made in it before this watch."""
        waiting = [(folder, where)]
        while waiting:
            folder, where = waiting.pop()
            if len(self._folders) + len(waiting) >= MAX_FOLDERS:
                close_all((folder, *(fd for fd, _ in waiting)))
                raise TooManyWatchesError(f"more than {MAX_FOLDERS} directories are to be watched")
            # Added by descriptor: a path could lead elsewhere by the time the kernel reads it.
            self._folders[kernel.inotify_add(self.fd, f"/proc/self/fd/{folder}", _WANTED)] = where, folder
            if not self._recursive:
                return
            below = []
            for name in sorted(os.listdir(folder)):  # noqa: PTH208
                shown = f"{where}{_shown(os.fsencode(name))}"
                if new:
                    self._reported.add(shown)
                    self._report(shown, "create", limit)
                # Deeper ones are not watched: their paths would fill this process's memory.
                if len(shown) > MAX_PATH_BYTES:
                    continue
                with contextlib.suppress(OSError):
                    below.append((os.open(name, _FOLDER, dir_fd=folder), f"{shown}/"))
            waiting.extend(reversed(below))


def _shown(name: bytes) -> str:
    return name.decode(errors="replace")


def _watch(arguments: Mapping[str, Any], folder: int) -> BackgroundProcess:
    events = WatchEvents(folder, recursive=bool(arguments.get("recursive")))
    # No process stands behind it: it never dies, and its stderr is closed.
    death = os.eventfd(0, os.EFD_CLOEXEC)
    return BackgroundProcess(arguments, {OUT: events, ERR: PendingOutput(-1)}, -1, death, 0, lambda: 0)


def begin(arguments: Mapping[str, Any], enter: Callable[[], None]) -> BackgroundProcess | ProcessAnswer:
    """Begin to watch a directory; return the watch, or an answer that says why there is none. `enter` drops rights."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        _open_apart(arguments, enter, theirs.fileno())
    theirs.close()
    with ours:
        failure, fds = receive(ours)
        os.waitpid(pid, 0)
    if not fds:
        return (
            409,
            "application/json",
            failure or json.dumps({"kind": "internal", "detail": "it cannot be opened"}).encode(),
        )
    try:
        return _watch(arguments, fds[0])
    except (OSError, TooManyWatchesError) as error:
        detail = {"kind": "internal", "detail": f"no watch can be had: {error}"}
        return 409, "application/json", json.dumps(detail).encode()


def _open_apart(arguments: Mapping[str, Any], enter: Callable[[], None], to: int) -> None:
    """In the child: close all but one socket, open the directory as the user, hand it over, and end."""
    try:
        # Nothing of the supervisor's stays open in a process that becomes the agent's user.
        enter()
        os.dup2(to, _SOCKET_FD)
        os.closerange(_SOCKET_FD + 1, 1 << 16)
        end = socket.socket(fileno=_SOCKET_FD)
        try:
            folder = user_files.open_folder(arguments["path"], arguments["user"])
        except user_files.UserFileError as failure:
            end.sendall(json.dumps({"kind": failure.kind, "detail": str(failure)}).encode())
        else:
            socket.send_fds(end, [b"opened"], [folder])
    finally:
        os._exit(0)


def perform(
    background: BackgroundProcesses, request: UseBackgroundProcess, body: bytes, enter: Callable[[], None]
) -> ProcessAnswer:
    """Carry out a call about a background process, or `watch` or `unwatch` a directory; see `begin`."""
    if request.tool == "watch":
        watch = begin(request.arguments, enter)
        if not isinstance(watch, BackgroundProcess):
            return watch
        background.add(watch)
    elif request.tool == "unwatch":
        if not background.drop_watch(request.arguments["process"]):
            return 404, "text/plain", b"there is no such watch"
    else:
        return background.perform(request, body)
    return 200, "application/json", b"{}"
