"""Waiting for non-blocking descriptors, such as pipes to processes in a sandbox, on the event loop."""

import asyncio
import os

from sandboxes.linux.descriptors import read_available


async def write_all(fd: int, data: bytes, timeout_s: float) -> None:
    """Write all data to a non-blocking descriptor; TimeoutError if the other end read nothing for `timeout_s`."""
    # A view, because slices of bytes would copy the rest after each part that a pipe takes.
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        # Tried first and waited for second: most writes fit, and each watch costs two system calls.
        except BlockingIOError:
            await wait_until_ready(fd, timeout_s, writing=True)


async def read_some(fd: int, timeout_s: float) -> bytes:
    """Return the next bytes of a non-blocking descriptor, none at its end; TimeoutError if none come in `timeout_s`."""
    while (data := read_available(fd)) is None:
        await wait_until_ready(fd, timeout_s, writing=False)
    # The other end may write faster than this one reads, and then nothing here would ever wait.
    await asyncio.sleep(0)
    return data


async def wait_until_ready(fd: int, timeout_s: float, *, writing: bool) -> None:
    """Wait until a non-blocking descriptor can be read or written; raise TimeoutError after `timeout_s`."""
    loop = asyncio.get_running_loop()
    event = asyncio.Event()
    add, remove = (loop.add_writer, loop.remove_writer) if writing else (loop.add_reader, loop.remove_reader)
    # Level-triggered: if the descriptor is ready already, the event comes in the next turn of the loop.
    add(fd, event.set)
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    finally:
        # Removed before the caller goes on: it may close the descriptor, whose number the next open would reuse.
        remove(fd)
