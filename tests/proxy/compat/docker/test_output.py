"""Docker: the output of processes on its way to clients."""

import asyncio

from proxy.compat.docker.output import OutputListener, OutputSink, client_output, first_of
from sandboxes.process_output import ERR, OUT, Frames, frame


def sink(received: bytearray, streams: frozenset[int], *, tty: bool = False) -> OutputSink:
    async def send(data: bytes) -> None:
        received.extend(data)

    return OutputSink(send, streams, tty=tty)


def test_each_client_gets_its_streams() -> None:
    """Clients of one process may want different streams; a terminal's client gets raw bytes."""
    both, errors, raw = bytearray(), bytearray(), bytearray()
    listener = OutputListener(
        [sink(both, frozenset({1, 2})), sink(errors, frozenset({2})), sink(raw, frozenset({1, 2}), tty=True)]
    )

    async def go() -> None:
        await listener.data(frame(OUT, b"o") + frame(ERR, b"e"))

    asyncio.run(go())
    assert both == frame(OUT, b"o") + frame(ERR, b"e")
    assert errors == frame(ERR, b"e")
    assert raw == b"oe"
    assert listener.has_output


def test_detach_or_disconnect_detaches() -> None:
    """A process is detached by a request, or when the client that waits for it is gone."""

    async def go() -> None:
        by_request = OutputListener([])
        by_request.detach()
        await by_request.detached()
        gone = asyncio.Event()

        async def disconnected() -> None:
            await gone.wait()

        by_client = OutputListener([], disconnected=disconnected)
        gone.set()
        await by_client.detached()

    asyncio.run(go())


def test_first_event_cancels_the_others() -> None:
    async def go() -> None:
        cancelled = asyncio.Event()

        async def endless() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()

        await first_of(endless(), asyncio.sleep(0))
        async with asyncio.timeout(10):
            await cancelled.wait()

    asyncio.run(go())


def test_killed_process_has_a_note() -> None:
    """A process that ran into the task's time limit says so in its output, after everything else."""
    output = Frames()
    output.add(OUT, b"o")
    assert client_output(output.end(None, timed_out=True), frozenset({1}), tty=True).startswith(
        b"o\n[forkpoint: killed"
    )
