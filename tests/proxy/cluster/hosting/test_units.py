"""Units of states travel once to each machine, and what is damaged on its way is not used."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from itertools import islice
from pathlib import Path
from unittest.mock import patch

import pytest

from proxy.cluster.link.frames import Frame, FrameKind
from sandboxes.driver import FrozenState
from sandboxes.errors import SandboxError
from sandboxes.local.driver import LocalDriver
from sandboxes.pool.pool import NoRoomElsewhereError
from sandboxes.spec import EnvironmentSpec
from tests.machine import require_sandboxes
from tests.proxy.cluster.hosting.pair import Pair, pair_of
from tests.sandboxes.box import run, written_uppers

SPEC = EnvironmentSpec()
LARGE = "head -c 300000 /dev/urandom > large"


def with_pair(folder: Path, test: Callable[[Pair], Awaitable[None]], **options: int) -> None:
    require_sandboxes()

    async def go() -> None:
        pair = pair_of(LocalDriver, folder, **options)
        await pair.open()
        try:
            async with asyncio.timeout(60):
                await test(pair)
        finally:
            await pair.aclose()

    asyncio.run(go())


async def state(pair: Pair, command: str) -> FrozenState:
    sandbox = await pair.owner.start(SPEC)
    await run(sandbox, command)
    try:
        return await sandbox.freeze()
    finally:
        await sandbox.close()


def test_layers_travel_once(data_dir: Path) -> None:
    """The second sandbox at a state costs no bytes of it, and a state that adds to it costs what it adds."""

    async def test(pair: Pair) -> None:
        frozen = await state(pair, LARGE)
        await (await pair.placement.restore(SPEC, frozen)).close()
        first = pair.sent_bytes
        assert first > 300_000
        sandbox = await pair.placement.restore(SPEC, frozen)
        await run(sandbox, "echo more > small")
        larger = await sandbox.freeze()
        await sandbox.close()
        # Both know its new layer now.
        again = await pair.placement.restore(SPEC, larger)
        assert (await run(again, "cat small; stat -c %s large")).out == "more\n300000\n"
        assert pair.sent_bytes - first < 100_000

    with_pair(data_dir, test)


def test_layers_beyond_the_budget_are_collected(data_dir: Path) -> None:
    """A layer that no sandbox needs goes when others take its bytes, and travels again when it is needed."""

    async def test(pair: Pair) -> None:
        states = [await state(pair, LARGE) for _ in range(2)]
        for frozen in states:
            await (await pair.placement.restore(SPEC, frozen)).close()
        assert pair.hosted.held_bytes < 400_000
        await pair.host.collect(())
        before = pair.sent_bytes
        assert (await run(await pair.placement.restore(SPEC, states[1]), "stat -c %s large")).out == "300000\n"
        assert pair.sent_bytes - before < 100_000
        assert (await run(await pair.placement.restore(SPEC, states[0]), "stat -c %s large")).out == "300000\n"
        assert pair.sent_bytes - before > 300_000

    with_pair(data_dir, test, keep_bytes=400_000)


VERY_LARGE = "head -c 3000000 /dev/urandom > large"
"""Makes a layer that needs a data connection."""


def test_large_layers_have_a_connection_of_their_own(data_dir: Path) -> None:
    """In both directions; the link carries a few messages."""

    async def test(pair: Pair) -> None:
        frozen = await state(pair, VERY_LARGE)
        sandbox = await pair.placement.restore(SPEC, frozen)
        assert (await run(sandbox, "stat -c %s large; head -c 2500000 /dev/urandom > other")).out == "3000000\n"
        assert (await sandbox.freeze()).state is not None
        assert pair.sent_bytes < 100_000
        assert len(pair.data_connections) == 2
        assert not any(connection.fileno() >= 0 for connection in pair.data_connections)

    with_pair(data_dir, test)


def test_large_layer_that_cannot_be_read_is_not_used(data_dir: Path) -> None:
    """Half of it has been sent when the owner's disk fails; the host keeps nothing of it."""

    async def test(pair: Pair) -> None:
        frozen = await state(pair, VERY_LARGE)
        before, pack = set((data_dir / "b" / "layers").iterdir()), pair.owned.porter.pack

        def cut(part: str) -> Iterator[bytes]:
            yield from islice(pack(part), 4)
            raise OSError("the disk fails")

        with patch.object(pair.owned.porter, "pack", cut), pytest.raises(NoRoomElsewhereError):
            await pair.placement.restore(SPEC, frozen)
        await pair.quiet()
        assert set((data_dir / "b" / "layers").iterdir()) == before
        assert not written_uppers(data_dir / "b")

    with_pair(data_dir, test)


def test_link_that_breaks_ends_a_large_layer(data_dir: Path) -> None:
    """Both threads end, although neither end of the data connection was closed by the network."""

    async def test(pair: Pair) -> None:
        frozen, pack = await state(pair, VERY_LARGE), pair.owned.porter.pack
        loop, broken = asyncio.get_running_loop(), threading.Event()

        def breaking(part: str) -> Iterator[bytes]:
            pieces = pack(part)
            yield from islice(pieces, 4)
            loop.call_soon_threadsafe(pair.cut)
            loop.call_soon_threadsafe(broken.set)
            assert broken.wait(30)
            yield from pieces

        with patch.object(pair.owned.porter, "pack", breaking), pytest.raises(NoRoomElsewhereError):
            await pair.placement.restore(SPEC, frozen)
        await pair.quiet()
        assert not written_uppers(data_dir / "b")

    with_pair(data_dir, test)


def damaged(frame: Frame) -> Frame:
    """Change the last byte of what belongs to a large message."""
    if frame.kind is FrameKind.PIECE:
        return frame._replace(content=frame.content[:-1] + bytes([frame.content[-1] ^ 1]))
    return frame


def test_damaged_layer_is_not_used_by_the_owner(data_dir: Path) -> None:
    """The freeze fails, and with it the sandbox: nothing of it becomes a state of the tree."""

    async def test(pair: Pair) -> None:
        sandbox = await pair.placement.restore(SPEC, await state(pair, "true"))
        await run(sandbox, LARGE)
        before = set((data_dir / "a" / "layers").iterdir())
        pair.damage = damaged
        with pytest.raises(SandboxError, match="did not arrive"):
            await sandbox.freeze()
        assert not sandbox.alive
        assert set((data_dir / "a" / "layers").iterdir()) == before

    with_pair(data_dir, test)


def test_damaged_layer_is_not_used_by_the_host(data_dir: Path) -> None:
    """The host refuses the sandbox; later, with the bytes as they were, it takes it."""

    async def test(pair: Pair) -> None:
        frozen = await state(pair, LARGE)
        pair.damage_to_host = damaged
        with pytest.raises(NoRoomElsewhereError):
            await pair.placement.restore(SPEC, frozen)
        pair.damage_to_host = lambda frame: frame
        pair.forget_rooms()
        assert (await run(await pair.placement.restore(SPEC, frozen), "stat -c %s large")).out == "300000\n"

    with_pair(data_dir, test)
