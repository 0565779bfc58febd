"""Containers with their keepers, from start to removal, and spare ones that wait at an image's root state.

Docker takes 0.15 s to start a container, so `Spares` keeps some started for each combination of image and limits that
was used last: as many as sandboxes begin at once. Taking one starts another in the background.

A container is made in three steps, each of which can fail or be cancelled (`Spares._make`). `Spares.throw_away`
reverses them.
"""

import asyncio
import contextlib
import os
import secrets
import shutil
import socket
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

from sandboxes.container.boot_scripts import FIFOS, PROGRAMS
from sandboxes.container.daemon import DATA_DIR, HOST, INSTANCE, SANDBOX, Daemon
from sandboxes.errors import SandboxError, SpecError
from sandboxes.host.defaults import RESERVE_BYTES
from sandboxes.host.spare_demand import SpareDemand
from sandboxes.ipc.channel import Channel, ChannelClosedError, PeerFailedError
from sandboxes.ipc.fork_server import ForkServer
from sandboxes.ipc.launch_messages import ForkKeeper
from sandboxes.ipc.state_messages import KeeperReady
from sandboxes.linux.files import remove_tree
from sandboxes.spec import Limits
from sandboxes.task_owner import TaskOwner, start

MAX_STARTS = 2
"""Limits the containers that are being started at once: with more, dockerd takes longer for all of them together."""

READY_S = 30.0
"""Longest wait for a keeper to enter its container; on an idle machine it takes some ten milliseconds.

The value is an estimate.
"""

MAX_KINDS = 4
"""Limits the combinations of image and limits that have spares; the ones used last keep theirs.

The value is an estimate.
"""

_MOST = 8
"""The most spares of a kind after a burst, as a multiple of `container_spares`: 16 by default, each with about 15 MB of
Docker's and our processes. A group of rollouts of one task begins at once, and groups of 8 to 16 are usual."""

_BURST_S = 2.0
"""Containers that are taken within so many seconds count as taken at once: Docker starts about 14 in that time."""

_INITS = ("docker-init", "tini-static")
"""Names of a static `tini` on the host; Docker's packages bring the first, Debian's the second."""

SpareKind = tuple[str, Limits]
"""An image and the limits that its container was started with."""


@dataclass(slots=True)
class Box:
    """A running container and its keeper.

    Attributes:
        id: The sandbox's id.
        container: Docker's id of the container.
        channel: The channel to the keeper.
        folder: The directory of the box on the host.
        bash: Whether sessions run in bash; otherwise they run in /bin/sh.
    """

    id: str
    container: str
    channel: Channel
    folder: Path
    bash: bool = True


class Spares:
    """Makes, keeps and removes the containers of one driver.

    Attributes:
        labels: Labels of every container of this instance.
        names: Ids of the boxes that are being made or in use. A container of this instance with any other name belongs
            to a dead process.
        background: Tasks that remove and make containers; `close` waits for them.
    """

    def __init__(self, daemon: Daemon, data_dir: Path, *, spares: int) -> None:
        """Name the directories; `open` starts the keeper launcher.

        Args:
            daemon: The connection to the Docker daemon.
            data_dir: The driver's own directory.
            spares: How many spare containers wait at least for each combination of image and limits; with 0, none.
        """
        self.daemon = daemon
        self.boxes = data_dir / "boxes"
        self.labels = {DATA_DIR: str(data_dir), HOST: socket.gethostname()}
        self.names: set[str] = set()
        # Tools that an MCP server declares as read-only, for each server: its declaration holds for every sandbox.
        self.read_only: dict[str, frozenset[str]] = {}
        self.background = TaskOwner()
        self._spares_per_kind = spares
        self._spares: OrderedDict[SpareKind, list[Box]] = OrderedDict()
        self._demands: dict[SpareKind, SpareDemand] = {}
        # Sandboxes that wait for a container of their own go before spares.
        self._awaited = 0
        # Waiting here costs nothing; waiting in dockerd makes all starts slower (`MAX_STARTS`).
        self._starts = asyncio.Semaphore(MAX_STARTS)
        self._restocking: asyncio.Task[None] | None = None
        self._launcher = ForkServer(
            "the launcher of containers' keepers",
            "sandboxes.container.keeper.launcher",
            [str(self.boxes)],
            hint="Run the proxy as root on the machine of the Docker daemon. If it runs in a container itself, see "
            "docs/containers.md.",
        )
        self._closing = False

    async def open(self, instance: str) -> None:
        """Start the keeper launcher.

        Args:
            instance: The id of this data directory's instance, which labels its containers.

        Raises:
            SandboxError: The launcher does not start: the proxy is not root, or the kernel refuses mounts.
        """
        self._closing = False
        self.labels[INSTANCE] = instance
        await asyncio.to_thread(self._clear_boxes)
        await self._launcher.start()

    def _clear_boxes(self) -> None:
        # The lock on the data directory is held, so a box that is here belongs to a dead process.
        remove_tree(self.boxes)
        self.boxes.mkdir(parents=True)
        # Any user of a container must be able to pass through to its own box.
        self.boxes.chmod(0o711)

    async def close(self) -> None:
        """Remove the spares, wait for all background tasks, and end the keeper launcher. Idempotent."""
        # From here on `_fill` and `restock` make no container, so the list below is complete.
        self._closing = True
        spares = [box for boxes in self._spares.values() for box in boxes]
        self._spares.clear()
        await asyncio.gather(*(self.throw_away(box) for box in spares))
        await self.background.wait()
        await self._launcher.close()

    # -- containers --------------------------------------------------------------------------------------------------

    async def take(self, image: str, limits: Limits) -> Box:
        """Return a container at its image's root state: a spare one, or a new one.

        Raises:
            SpecError: The image cannot be used.
            SandboxError: Docker failed.
        """
        kind = (image, limits)
        waiting = self._spares.setdefault(kind, [])
        self._spares.move_to_end(kind)
        self._demand(kind).note(time.monotonic())
        while waiting:
            box = waiting.pop(0)
            # A spare's keeper may have died since, and its container with it.
            if box.channel.lost is None:
                return box
            self._discard(box)
        self._awaited += 1
        try:
            return await self.make(image, limits)
        finally:
            self._awaited -= 1

    def _demand(self, kind: SpareKind) -> SpareDemand:
        least = self._spares_per_kind
        return self._demands.setdefault(kind, SpareDemand(least=least, most=_MOST * least, burst_s=_BURST_S))

    def restock(self) -> None:
        """Make spares in the background until each kind has its number, and remove what is above it."""
        if not self._closing and (self._restocking is None or self._restocking.done()):
            self._restocking = self.background.spawn("make spare containers", self._fill())

    async def _fill(self) -> None:
        while len(self._spares) > MAX_KINDS:
            kind, waiting = self._spares.popitem(last=False)
            self._demands.pop(kind, None)
            for box in waiting:
                self._discard(box)
        # A failure of Docker's is not reported here: the next sandbox that needs a container meets it and reports it.
        with contextlib.suppress(SandboxError, SpecError):
            # The kind that was used last comes first.
            for kind, waiting in reversed(list(self._spares.items())):
                demand = self._demand(kind)
                while len(waiting) > demand.wanted(time.monotonic()):
                    self._discard(waiting.pop())
                while len(waiting) < demand.wanted(time.monotonic()) and not (self._closing or self._awaited):
                    box = await self.make(*kind)
                    # Meanwhile the driver may have closed, or the kind may have been dropped.
                    if self._closing or self._spares.get(kind) is not waiting:
                        await self.throw_away(box)
                        break
                    waiting.append(box)

    async def make(self, image: str, limits: Limits) -> Box:
        """Start a container and its keeper, in 0.15 s on an idle machine; at most `MAX_STARTS` run at once.

        Raises:
            SpecError: The image cannot be used.
            SandboxError: Docker failed.
        """
        name = secrets.token_hex(6)
        folder = self.boxes / name
        # A thread that talks to Docker cannot be cancelled: a cancelled caller waits for the container and removes it.
        making = start(self._make(image, limits, name, folder), name=f"make container {name}")
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            with contextlib.suppress(SandboxError, SpecError):
                await self.throw_away(await making)
            raise

    async def _make(self, image: str, limits: Limits, name: str, folder: Path) -> Box:
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
                    self.daemon.run, image, f"forkpoint-{name}", str(folder / "box"), limits, labels
                )
        except BaseException:
            self.names.discard(name)
            await asyncio.to_thread(remove_tree, folder)
            raise
        # Step 3. The keeper launcher forks a keeper, which enters the container's namespaces and reports that it is
        # ready. When this process dies, the kernel closes its end of the socket, and the keeper kills the container.
        ours, theirs = socket.socketpair()
        box = Box(name, started.id, Channel(ours), folder)
        order = ForkKeeper(
            pid=started.pid,
            container=started.id,
            upper=started.upper,
            lowers=list(started.lowers),
            view=str(folder / "view"),
            box=str(folder / "box"),
            disk_bytes=limits.disk_mb << 20,
            reserve_bytes=RESERVE_BYTES,
        )
        try:
            async with asyncio.timeout(READY_S):
                await self._fork_keeper(order, theirs)
                ready = await box.channel.next(KeeperReady)
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

    def _discard(self, box: Box) -> None:
        self.background.spawn(f"remove container {box.id}", self.throw_away(box))

    async def throw_away(self, box: Box) -> None:
        """Kill a container and remove it with its box. Its keeper kills it when its channel closes."""
        box.channel.close()
        # The driver's sweep removes later what Docker refuses to remove now.
        with contextlib.suppress(SandboxError):
            await asyncio.to_thread(self.daemon.remove, box.container, is_ending=True)
        self.names.discard(box.id)
        # The box comes last: processes of the container use it until the container is gone.
        await asyncio.to_thread(remove_tree, box.folder)


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
