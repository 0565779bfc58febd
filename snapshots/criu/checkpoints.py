"""Checkpoints of live processes: CRIU's images, one directory each, and the carrying out of dump and restore."""

import asyncio
import contextlib
import hashlib
import os
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sandboxes.errors import NotFreezableError, SandboxError
from sandboxes.ipc.channel import Channel, ChannelClosedError
from sandboxes.ipc.inherited import INHERITED_FD
from sandboxes.linux.files import remove_tree
from snapshots.criu.rpc import ARGUMENTS, Criu, CriuConversation, CriuError, CriuMissingError

BEGIN_S = 10.0
"""How long CRIU may take to start."""

CriuStarter = Callable[[list[str], list[int]], Awaitable[Any]]
"""Has CRIU started in a sandbox: given its path and arguments, and the descriptors that `operate` takes."""
Mapped = dict[str, str]
"""CRIU's names of mapped files that it cannot open by itself -> their paths."""
_ATTEMPTS = 8
"""What runs below may start programs all the time. CRIU must be told of the files that they map before it makes them
stand still, so it may meet one that nobody knew of. Each attempt knows those that the ones before have seen."""


_UNKNOWN_FILE = "Can't lookup mount="


class _UnknownMappingError(NotFreezableError):
    """CRIU met a mapped file that it was not told of."""


class Checkpoints:
    """Those of one driver, below data_dir, or below elsewhere. wanted: whether to use CRIU where it works.

    outer_session: see `CriuConversation`.
    """

    def __init__(
        self, data_dir: Path, *, wanted: bool, elsewhere: Path | None = None, outer_session: bool = False
    ) -> None:
        self._outer_session = outer_session
        # A name that no other data directory's has.
        own = hashlib.blake2b(str(data_dir).encode(), digest_size=8).hexdigest()
        self._directory = data_dir / "checkpoints" if elsewhere is None else elsewhere / f"forkpoint-{own}"
        self._own = data_dir / "criu"
        self._criu: Criu | None = None
        self._preparing = asyncio.Lock()
        self._under_way: set[str] = set()
        self.missing = "" if wanted else "checkpoints of live processes are turned off"

    async def possible(self) -> bool:
        """Whether CRIU works here; `missing` says why not. Finds out when first asked: 0.1 s."""
        async with self._preparing:
            if self._criu is None and not self.missing:
                try:
                    self._criu = await asyncio.to_thread(Criu.prepare, self._own)
                except (CriuMissingError, OSError) as error:
                    self.missing = str(error)
        return self._criu is not None

    # -- on disk -----------------------------------------------------------------------------------------------------

    def all(self) -> set[str]:
        """Return the names of what is there; what is still being taken is nobody's yet."""
        there = {path.name for path in self._directory.iterdir()} if self._directory.exists() else set()
        return there - self._under_way

    def size_bytes(self, names: Iterable[str]) -> int:
        """Return the bytes on disk of those of names that are checkpoints."""
        return sum(_bytes(self._directory / name) for name in self.all().intersection(names))

    def drop(self, names: Iterable[str]) -> None:
        """Delete those of names that are checkpoints."""
        for name in self.all().intersection(names):
            remove_tree(self._directory / name)

    # -- dump and restore --------------------------------------------------------------------------------------------

    async def take(self, start: CriuStarter, tree: int, held: Callable[[Mapped], Awaitable[None]]) -> str:
        """Dump the processes below tree, a pid in the sandbox; return the checkpoint's name. They run on.

        held: awaited while they stand still, so that the files of the same moment can be kept.

        Raises:
            NotFreezable: CRIU cannot dump them, in its own words.
            SandboxError: the sandbox or the machine failed.
        """
        seen: Mapped = {}
        for _ in range(_ATTEMPTS - 1):
            try:
                return await self._take(start, tree, held, seen)
            except _UnknownMappingError:
                continue
        return await self._take(start, tree, held, seen)

    async def _take(
        self, start: CriuStarter, tree: int, held: Callable[[Mapped], Awaitable[None]], seen: Mapped
    ) -> str:
        name = f"images-{secrets.token_hex(8)}"
        images = self._directory / name
        self._under_way.add(name)
        images.mkdir(parents=True)
        images.chmod(0o700)
        stood_still = False
        try:
            async with self._operation(images, start) as (criu, mapped):
                seen |= mapped
                told = dict(seen)

                async def stand_still() -> None:
                    nonlocal stood_still
                    await held(told)
                    stood_still = True

                await criu.dump(tree, images, stand_still, external=told)
            if not stood_still:
                raise NotFreezableError("CRIU ended before the processes stood still")  # noqa: TRY301
        except BaseException as error:
            await asyncio.to_thread(remove_tree, images)
            if isinstance(error, CriuError):
                raise (_UnknownMappingError if _UNKNOWN_FILE in str(error) else NotFreezableError)(
                    f"CRIU: {error}"
                ) from error
            if isinstance(error, ChannelClosedError | TimeoutError | OSError):
                raise SandboxError(f"CRIU could not be started: {error}") from error
            raise
        finally:
            self._under_way.discard(name)
        return name

    async def bring_back(self, name: str, start: CriuStarter, inherit: Sequence[str]) -> None:
        """Restore a checkpoint in a sandbox that has nothing running yet.

        inherit: CRIU's names of what start gives it from `INHERITED_FD` on.

        Raises:
            SandboxError: CRIU is missing or failed, or the sandbox did.
        """
        if not await self.possible():
            raise SandboxError(f"processes cannot be restored: {self.missing}")
        images = self._directory / name
        try:
            async with self._operation(images, start) as (criu, _):
                await criu.restore(images, {key: INHERITED_FD + at for at, key in enumerate(inherit)})
        except (CriuError, ChannelClosedError, TimeoutError) as error:
            raise SandboxError(f"processes could not be restored: {error}") from error

    @contextlib.asynccontextmanager
    async def _operation(self, images: Path, start: CriuStarter) -> AsyncIterator[tuple[CriuConversation, Mapped]]:
        """Have CRIU started; at the end wait until it is gone, and whoever ran it."""
        assert self._criu is not None
        ours, theirs = socket.socketpair()
        reply = Channel(ours)
        files = [theirs.detach()]
        try:
            files.append(os.open("/", os.O_PATH | os.O_CLOEXEC))
            files.append(os.open(images, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
            files.append(os.open(self._criu.kernel, os.O_RDONLY | os.O_CLOEXEC))
            await start([str(self._criu.program), *ARGUMENTS], files)
            # The other end is theirs alone now: it closes when CRIU has ended.
            os.close(files.pop(0))
            async with asyncio.timeout(BEGIN_S):
                message = await reply.receive()
            if "error" in message.fields:
                raise CriuError(str(message.fields["error"]))
            criu = CriuConversation(socket.socket(fileno=message.fds[0]), outer_session=self._outer_session)
            try:
                yield criu, message.fields.get("mapped", {})
            finally:
                criu.close()
                with contextlib.suppress(ChannelClosedError, TimeoutError):
                    async with asyncio.timeout(BEGIN_S):
                        await reply.receive()
        finally:
            for fd in files:
                os.close(fd)
            reply.close()


def _bytes(directory: Path) -> int:
    return sum(entry.stat().st_blocks * 512 for entry in os.scandir(directory))


def changed_since_mapped(mapped: Mapping[str, str], delta: Mapping[str, Any] | None) -> str | None:
    """Return a mapped file that may be another by now, so that opening it by its path would be wrong (pure).

    delta: the paths that differ from what all sandboxes start with, without their leading slash; None: unknown.
    """
    return min((path for path in mapped.values() if delta is None or path.lstrip("/") in delta), default=None)
