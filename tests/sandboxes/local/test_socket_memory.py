"""Memory in sockets is bounded by the limit of a sandbox's memory, whatever the control groups count."""

from pathlib import Path

import pytest

from sandboxes.driver import Sandbox
from sandboxes.spec import Limits
from tests.sandboxes.box import in_sandbox, needs_root, run

LIMITS = Limits(memory_mb=64, timeout_s=60)
UDP = """
import socket
held = []
for _ in range(40):
    a = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    a.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
    a.bind(('127.0.0.1', 0))
    for _ in range(100): a.sendto(bytes(60000), a.getsockname())
    held.append(a)
queues = [line.split()[4].split(':') for line in open('/proc/net/udp').readlines()[1:]]
print(sum(int(part, 16) for queue in queues for part in queue) >> 20)
"""
TCP = """
import socket
held, sent = [], 0
server = socket.create_server(('127.0.0.1', 0), backlog=512)
for _ in range(300):
    a = socket.socket()
    a.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
    a.connect(server.getsockname())
    held += [a, server.accept()[0]]
    a.setblocking(False)
    try:
        while True: sent += a.send(bytes(1 << 16))
    except BlockingIOError: pass
print(sent >> 20)
"""

pytestmark = needs_root


@pytest.mark.parametrize("fill", [TCP, UDP], ids=["connections", "datagrams"])
def test_what_waits_in_sockets_is_bounded(data_dir: Path, fill: str) -> None:
    async def test(sandbox: Sandbox) -> None:
        filled = await run(sandbox, f'python3 -c "{fill}"', timeout_s=60)
        # Where it counts as other memory, the program may be killed.
        assert filled.code == 137 or 1 <= int(filled.out) < 1.5 * LIMITS.memory_mb, filled.out

    in_sandbox(data_dir, test, limits=LIMITS)
