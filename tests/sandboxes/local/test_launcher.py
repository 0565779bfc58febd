"""The launcher on a machine that has no memory left: no request is carried out half, or in another's namespaces."""

import errno
import os
import socket
from unittest.mock import Mock

import pytest

from sandboxes.ipc.codec import decode, pack_message
from sandboxes.ipc.fork_child import requests
from sandboxes.ipc.launch_messages import ForkSandbox, RunCriu
from sandboxes.ipc.messages import Done, Failed
from sandboxes.linux import syscalls as kernel
from sandboxes.local.launcher import Launcher

NO_MEMORY = Mock(side_effect=OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)))


def asked(driver: socket.socket, request: ForkSandbox | RunCriu, fds: list[int]) -> None:
    socket.send_fds(driver, [pack_message(request, fds=len(fds))], fds)
    driver.shutdown(socket.SHUT_WR)


def test_a_launcher_that_cannot_come_back_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would make the next sandbox, and mount its layers, in the namespaces of the last one."""
    driver, child = socket.socketpair()
    monkeypatch.setattr(kernel, "unshare", Mock())
    monkeypatch.setattr(kernel, "setns", NO_MEMORY)
    monkeypatch.setattr(os, "fork", NO_MEMORY)
    monkeypatch.setattr(os, "_exit", Mock(side_effect=SystemExit))
    with driver, child:
        asked(driver, ForkSandbox([], ""), [os.dup(child.fileno()), os.dup(child.fileno())])
        with pytest.raises(SystemExit):
            Launcher(child, privileged=False).serve()


def test_a_criu_without_memory_is_reported_as_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for CRIU learns of it there, as of any other failure of its start."""
    driver, child = socket.socketpair()
    reply, far = socket.socketpair()
    monkeypatch.setattr(os, "fork", NO_MEMORY)
    with driver, child, reply:
        files = [os.dup(child.fileno()) for _ in range(3)]
        asked(driver, RunCriu([]), [os.dup(child.fileno()), far.detach(), *files])
        Launcher(child, privileged=False).serve()
        assert isinstance(decode(next(requests(driver))).message, Done)
        assert isinstance(decode(next(requests(reply))).message, Failed)
