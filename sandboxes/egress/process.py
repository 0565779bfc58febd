"""The egress proxy: a process of its own, in which nothing of the proxy's is, and whose both sides may be hostile.

Its only capability is to open files. It has the filter of system calls that sandboxes have, and ends with the driver.
"""

import asyncio
import os
import resource
import signal
import socket
import sys
from pathlib import Path

from sandboxes.egress.dialing import Dialer
from sandboxes.egress.fair_slots import Requester
from sandboxes.egress.fetching import HostFetcher
from sandboxes.egress.messages import CloseOutlet, OpenOutlet, RecountRecordings, TakeExchanges
from sandboxes.egress.outlet import Outlet
from sandboxes.egress.recordings import Recordings
from sandboxes.ipc.channel import Channel, ChannelClosedError
from sandboxes.ipc.codec import IpcMessage, decode, pack_message
from sandboxes.ipc.fork_child import connect
from sandboxes.ipc.launch_messages import ForkServerReady
from sandboxes.ipc.messages import Done, Failed
from sandboxes.linux import confine
from sandboxes.linux import syscalls as kernel
from sandboxes.task_owner import TaskOwner
from sandboxes.workers.zygote import drop_privileges

_MAX_DESCRIPTORS = 1 << 16


class EgressServer:
    """Serves the outlets of all sandboxes of one driver."""

    def __init__(self, folder: Path, dialer: Dialer) -> None:
        self._dialer = dialer
        self._recordings = Recordings(folder)
        self._fetcher = HostFetcher(dialer, self._recordings)
        self._outlets: dict[str, Outlet] = {}
        self._serving: dict[str, asyncio.Task[None]] = {}
        self._tasks = TaskOwner()

    async def run(self, driver: socket.socket) -> None:
        """Answer the driver until it closes its end."""
        channel = Channel(driver)
        try:
            while True:
                envelope = decode(await channel.receive())
                await channel.post(await self._answer(envelope.message, envelope.fds))
        except ChannelClosedError:
            return

    async def _answer(self, message: IpcMessage, fds: list[int]) -> IpcMessage:
        match message:
            case OpenOutlet(sandbox, hosts, scope):
                listener = socket.socket(fileno=fds[0])
                requester = Requester(sandbox, scope)
                outlet = Outlet(listener, tuple(hosts), requester, self._fetcher, self._dialer)
                self._outlets[sandbox] = outlet
                self._serving[sandbox] = self._tasks.spawn("serve a sandbox", outlet.serve())
            case TakeExchanges(sandbox):
                # An outlet of the process before this one, which has died, is gone with it.
                if sandbox not in self._outlets:
                    return Failed("the sandbox has lost its egress")
                return self._outlets[sandbox].take()
            case RecountRecordings():
                await asyncio.to_thread(self._recordings.recount)
            case CloseOutlet(sandbox):
                serving = self._serving.pop(sandbox, None)
                if serving is not None:
                    serving.cancel()
                    await asyncio.wait([serving])
                    await self._outlets.pop(sandbox).close()
            case _:
                raise AssertionError(f"{message.op} is not for the egress proxy")
        return Done()


def serve(dialer: Dialer) -> None:
    """Serve the driver: argv is its descriptor, and the directory of recordings."""
    driver = connect()
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    kernel.set_process_name("egress")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = min(most, _MAX_DESCRIPTORS) if most != resource.RLIM_INFINITY else _MAX_DESCRIPTORS
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    folder = Path(sys.argv[2])
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        drop_privileges(folder, network=True)
        kernel.seccomp(confine.program(kernel.MACHINE))
    except OSError as error:
        driver.sendall(pack_message(Failed(str(error))))
        return
    driver.sendall(pack_message(ForkServerReady()))
    asyncio.run(_run(folder, dialer, driver))
    # Without waiting for threads that look up names.
    os._exit(0)


async def _run(folder: Path, dialer: Dialer, driver: socket.socket) -> None:
    await EgressServer(folder, dialer).run(driver)


def main() -> None:
    """Serve the driver with this machine's resolver."""
    serve(Dialer())
