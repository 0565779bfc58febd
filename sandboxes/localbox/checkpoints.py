"""Checkpoints of live processes: CRIU's images, one directory each, with a layer of the files of the same moment."""

import asyncio
import contextlib
import os
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sandboxes.criu import ARGUMENTS, Conversation, Criu, CriuMissing, CriuRefused
from sandboxes.driver import NotFreezable, SandboxError
from sandboxes.localbox.channel import Channel, ChannelLost
from sandboxes.localbox.layers import Layers, Upper, remove_tree
from sandboxes.localbox.operate import INHERITED_FD
from sandboxes.localbox.restoring import inherited
from sandboxes.localbox.wire import Message

BEGIN_S = 10.0
"""How long CRIU may take to start."""

Ask = Callable[[dict[str, Any], list[int]], Awaitable[Message]]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """images: their name. layer: what was written since the last one, none or one. told: what pid 1 said of it all."""

    images: str
    layer: tuple[str, ...]
    told: dict[str, Any]
    size_bytes: int

    @property
    def parts(self) -> tuple[str, ...]:
        return (*self.layer, self.images)


class Checkpoints:
    """Those of one data directory. ask: sends the launcher a request. wanted: whether to use CRIU where it works."""

    def __init__(self, data_dir: Path, layers: Layers, ask: Ask, *, wanted: bool) -> None:
        self._directory = data_dir / "checkpoints"
        self._own = data_dir / "criu"
        self._layers, self._ask = layers, ask
        self._criu: Criu | None = None
        self._preparing = asyncio.Lock()
        self.missing = "" if wanted else "checkpoints of live processes are turned off"

    async def possible(self) -> bool:
        """Whether CRIU works here; `missing` says why not. Finds out when first asked."""
        async with self._preparing:
            if self._criu is None and not self.missing:
                try:
                    self._criu = await asyncio.to_thread(Criu.prepare, self._own)
                except (CriuMissing, OSError) as error:
                    self.missing = str(error)
        return self._criu is not None

    # -- on disk -----------------------------------------------------------------------------------------------------

    def all(self) -> set[str]:
        return {path.name for path in self._directory.iterdir()} if self._directory.exists() else set()

    def size_bytes(self, names: Iterable[str]) -> int:
        """Return the bytes on disk of those of names that are checkpoints."""
        return sum(_bytes(self._directory / name) for name in self.all().intersection(names))

    def drop(self, names: Iterable[str]) -> None:
        """Delete those of names that are checkpoints."""
        for name in self.all().intersection(names):
            remove_tree(self._directory / name)

    # -- taking ------------------------------------------------------------------------------------------------------

    async def take(
        self, process: int, tree: int, *, look: Callable[[], Awaitable[Message]], upper: Upper
    ) -> Checkpoint:
        """Dump the processes below tree of the sandbox behind process, a pidfd; the sandbox goes on.

        look: asks pid 1 what it knows; called while the processes stand still, when upper is copied too.

        Raises:
            NotFreezable: CRIU cannot dump them, in its own words.
            SandboxError: the sandbox or the machine failed.
        """
        name = f"images-{secrets.token_hex(8)}"
        images = self._directory / name
        images.mkdir(parents=True)
        images.chmod(0o700)
        told: dict[str, Any] = {}
        layer: list[str] = []

        async def held() -> None:
            told.update((await look()).fields)
            told["checkpoint"]["mapped"] = mapped
            changed = set(mapped.values()) & {f"/{path}" for path in told["delta"] or mapped.values()}
            if changed:
                # By its path another file would be mapped.
                raise NotFreezable(f"{min(changed)} may have been changed since it was mapped")
            if not told["empty"]:
                layer.append(await asyncio.to_thread(self._copy, upper, told))

        try:
            async with self._conversation(images) as (files, reply, program):
                await self._ask({"op": "operate", "program": program}, [process, *files])
                # The other end is theirs alone now: it closes when CRIU has ended.
                os.close(files.pop(0))
                talk, mapped = await _answered(reply)
                try:
                    await talk.dump(tree, images, held, external=mapped)
                finally:
                    talk.close()
                    await _gone(reply)
            # Somebody may have killed what CRIU was to hold still.
            if "checkpoint" not in told:
                raise NotFreezable("CRIU ended before the processes stood still")  # noqa: TRY301
        except BaseException as error:
            await asyncio.to_thread(self._layers.drop, layer)
            await asyncio.to_thread(remove_tree, images)
            if isinstance(error, CriuRefused):
                raise NotFreezable(f"CRIU: {error}") from error
            if isinstance(error, ChannelLost | TimeoutError | OSError):
                raise SandboxError(f"CRIU could not be started: {error}") from error
            raise
        size = await asyncio.to_thread(_bytes, images)
        return Checkpoint(name, tuple(layer), told, size + sum(map(self._layers.size_bytes, layer)))

    def _copy(self, upper: Upper, told: dict[str, Any]) -> str:
        copy = self._layers.allocate()
        self._layers.copy(upper, copy)
        return self._layers.freeze(copy, {"delta": told["delta"], "size_bytes": int(told["size_bytes"])})

    # -- bringing back -----------------------------------------------------------------------------------------------

    async def bring_back(
        self,
        name: str,
        checkpoint: dict[str, Any],
        fields: dict[str, Any],
        mounted: list[int],
        talk_to_init: Callable[..., Awaitable[Message]],
    ) -> Message:
        """Have a spare's pid 1 begin with what is in the images; return its answer when the shells are there.

        Raises:
            SandboxError: CRIU is missing or failed, or the sandbox did.
        """
        if not await self.possible():
            raise SandboxError(f"processes cannot be restored: {self.missing}")
        images = self._directory / name
        inherit = {key: INHERITED_FD + at for at, key in enumerate(inherited(checkpoint))}
        async with self._conversation(images) as (files, reply, program):
            theirs, *rest = files
            root = os.open("/", os.O_PATH | os.O_CLOEXEC)
            try:
                await talk_to_init({**fields, "program": program}, b"", [*mounted, theirs, root, *rest])
            finally:
                os.close(root)
            try:
                criu, _ = await _answered(reply)
                try:
                    await criu.restore(images, inherit)
                finally:
                    criu.close()
            except (CriuRefused, ChannelLost, TimeoutError) as error:
                raise SandboxError(f"processes could not be restored: {error}") from error
            return await talk_to_init({"op": "restored"})

    @contextlib.asynccontextmanager
    async def _conversation(self, images: Path) -> AsyncIterator[tuple[list[int], Channel, list[str]]]:
        """Open what whoever starts CRIU is given: the socket to answer on, the images, the kernel's features."""
        assert self._criu is not None
        ours, theirs = socket.socketpair()
        reply = Channel(ours)
        files = [theirs.detach()]
        try:
            files.append(os.open(images, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
            files.append(os.open(self._criu.kernel, os.O_RDONLY | os.O_CLOEXEC))
            yield files, reply, [str(self._criu.program), *ARGUMENTS]
        finally:
            for fd in files:
                os.close(fd)
            reply.close()


async def _answered(reply: Channel) -> tuple[Conversation, dict[str, str]]:
    async with asyncio.timeout(BEGIN_S):
        message = await reply.receive()
    if "error" in message.fields:
        raise CriuRefused(str(message.fields["error"]))
    return Conversation(socket.socket(fileno=message.fds[0])), message.fields.get("mapped", {})


async def _gone(reply: Channel) -> None:
    """Wait until whoever ran CRIU has ended, and CRIU with it."""
    with contextlib.suppress(ChannelLost, TimeoutError):
        async with asyncio.timeout(BEGIN_S):
            await reply.receive()


def _bytes(directory: Path) -> int:
    return sum(entry.stat().st_blocks * 512 for entry in os.scandir(directory))
