"""The checkpointer of the product: CRIU images on disk, one directory for each checkpoint.

CRIU has to run inside the sandbox's namespaces, and the proxy is outside. One operation therefore involves three
processes: the proxy, a fork on the sandbox's side that enters the namespaces, and CRIU. `_operation` has the steps.

A dump has to be consistent with the sandbox's files. CRIU freezes the processes, writes the images, and sends the
notification `post-dump` before it lets them run on. `on_frozen` runs at this notification, so files and memory are of
the same moment.
"""

import asyncio
import contextlib
import hashlib
import os
import secrets
import socket
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path

from sandboxes.checkpointing import FreezeHook, MappedFiles, ProgramStarter
from sandboxes.errors import NotFreezableError, SandboxError
from sandboxes.ipc.channel import Channel, ChannelClosedError, PeerFailedError
from sandboxes.ipc.inherited import INHERITED_FD
from sandboxes.ipc.launch_messages import CriuStarted
from sandboxes.linux.files import remove_tree
from snapshots.criu.binary import ARGUMENTS, CriuBinary, CriuMissingError
from snapshots.criu.rpc import CriuConversation, CriuError

START_S = 10.0
"""Longest wait for CRIU to start, and for it to exit at the end. It takes some ten milliseconds on an idle machine.

The value is an estimate.
"""

MAX_ATTEMPTS = 8
"""Limits the attempts of one dump. Processes that keep starting programs can map an unlisted file in each of them.

The value is an estimate.
"""

_UNKNOWN_FILE = "Can't lookup mount="
"""How CRIU's log reports a mapped file whose mount no namespace lists (see `criu_launch.mapped_from_below`)."""


class _UnknownMappingError(NotFreezableError):
    """CRIU met a mapped file that its request did not list."""


class CriuCheckpointer:
    """A `Checkpointer` that saves and restores live processes with CRIU, for the driver of one data directory."""

    def __init__(self, data_dir: Path, *, images_dir: Path | None = None, outer_session: bool = False) -> None:
        """Prepare nothing yet: CRIU is looked up on the first `is_available`.

        Args:
            data_dir: The driver's data directory; our copy of CRIU is kept in it.
            images_dir: A directory that holds the images of several data directories, such as a tmpfs. None keeps
                them in the data directory.
            outer_session: Whether the session of a tree's root belongs to a process outside the tree.
        """
        data_dir = data_dir.resolve()
        self._outer_session = outer_session
        # Several data directories may share images_dir; the digest keeps their images apart.
        digest = hashlib.blake2b(str(data_dir).encode(), digest_size=8).hexdigest()
        self._directory = data_dir / "checkpoints" if images_dir is None else images_dir / f"forkpoint-{digest}"
        self._program_dir = data_dir / "criu"
        self._binary: CriuBinary | None = None
        self._preparing = asyncio.Lock()
        self._unfinished: set[str] = set()
        self.unavailable_reason = ""

    async def is_available(self) -> bool:
        """Return whether CRIU works here. The first call copies CRIU and probes the kernel, in about 0.1 s."""
        async with self._preparing:
            if self._binary is None and not self.unavailable_reason:
                try:
                    self._binary = await asyncio.to_thread(CriuBinary.prepare, self._program_dir)
                # The reason is kept and not raised: without CRIU, states with processes are reached by replay.
                except (CriuMissingError, OSError) as error:
                    self.unavailable_reason = str(error)
        return self._binary is not None

    # -- on disk -----------------------------------------------------------------------------------------------------

    def names(self) -> set[str]:
        """Return the names of the complete checkpoints, so that collecting never deletes one that is being written."""
        present = {path.name for path in self._directory.iterdir()} if self._directory.exists() else set()
        # After a kill -9, unfinished images are unknown to the next process. They count as complete, no state names
        # them, and a collection deletes them.
        return present - self._unfinished

    def size_bytes(self, names: Iterable[str]) -> int:
        """Return the bytes on disk of the checkpoints among `names`."""
        return sum(_disk_bytes(self._directory / name) for name in self.names().intersection(names))

    def drop(self, names: Iterable[str]) -> None:
        """Delete the checkpoints among `names`."""
        for name in self.names().intersection(names):
            remove_tree(self._directory / name)

    # -- dump and restore --------------------------------------------------------------------------------------------

    async def dump(self, start: ProgramStarter, root_pid: int, on_frozen: FreezeHook) -> str:
        """Save a process tree, which runs on, and return the name of its images; at most `MAX_ATTEMPTS` attempts."""
        # Mapped files that CRIU cannot name are listed before it freezes the processes. A process that starts a
        # program in between maps a file that is not in the list, and CRIU gives up. Every attempt adds what it listed,
        # so the list grows until it covers all programs that the sandbox keeps starting.
        mapped: MappedFiles = {}
        for _ in range(MAX_ATTEMPTS - 1):
            try:
                return await self._dump_once(start, root_pid, on_frozen, mapped)
            except _UnknownMappingError:
                continue
        return await self._dump_once(start, root_pid, on_frozen, mapped)

    async def _dump_once(self, start: ProgramStarter, root_pid: int, on_frozen: FreezeHook, mapped: MappedFiles) -> str:
        """Save a process tree in one attempt, which adds the mapped files that it listed to `mapped`."""
        name = f"images-{secrets.token_hex(8)}"
        images = self._directory / name
        # Hidden from `names` until the end, so that no collection deletes it and no restore uses it.
        self._unfinished.add(name)
        images.mkdir(parents=True)
        # The images hold the memory of the sandbox's processes.
        images.chmod(0o700)
        was_frozen = False
        try:
            async with self._operation(images, start) as (criu, listed):
                mapped |= listed

                async def run_hook() -> None:
                    nonlocal was_frozen
                    await on_frozen(dict(mapped))
                    was_frozen = True

                await criu.dump(root_pid, images, run_hook, external=mapped)
            # Without the hook there is no copy of the files, so these images would be restored on other files.
            if not was_frozen:
                raise NotFreezableError("CRIU ended without a notification that the processes were frozen")  # noqa: TRY301
        except BaseException as error:
            # Whatever the error is, including cancellation: incomplete images are of no use.
            await asyncio.to_thread(remove_tree, images)
            if isinstance(error, CriuError):
                # This process tree cannot be dumped; the sandbox is unharmed.
                kind = _UnknownMappingError if _UNKNOWN_FILE in str(error) else NotFreezableError
                raise kind(f"CRIU: {error}") from error
            if isinstance(error, ChannelClosedError | TimeoutError | OSError):
                # CRIU never ran: the fault is the sandbox's or the machine's.
                raise SandboxError(f"CRIU could not be started: {error}") from error
            raise
        finally:
            self._unfinished.discard(name)
        return name

    async def restore(self, name: str, start: ProgramStarter, inherited: Sequence[str]) -> None:
        """Restore the process tree of a checkpoint, with `inherited` as CRIU's names of its descriptors."""
        if not await self.is_available():
            raise SandboxError(f"processes cannot be restored: {self.unavailable_reason}")
        images = self._directory / name
        # An OSError here would be a defect of ours, so it is not turned into a SandboxError.
        try:
            async with self._operation(images, start) as (criu, _):
                # criu_launch puts the inherited descriptors at INHERITED_FD and following, in the order of the names.
                await criu.restore(images, {key: INHERITED_FD + index for index, key in enumerate(inherited)})
        except (CriuError, ChannelClosedError, TimeoutError) as error:
            raise SandboxError(f"processes could not be restored: {error}") from error

    @contextlib.asynccontextmanager
    async def _operation(
        self, images: Path, start: ProgramStarter
    ) -> AsyncIterator[tuple[CriuConversation, MappedFiles]]:
        """Run CRIU for one operation; on exit, CRIU and the process that started it are gone.

        Yields:
            The conversation with CRIU, and the mapped files that a dump has to list.
        """
        assert self._binary is not None, "callers check is_available first"
        # 1. The proxy opens a socket pair and the descriptors that CRIU needs, and passes the far end and the
        # descriptors into the sandbox (`ProgramStarter`). The sandbox's side forks, enters the namespaces and starts
        # CRIU (`sandboxes.guest.criu_launch`).
        near, far = socket.socketpair()
        reply = Channel(near)
        # The order is that of `criu_launch.operate`: reply socket, host root, images, kernel features.
        fds = [far.detach()]
        try:
            fds.append(os.open("/", os.O_PATH | os.O_CLOEXEC))
            fds.append(os.open(images, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
            fds.append(os.open(self._binary.kernel, os.O_RDONLY | os.O_CLOEXEC))
            await start([str(self._binary.program), *ARGUMENTS], fds)
            # Close our copy of the far end: only CRIU's parent holds one now, so its exit closes the socket.
            os.close(fds.pop(0))
            async with asyncio.timeout(START_S):
                try:
                    # 2. The fork replies once, with the descriptor of CRIU's RPC socket, and for a dump with the mapped
                    # files.
                    started = await reply.next(CriuStarted)
                except PeerFailedError as error:
                    raise CriuError(str(error)) from error
            criu = CriuConversation(socket.socket(fileno=started.fds[0]), outer_session=self._outer_session)
            try:
                yield criu, started.message.mapped
            finally:
                # 3. The proxy has talked to CRIU over that socket (`snapshots.criu.rpc`). CRIU exits when it closes,
                # and the fork with it. The fork's copy of the far end then closes, so the proxy sees that both are
                # gone.
                criu.close()
                # No second message comes: the wait ends when the far end closes. A CRIU that hangs is left to the
                # sandbox's own end, which kills everything in its namespaces.
                with contextlib.suppress(ChannelClosedError, TimeoutError):
                    async with asyncio.timeout(START_S):
                        await reply.receive()
        finally:
            for fd in fds:
                os.close(fd)
            reply.close()


def _disk_bytes(directory: Path) -> int:
    # st_blocks counts units of 512 bytes on every Linux file system (stat(2)); sparse images count as what they take.
    return sum(entry.stat().st_blocks * 512 for entry in os.scandir(directory))
