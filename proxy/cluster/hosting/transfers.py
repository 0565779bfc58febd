"""One unit of a state on its way: a small one is a message, a large one has a data connection and a thread at each end.

These threads are not those of the event loop's pool. All of these could wait for the other member, whose threads wait
for this one.
"""

import asyncio
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from hashlib import sha256
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import BinaryIO, TypeVar, cast

from proxy.cluster.hosting.messages import Conversation, HostingError, LargeUnit, SmallUnit, Unit, UnitEnd
from sandboxes.errors import NotFreezableError
from sandboxes.portability import NotPortableError, Porter, SharingUnpacking, Unpacking
from sandboxes.task_owner import start

SMALL_BYTES = 1 << 20
"""Largest unit that is one message. Halved, more units wait for a connection, which takes a round trip or two. Doubled,
a unit holds up the hits on the link for longer: 3 ms for each MB."""
BUFFER_BYTES = 1 << 20
"""Size of what is read and written together on a data connection, in bytes."""
T = TypeVar("T")


class DamagedUnitError(Exception):
    """A unit did not arrive as it was packed, or the driver refuses it or its state."""


async def send_unit(conversation: Conversation, porter: Porter, part: str) -> Unit:
    """Send a unit; return it with its digest and size.

    Raises:
        HostingError: The other end has ended the conversation, or the unit cannot be read. Then the other end gets a
            unit without a digest.
    """
    try:
        pieces = porter.pack(part)
        first = await asyncio.to_thread(_beginning, pieces)
    except (OSError, ValueError, NotFreezableError) as error:
        await conversation.send(SmallUnit(""))
        raise HostingError(f"a unit of a state cannot be read: {error}") from error
    if len(first) < SMALL_BYTES:
        digest = sha256(first).hexdigest()
        await conversation.send(SmallUnit(digest), first)
        return Unit(part, digest, len(first))
    await conversation.send(LargeUnit())
    try:
        async with _carrying(conversation, lambda data: _send(data, first, pieces)) as sending:
            digest, size = await asyncio.shield(sending)
    except (OSError, ValueError, NotFreezableError) as error:
        await conversation.send(UnitEnd("", 0))
        raise HostingError(f"a unit of a state cannot be read or sent: {error}") from error
    await conversation.send(UnitEnd(digest, size))
    return Unit(part, digest, size)


async def receive_unit(conversation: Conversation, unpacking: Unpacking, unit: Unit, folder: Path) -> Unit:
    """Receive a unit and let the driver store it; return it with its digest and size.

    Args:
        conversation: What brings it.
        unpacking: Stores it.
        unit: What its sender says of it.
        folder: Where it is kept meanwhile, if the driver cannot store what is still arriving.

    Raises:
        DamagedUnitError: It is damaged, or the driver refuses it.
        HostingError: The other end has ended the conversation.
        OSError: The machine cannot store it.
    """
    try:
        envelope = await conversation.expect(SmallUnit, LargeUnit)
        if isinstance(small := envelope.message, SmallUnit):
            _require_expected(unit, small.sha256)
            await asyncio.to_thread(unpacking.part, unit.name, BytesIO(envelope.body), small.sha256)
            return Unit(unit.name, small.sha256, len(envelope.body))
        return await _receive_large(conversation, unpacking, unit, folder)
    except NotPortableError as error:
        raise DamagedUnitError(f"the unit {unit.name} cannot be used: {error}") from error


async def _receive_large(conversation: Conversation, unpacking: Unpacking, unit: Unit, folder: Path) -> Unit:
    digest: Future[str] = Future()
    async with _carrying(conversation, lambda data: _store(data, unpacking, unit.name, digest, folder)) as storing:
        try:
            end = (await conversation.expect(UnitEnd)).message
            assert isinstance(end, UnitEnd)
            # No unit has an empty digest, so the driver refuses it.
            digest.set_result(end.sha256 if unit.sha256 in ("", end.sha256) else "")
            await asyncio.shield(storing)
        finally:
            if not digest.done():
                digest.set_result("")
    return Unit(unit.name, end.sha256, end.size_bytes)


@asynccontextmanager
async def _carrying(
    conversation: Conversation, work: Callable[[socket.socket], T]
) -> AsyncIterator["asyncio.Future[T]"]:
    """Open a data connection and work on it in a thread, which has ended when the context ends.

    It ends early if the context ends early, or the channel: the connection is shut down then.

    Raises:
        OSError: There is no connection.
    """
    with await conversation.open_data() as connection, ThreadPoolExecutor(1, "data connection") as thread:
        carrying = asyncio.get_running_loop().run_in_executor(thread, work, connection)
        watching = start(_shut_with(conversation, connection))
        try:
            yield carrying
        finally:
            watching.cancel()
            _shut(connection)
            while not carrying.done():
                # What ended the context is raised after it; a further cancellation says nothing new.
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([carrying])
            # Awaited in the context, or of no interest any more.
            carrying.exception()


async def _shut_with(conversation: Conversation, connection: socket.socket) -> None:
    await conversation.channel.ended.wait()
    _shut(connection)


def _shut(connection: socket.socket) -> None:
    # Fails if the other end has gone.
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _beginning(pieces: Iterator[bytes]) -> bytes:
    """Return what a driver packs first: all of it, or `SMALL_BYTES` or a little more. Blocking."""
    data = bytearray()
    for piece in pieces:
        data += piece
        if len(data) >= SMALL_BYTES:
            break
    return bytes(data)


def _send(connection: socket.socket, first: bytes, pieces: Iterator[bytes]) -> tuple[str, int]:
    """Send what a driver packs; return its SHA-256 and its size. Blocking."""
    digest, size = sha256(), 0
    with connection.makefile("wb", BUFFER_BYTES) as file:
        for piece in chain((first,), pieces):
            file.write(piece)
            digest.update(piece)
            size += len(piece)
    connection.shutdown(socket.SHUT_WR)
    return digest.hexdigest(), size


def _store(connection: socket.socket, unpacking: Unpacking, name: str, digest: Future[str], folder: Path) -> None:
    """Store a unit while it arrives; its digest comes at its end. Blocking."""
    try:
        with connection.makefile("rb", BUFFER_BYTES) as file:
            if isinstance(unpacking, SharingUnpacking):
                unpacking.arriving(name, cast("BinaryIO", file), digest.result)
                return
            # Without a name, so that a kill leaves nothing.
            with tempfile.TemporaryFile(dir=folder) as whole:
                shutil.copyfileobj(file, whole, BUFFER_BYTES)
                whole.seek(0)
                unpacking.part(name, whole, digest.result())
    finally:
        # The sender sends no more to a driver that has refused the unit.
        _shut(connection)


def _require_expected(unit: Unit, digest: str) -> None:
    if not digest or unit.sha256 not in ("", digest):
        raise DamagedUnitError(f"the unit {unit.name} has another digest than its sender says, or cannot be read")
