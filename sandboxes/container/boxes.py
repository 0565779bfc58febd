"""Containers with their keepers, from start to removal.

A container is made in three steps, each of which can fail or be cancelled (`Boxes.start_by_docker`). `Boxes.throw_away`
reverses them. With a pattern, the keeper starts the container (`Boxes.start_by_pattern`).
"""

import asyncio
import contextlib
import os
import secrets
import select
import shutil
import signal
import socket
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sandboxes.container.boot_scripts import FIFOS, PROGRAMS
from sandboxes.container.daemon import DATA_DIR, ENDED_S, GONE_S, HOST, INSTANCE, SANDBOX, Daemon, RunningContainer
from sandboxes.container.oci_spec import Pattern, group_of
from sandboxes.errors import SandboxError, SpecError
from sandboxes.host.defaults import RESERVE_BYTES
from sandboxes.ipc.channel import Channel, ChannelClosedError, PeerFailedError
from sandboxes.ipc.fork_server import ForkServer
from sandboxes.ipc.launch_messages import ContainerStart, ForkKeeper
from sandboxes.ipc.state_messages import KeeperReady
from sandboxes.linux.cgroups import groups_at, remove_emptied
from sandboxes.linux.file_flags import spread_below
from sandboxes.linux.files import remove_tree
from sandboxes.spec import Limits
from sandboxes.task_owner import start

MAX_STARTS = 2
"""Limits the containers that are being started at once: with more, dockerd takes longer for all of them together."""

READY_S = 30.0
"""Longest wait for a keeper to enter its container; on an idle machine it takes some ten milliseconds.

The value is an estimate.
"""

_INITS = ("docker-init", "tini-static")
"""Names of a static `tini` on the host; Docker's packages bring the first, Debian's the second."""


@dataclass(slots=True)
class Box:
    """A running container and its keeper.

    Attributes:
        id: The sandbox's id.
        container: Docker's id of the container, or what the keeper calls it.
        channel: The channel to the keeper.
        folder: The directory of the box on the host.
        bash: Whether sessions run in bash; otherwise they run in /bin/sh.
        started: What the container is like, for one that Docker has started.
        init: A process descriptor of its pid 1; `Boxes.throw_away` closes it. None until it is ready.
        on_end: Called when the container is gone, for one that Docker does not know.
    """

    id: str
    container: str
    channel: Channel
    folder: Path
    bash: bool = True
    started: RunningContainer | None = None
    init: int | None = None
    on_end: Callable[[], None] | None = None


class Boxes:
    """Makes and removes the containers of one driver.

    Attributes:
        labels: Labels of every container of this instance that Docker knows.
        folder: The directory of the boxes.
        names: Ids of the boxes that are being made or in use. A container of this instance with any other name belongs
            to a dead process.
    """

    def __init__(self, daemon: Daemon, data_dir: Path) -> None:
        """Name the directories; `open` starts the keeper launcher."""
        self._daemon = daemon
        self.folder = data_dir / "boxes"
        self.labels = {DATA_DIR: str(data_dir), HOST: socket.gethostname()}
        self.names: set[str] = set()
        # Waiting here costs nothing; waiting in dockerd makes all starts slower (`MAX_STARTS`).
        self._starts = asyncio.Semaphore(MAX_STARTS)
        self._launcher = ForkServer(
            "the launcher of containers' keepers",
            "sandboxes.container.keeper.launcher",
            [str(self.folder)],
            hint="Run the proxy as root on the machine of the Docker daemon. If it runs in a container itself, see "
            "docs/containers.md.",
        )

    async def open(self, instance: str) -> None:
        """Start the keeper launcher.

        Args:
            instance: The id of this data directory's instance, which labels its containers.

        Raises:
            SandboxError: The launcher does not start: the proxy is not root, or the kernel refuses mounts.
        """
        self.labels[INSTANCE] = instance
        await asyncio.to_thread(self._clear)
        await self._launcher.start()

    def _clear(self) -> None:
        # The lock on the data directory is held, so a box that is here belongs to a dead process.
        for name in os.listdir(self.folder) if self.folder.exists() else ():  # noqa: PTH208 - names only
            if group := group_of(self.folder / name / "container"):
                remove_emptied(groups_at(group))
        remove_tree(self.folder)
        self.folder.mkdir(parents=True)
        # Some thirty files are made for a container, and removed with it.
        spread_below(str(self.folder))
        # Any user of a container must be able to pass through to its own box.
        self.folder.chmod(0o711)

    async def close(self) -> None:
        """End the keeper launcher; its keepers have ended by now. Idempotent."""
        await self._launcher.close()

    # -- start -------------------------------------------------------------------------------------------------------

    async def start_by_docker(self, image: str, limits: Limits) -> Box:
        """Have Docker start a container, and give it a keeper, in 0.15 s on an idle machine.

        At most `MAX_STARTS` starts run at once, of both kinds.

        Raises:
            SpecError: The image cannot be used.
            SandboxError: Docker failed.
        """
        return await self._finished(self._start_by_docker(image, limits))

    async def start_by_pattern(self, pattern: Pattern, limits: Limits) -> Box:
        """Start a container as a pattern was started, which its keeper does, in 0.05 s on an idle machine.

        Raises:
            SandboxError: The runtime or the machine refuses.
        """
        return await self._finished(self._start_by_pattern(pattern, limits))

    async def _finished(self, starting: Coroutine[Any, Any, Box]) -> Box:
        """Start a container. A caller that is cancelled waits for it and removes it.

        A thread that talks to Docker cannot be cancelled.
        """
        task = start(starting, name="start a container")
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            with contextlib.suppress(SandboxError, SpecError):
                await self.throw_away(await task)
            raise

    async def _start_by_docker(self, image: str, limits: Limits) -> Box:
        name, folder = self._new_name()
        # Step 1. The box is made: a directory that the container sees as its own, with pipes and programs for the
        # keeper's use.
        await asyncio.to_thread(_make_box, folder)
        self.names.add(name)
        try:
            # Step 2. Docker starts the container with a label that holds its name. `names` has the name from before
            # this step, and the driver's sweep removes labelled containers whose name is not in `names`. So a killed
            # proxy leaves nothing behind.
            async with self._starts:
                labels = {**self.labels, SANDBOX: name}
                started = await asyncio.to_thread(
                    self._daemon.run, image, f"forkpoint-{name}", str(folder / "box"), limits, labels
                )
        except BaseException:
            self.names.discard(name)
            await asyncio.to_thread(remove_tree, folder)
            raise
        return await self._keep(name, started, limits, None)

    async def _start_by_pattern(self, pattern: Pattern, limits: Limits) -> Box:
        name, folder = self._new_name()
        self.names.add(name)
        container = RunningContainer(_container_name(name), 0, f"{folder}/container/upper", pattern.container.lowers)
        try:
            await asyncio.to_thread(_make_box, folder)
            order = await asyncio.to_thread(pattern.prepare, folder / "box", folder / "container", container.id)
        except OSError as error:
            self.names.discard(name)
            await asyncio.to_thread(remove_tree, folder)
            raise SandboxError(f"a container could not be set up: {error}") from error
        async with self._starts:
            return await self._keep(name, container, limits, order)

    def _new_name(self) -> tuple[str, Path]:
        name = secrets.token_hex(6)
        return name, self.folder / name

    async def _keep(self, name: str, container: RunningContainer, limits: Limits, order: ContainerStart | None) -> Box:
        """Give a container a keeper, and return its box.

        Args:
            name: The box's name.
            container: The container; without a pid if the keeper has to start it.
            limits: What its processes may use together.
            order: How the keeper starts it; None if Docker has started it.

        Raises:
            SandboxError: The keeper or the container failed; the container is removed.
        """
        # Step 3. The keeper launcher forks a keeper, which enters the container's namespaces and reports that it is
        # ready. When this process dies, the kernel closes its end of the socket, and the keeper kills the container.
        ours, theirs = socket.socketpair()
        folder = self.folder / name
        box = Box(name, container.id, Channel(ours), folder, started=container if order is None else None)
        request = ForkKeeper(
            pid=container.pid,
            container=container.id,
            upper=container.upper,
            lowers=list(container.lowers),
            view=str(folder / "view"),
            box=str(folder / "box"),
            disk_bytes=limits.disk_mb << 20,
            reserve_bytes=RESERVE_BYTES,
            start=order,
        )
        try:
            async with asyncio.timeout(READY_S):
                await self._fork_keeper(request, theirs)
                ready = await box.channel.next(KeeperReady)
            (box.init,) = ready.fds
        except (SandboxError, ChannelClosedError, PeerFailedError, TimeoutError, OSError) as error:
            await self.throw_away(box)
            raise SandboxError(f"a container could not be set up: {error or 'no response in time'}") from error
        finally:
            # The keeper has its own copy. With this copy open, the end of the keeper would not be seen.
            theirs.close()
        box.bash = ready.message.bash
        return box

    async def _fork_keeper(self, order: ForkKeeper, theirs: socket.socket) -> None:
        if not order.upper or not os.path.isdir(order.upper):  # noqa: ASYNC240, PTH112 - a few microseconds
            raise SandboxError(
                f"Docker's directory {order.upper or '(none reported)'} is not visible here. The container driver "
                "has to run on the daemon's machine, as root, with the overlay2 storage driver; see docs/containers.md."
            )
        await self._launcher.ask(order, [theirs.fileno()])

    # -- the end -----------------------------------------------------------------------------------------------------

    async def throw_away(self, box: Box) -> None:
        """Kill a container and remove it with its box. Its keeper kills it when its channel closes."""
        box.channel.close()
        init, box.init = box.init, None
        if init is not None:
            await asyncio.to_thread(_await_end, init)
        if box.started is not None:
            # The driver's sweep removes later what Docker refuses to remove now.
            with contextlib.suppress(SandboxError):
                await asyncio.to_thread(self._daemon.remove, box.container, is_ending=True)
        self.names.discard(box.id)
        # The box comes last: processes of the container use it until the container is gone.
        await asyncio.to_thread(remove_tree, box.folder)
        if box.on_end is not None:
            on_end, box.on_end = box.on_end, None
            on_end()


def _container_name(box: str) -> str:
    """Return what the container of a box is called if Docker does not know it: part of its control group's path."""
    return f"forkpoint-{box}"


def _await_end(init: int) -> None:
    """Wait until a container has ended, given the process descriptor of its pid 1; kill it if its keeper has not."""
    try:
        if not select.select([init], [], [], ENDED_S)[0]:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(init, signal.SIGKILL)
            select.select([init], [], [], GONE_S)
    finally:
        os.close(init)


def _make_box(folder: Path) -> None:
    """Make the directory that a container sees as its box, and the directory where its keeper mounts for a moment."""
    folder.mkdir(mode=0o711)
    (folder / "view").mkdir()
    box = folder / "box"
    box.mkdir()
    for path in (folder, box):
        path.chmod(0o755)
    for name in FIFOS:
        os.mkfifo(box / name)
        # The umask does not apply to chmod; any user of the image must be able to open the pipes.
        (box / name).chmod(0o666)
    for name, text in PROGRAMS.items():
        (box / name).write_text(text)
        (box / name).chmod(0o644)
    if init := next(filter(None, map(shutil.which, _INITS)), None):
        # A copy, not a link, because the box may be on another file system. 0.7 MB.
        shutil.copyfile(init, box / "tini")
        (box / "tini").chmod(0o755)
