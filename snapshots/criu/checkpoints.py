"""The checkpointer of the product: CRIU images on disk, one directory for each checkpoint.

CRIU runs inside the sandbox's namespaces, and the proxy is outside. So one operation involves three processes: the
proxy, a fork on the sandbox's side that enters the namespaces (the operator), and CRIU. CRIU pauses three times, with a
notification:

1. `query-ext-files`: it has frozen the processes of a dump and looked nothing up yet. The operator looks at all names
   that they hold, and lists the mapped files that CRIU cannot open by itself.
2. `post-dump`: the images of a dump are written. `on_frozen` copies the sandbox's files, so files and memory are of the
   same moment. Then the processes run on, also while `finish` completes the checkpoint.
3. `pre-resume`: a restore is done but for letting the processes run. The operator lets them follow links again.
   Processes that stand still between calls are frozen here, and CRIU's end does not let them run.
"""

import asyncio
import contextlib
import errno
import hashlib
import json
import math
import os
import secrets
import socket
import stat
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path

from sandboxes.checkpointing import FreezeHook, MappedFiles, ProgramStarter, StandStill
from sandboxes.errors import NotFreezableError, NotFreezableNowError, SandboxError, StateGoneError
from sandboxes.ipc.channel import Channel, ChannelClosedError, PeerFailedError
from sandboxes.ipc.inherited import INHERITED_FD
from sandboxes.ipc.launch_messages import (
    CriuStarted,
    FindWatched,
    FollowLinks,
    InspectNames,
    NamesInspected,
    NamesRefused,
)
from sandboxes.ipc.messages import Done
from sandboxes.linux import syscalls as kernel
from sandboxes.linux.descriptors import close_all
from sandboxes.linux.files import remove_tree
from sandboxes.linux.processes import LAST_PID
from snapshots.criu import image_digest, page_sharing
from snapshots.criu.binary import ARGUMENTS, CriuBinary, CriuMissingError, CriuUntriedError
from snapshots.criu.rpc import CriuConversation, CriuError, CriuGoneError, CriuUnstartedError

START_S = 10.0
"""Longest wait for CRIU to start, and for it to exit at the end. It takes some ten milliseconds on an idle machine. The
value is an estimate."""

AGAIN_S = 10.0
"""How long after the machine failed CRIU is prepared again. Preparing takes 0.3 s, while a freeze waits."""


def _refusal(error: BaseException) -> SandboxError | NotFreezableError | None:
    """Return what a failed dump means; None if the error says it. With a `SandboxError` the sandbox must not go on."""
    match error:
        case CriuGoneError():
            return SandboxError(f"its processes may be damaged: {error}")
        case CriuUnstartedError():
            return NotFreezableNowError(str(error))
        case CriuError():
            # This process tree cannot be dumped; the sandbox is unharmed.
            is_full = os.strerror(errno.ENOSPC) in str(error)
            return (NotFreezableNowError if is_full else NotFreezableError)(f"CRIU: {error}{_hint(error)}")
        case ChannelClosedError() | PeerFailedError() | TimeoutError():
            # The operator ended amid the dump.
            return SandboxError(f"its processes may stand still: {error}")
        case OSError():
            return NotFreezableNowError(f"a checkpoint of its processes could not be written: {error}")
    return None


def _hint(error: CriuError) -> str:
    if "rlimit" in str(error) and not kernel.permitted() >> kernel.CAP_SYS_RESOURCE & 1:
        return ". A process belongs to another user, and the capability SYS_RESOURCE is missing (docs/deploying.md)"
    return ""


class CriuCheckpointer:
    """A `Checkpointer` that saves and restores live processes with CRIU, for the driver of one data directory."""

    def __init__(self, data_dir: Path, *, images_dir: Path | None = None) -> None:
        """Prepare nothing yet. `images_dir` holds the images of several data directories; None: they are here."""
        data_dir = data_dir.resolve()
        # Several data directories may share images_dir; the digest keeps their images apart.
        digest = hashlib.blake2b(str(data_dir).encode(), digest_size=8).hexdigest()
        self._directory = data_dir / "checkpoints" if images_dir is None else images_dir / f"forkpoint-{digest}"
        self._program_dir = data_dir / "criu"
        self._binary: CriuBinary | None = None
        self._preparing = asyncio.Lock()
        self._unfinished: set[str] = set()
        self.unavailable_reason, self._try_at = "", 0.0

    async def is_available(self) -> bool:
        """Return whether CRIU works here. The first call copies CRIU and probes the kernel."""
        async with self._preparing:
            if self._binary is None and time.monotonic() >= self._try_at:
                try:
                    self._binary = await asyncio.to_thread(CriuBinary.prepare, self._program_dir)
                    self.unavailable_reason = ""
                # The reason is kept and not raised: without CRIU, states with processes are reached by replay.
                except (CriuMissingError, OSError) as error:
                    is_passing = isinstance(error, CriuUntriedError | OSError)
                    self._try_at = time.monotonic() + AGAIN_S if is_passing else math.inf
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
        """Save a process tree, which runs on, and return the name of its images. See `Checkpointer.dump`."""
        name = f"images-{secrets.token_hex(8)}"
        images = self._directory / name
        # Hidden from `names` until `finish`, so that no collection deletes it and no restore uses it.
        self._unfinished.add(name)
        was_frozen = False
        try:
            # The images hold the memory of the sandbox's processes.
            images.mkdir(mode=0o700, parents=True)
            async with self._operation(images, start, restores=False) as (criu, operator):
                mapped: MappedFiles = {}

                async def inspect() -> MappedFiles:
                    inspected = await _inspected(operator)
                    (images / image_digest.NOTED).write_text(json.dumps([inspected.times, inspected.noted]))
                    mapped.update(inspected.mapped)
                    return mapped

                async def run_hook() -> None:
                    nonlocal was_frozen
                    await on_frozen(dict(mapped))
                    was_frozen = True

                watched = (await operator.ask(FindWatched())).message.paths
                await criu.dump(root_pid, watched, inspect, run_hook)
            # Without the hook there is no copy of the files, so these images would be restored on other files.
            if not was_frozen:
                raise NotFreezableError("CRIU ended without a notification that the processes were frozen")  # noqa: TRY301
        except BaseException as error:
            # Whatever the error is, including cancellation: incomplete images are of no use.
            await self._remove(name)
            if (refusal := _refusal(error)) is None:
                raise
            raise refusal from error
        return name

    async def finish(self, name: str, base: str | None) -> int:
        """Complete a checkpoint, in a thread. See `Checkpointer.finish`."""
        try:
            added = await asyncio.to_thread(self._finish, self._directory / name, base)
        except OSError as error:
            await self._remove(name)
            raise NotFreezableNowError(f"the checkpoint of its processes could not be completed: {error}") from error
        self._unfinished.discard(name)
        return added

    def _finish(self, images: Path, base: str | None) -> int:
        if base is not None:
            page_sharing.share(images, self._directory / base)
        image_digest.seal(images)
        return sum(path.stat().st_blocks * 512 for path in images.iterdir())

    async def _remove(self, name: str) -> None:
        await asyncio.to_thread(remove_tree, self._directory / name)
        self._unfinished.discard(name)

    async def restore(
        self, name: str, start: ProgramStarter, inherited: Sequence[str], stillness: StandStill | None = None
    ) -> None:
        """Restore the process tree of a checkpoint, with `inherited` as CRIU's names of its descriptors."""
        if not await self.is_available():
            raise SandboxError(f"processes cannot be restored: {self.unavailable_reason}")
        images = self._directory / name
        # Before CRIU reads a byte: damaged images could become any state.
        if not await asyncio.to_thread(image_digest.is_whole, images):
            raise StateGoneError(f"the images of checkpoint {name} are damaged or missing")
        try:
            times, noted = json.loads((images / image_digest.NOTED).read_bytes())
        except FileNotFoundError as error:
            raise StateGoneError(f"the images of checkpoint {name} were made by an earlier version") from error
        # An OSError here would be a defect of ours, so it is not turned into a SandboxError.
        try:
            async with self._operation(images, start, restores=True) as (criu, operator):

                async def run_hook() -> None:
                    await _follow_links(operator, times, noted, stillness)

                # criu_launch puts the inherited descriptors at INHERITED_FD and following, in the order of the names.
                await criu.restore({key: INHERITED_FD + index for index, key in enumerate(inherited)}, run_hook)
                if stillness is not None and stillness.locks:
                    # They are set when CRIU has ended.
                    criu.close()
                    async with asyncio.timeout(START_S):
                        await operator.next(Done)
        except (CriuError, ChannelClosedError, PeerFailedError, TimeoutError) as error:
            raise SandboxError(f"processes could not be restored: {error}") from error

    @contextlib.asynccontextmanager
    async def _operation(
        self, images: Path, start: ProgramStarter, *, restores: bool
    ) -> AsyncIterator[tuple[CriuConversation, Channel]]:
        """Run CRIU for one operation; yield its conversation and its operator's channel. Both end with the block."""
        assert self._binary is not None, "callers check is_available first"
        # 1. The proxy opens a socket pair and the descriptors that CRIU needs, and passes the far end and the
        # descriptors into the sandbox (`ProgramStarter`). The sandbox's side forks, enters the namespaces and starts
        # CRIU (`sandboxes.guest.checkpoints.criu_launch`).
        near, far = socket.socketpair()
        operator = Channel(near)
        fds: list[int] = []
        try:
            if restores:
                fds.append(kernel.open_sysctl(LAST_PID))
            # From here on the order is that of `criu_launch.CriuFiles`.
            reply = far.detach()
            fds.append(reply)
            fds.append(kernel.clone_mount(str(self._binary.root), kernel.SEALED))
            # A restore writes no image, so nothing that it does can change what it restores.
            kept = kernel.SEALED & ~kernel.MOUNT_ATTR_RDONLY | kernel.MOUNT_ATTR_NOEXEC
            fds.append(kernel.clone_mount(str(images), kept if not restores else kept | kernel.MOUNT_ATTR_RDONLY))
            log = os.memfd_create("criu.log", os.MFD_CLOEXEC)
            fds.append(log)
            await start(list(ARGUMENTS), fds)
            # Close our copy of the far end: only CRIU's parent holds one now, so its exit closes the socket.
            fds.remove(reply)
            os.close(reply)
            try:
                async with asyncio.timeout(START_S):
                    # 2. The fork replies once, with the descriptor of CRIU's RPC socket.
                    started = await operator.next(CriuStarted)
            # A CRIU that starts later finds its socket closed, and exits.
            except (ChannelClosedError, PeerFailedError, TimeoutError) as error:
                raise CriuUnstartedError(f"CRIU could not be started: {error}") from error
            criu = CriuConversation(socket.socket(fileno=started.fds[0]), log)
            try:
                yield criu, operator
            finally:
                # 3. The proxy has talked to CRIU over that socket (`snapshots.criu.rpc`). CRIU exits when it closes,
                # and the fork with it. The fork's copy of the far end then closes, so the proxy sees that both are
                # gone.
                criu.close()
                # No second message comes: the wait ends when the far end closes. A CRIU that hangs is left to the
                # sandbox's own end, which kills everything in its namespaces.
                try:
                    async with asyncio.timeout(START_S):
                        await operator.receive()
                except ChannelClosedError:
                    pass
                except TimeoutError as error:
                    if not restores:
                        raise SandboxError("CRIU does not end, and its processes stand still") from error
        finally:
            # In a thread that no task waits for, because the detached mounts are unmounted by this.
            asyncio.get_running_loop().run_in_executor(None, _close, fds)
            operator.close()


async def _inspected(operator: Channel) -> NamesInspected:
    answer = (await operator.ask(InspectNames())).message
    if isinstance(answer, NamesRefused):
        raise NotFreezableError(answer.reason)
    return answer


async def _follow_links(
    operator: Channel, times: dict[str, list[int]], noted: dict[str, str], stillness: StandStill | None
) -> None:
    if stillness is None:
        await operator.ask(FollowLinks(times, noted, [], []))
        return
    freezer = [await stillness.freeze()]
    try:
        order = FollowLinks(times, noted, stillness.pids, stillness.locks)
        await operator.ask(order, fds=freezer if stillness.locks else [])
    finally:
        close_all(freezer)


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def _disk_bytes(directory: Path) -> int:
    # st_blocks counts units of 512 bytes on every Linux file system (stat(2)); sparse images count as what they take.
    # Files that several checkpoints share count in parts.
    files = (path.stat() for path in directory.rglob("*"))
    return sum(status.st_blocks * 512 // (status.st_nlink if stat.S_ISREG(status.st_mode) else 1) for status in files)
