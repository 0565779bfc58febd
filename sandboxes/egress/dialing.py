"""Connections to hosts outside: the name is resolved here, every address is checked, and a checked one is connected to.

A name that leads to an address that is not public is refused as a whole: it is what DNS rebinding looks like. The
connection goes to the very address that was checked, so a second look-up, with another result, does not happen.
"""

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from sandboxes.egress.addresses import is_public
from sandboxes.egress.fair_slots import FairSlots, Requester
from sandboxes.task_owner import TaskOwner

Resolve = Callable[[str], Coroutine[Any, Any, list[str]]]
"""Returns the addresses of a name; raises OSError."""
Connect = Callable[[str, int], Awaitable[socket.socket]]
"""Connects to an address and port, without looking up names; raises OSError."""

_RESOLVE_S = 10.0
"""Longest look-up of a name; the libraries' own limits are about as long. The value is an estimate."""
_CONNECT_S = 10.0
"""Longest wait for a connection to one address. Most take a tenth of a second; the value is an estimate."""
_LOOK_UPS = 64
"""Look-ups at once, each in a thread. A sandbox that asks for slow names, as a wildcard lets it, gets 22 of them."""
_RESOLVERS = ThreadPoolExecutor(_LOOK_UPS, "resolve")
_ADDRESSES = 3
"""How many addresses of a name are tried."""


class FailedError(Exception):
    """There is no response: the name has no usable address, or the host cannot be reached or breaks its protocol."""

    def __init__(self, reason: str, status: int = 502) -> None:
        super().__init__(reason)
        self.status = status  # The HTTP status of the response that says so.


async def resolve(name: str) -> list[str]:
    """Return the addresses of a DNS name, as this machine's resolver gives them. Raises OSError if there are none."""
    # The dot at the end keeps the resolver from trying the machine's own search domains. Threads of its own, because a
    # look-up goes on after its time is over, and recordings are read in the others.
    look_up = partial(socket.getaddrinfo, f"{name}.", None, type=socket.SOCK_STREAM)
    rows = await asyncio.get_running_loop().run_in_executor(_RESOLVERS, look_up)
    return [str(address[0]) for *_, address in rows]


async def connect(address: str, port: int) -> socket.socket:
    """Connect to an address. Raises OSError if the host cannot be reached."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    connection = socket.socket(family, socket.SOCK_STREAM)
    connection.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(connection, (address, port))
    except BaseException:
        connection.close()
        raise
    return connection


class Dialer:
    """Connects to hosts outside."""

    def __init__(self, resolve: Resolve = resolve, connect: Connect = connect) -> None:
        self._resolve, self._connect = resolve, connect
        self._room, self._look_ups = FairSlots(_LOOK_UPS), TaskOwner()

    async def dial(self, requester: Requester, host: str, port: int) -> socket.socket:
        """Return a connection to a host; a name with an address that is not public is a `FailedError`."""
        try:
            async with asyncio.timeout(_RESOLVE_S):
                addresses = await self._look_up(requester, host)
        except (OSError, TimeoutError, UnicodeError) as error:
            raise FailedError(f"{host} cannot be resolved: {error or 'timeout'}") from None
        for address in addresses:
            if not is_public(address) or _is_own(address):
                raise FailedError(f"{host} has an address that is not public", 403)
        reason = "it has no address"
        for address in addresses[:_ADDRESSES]:
            try:
                async with asyncio.timeout(_CONNECT_S):
                    return await self._connect(address, port)
            except (OSError, TimeoutError) as error:
                reason = str(error) or "timeout"
        raise FailedError(f"{host}:{port} cannot be reached: {reason}")

    async def _look_up(self, requester: Requester, host: str) -> list[str]:
        await self._room.take(requester)
        # A look-up goes on after its time is over, and holds its slot, and its thread, until it ends.
        look_up = self._look_ups.spawn("look-up of a name", self._resolve(host), awaited=True)
        look_up.add_done_callback(lambda _: self._room.give_back(requester))
        return await asyncio.shield(look_up)


def _is_own(address: str) -> bool:
    """Return whether an address is one of this machine's, at which its own servers may listen: it can be bound."""
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe,
    ):
        probe.bind((address, 0))
        return True
    return False
