"""A process that another user's service has started on request, seen through its process descriptor."""

import asyncio
import contextlib
import json
import os
import select
import signal
import socket
from collections.abc import Sequence

from sandboxes.ipc.frames import receive

_PATIENCE_S = 30.0
"""Longest wait for the service: it answers one request after the other, in milliseconds."""


class LaunchedProcess:
    """A process that is no child of this one. Waiting for it is as for `asyncio.subprocess.Process`."""

    def __init__(self, pid: int, descriptor: int) -> None:
        self.pid, self._descriptor = pid, descriptor

    @property
    def returncode(self) -> int | None:
        """None while the process runs; what it ended with is its parent's to know."""
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        return 0 if poll.poll(0) else None

    async def wait(self) -> int:
        """Return when the process has ended."""
        exited = asyncio.Event()
        loop = asyncio.get_running_loop()
        # A copy: another task may wait too, and the loop has one reader for each number.
        descriptor = os.dup(self._descriptor)
        loop.add_reader(descriptor, exited.set)
        try:
            await exited.wait()
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)
        return 0

    def kill(self) -> None:
        """Kill the process, as far as this one's rights go."""
        with contextlib.suppress(PermissionError):
            signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)

    def __del__(self) -> None:
        os.close(self._descriptor)


async def launch(service: str, end: socket.socket, arguments: Sequence[str]) -> LaunchedProcess:
    """Have the service at a path start its program on one end of a socket; ValueError if it is another service."""
    return await asyncio.to_thread(_launch, service, end, arguments)


def _launch(service: str, end: socket.socket, arguments: Sequence[str]) -> LaunchedProcess:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(_PATIENCE_S)
        try:
            connection.connect(service)
        except OSError as error:
            raise OSError(error.errno, f"{service}: {error.strerror}") from error
        socket.send_fds(connection, [json.dumps(list(arguments)).encode()], [end.fileno()])
        answer, fds = receive(connection)
    if len(fds) != 1:
        raise OSError(f"the service at {service} starts nothing for this user")
    return LaunchedProcess(int(answer), fds[0])
