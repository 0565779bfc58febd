"""Fork servers end without a word when their driver is gone, whatever it was doing."""

import socket
from collections.abc import Callable

import pytest

from sandboxes.ipc.codec import pack_message
from sandboxes.ipc.fork_child import requests
from sandboxes.ipc.launch_messages import WritePages
from sandboxes.local.launcher import Launcher
from sandboxes.workers.messages import EndWorker
from sandboxes.workers.zygote import Zygote


def test_a_driver_that_dies_before_it_reads_ends_the_requests() -> None:
    """The kernel reports a reset then, and not an end of the stream."""
    driver, child = socket.socketpair()
    with child:
        child.sendall(b"an answer that nobody reads")
        driver.close()
        assert list(requests(child)) == []


@pytest.mark.parametrize(
    ("serve", "request_"),
    [
        (lambda child: Zygote(child, "sqlite").serve(), pack_message(EndWorker(1))),
        (
            lambda child: Launcher(child, privileged=False).serve(),
            pack_message(WritePages([])),
        ),
    ],
    ids=["zygote", "launcher"],
)
def test_an_answer_to_a_dead_driver_is_no_error(serve: Callable[[socket.socket], None], request_: bytes) -> None:
    """A proxy was killed just after it asked for a sandbox."""
    driver, child = socket.socketpair()
    with child:
        driver.sendall(request_)
        driver.close()
        serve(child)
