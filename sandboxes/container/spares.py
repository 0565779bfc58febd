"""Containers, from their start to their removal, and spare ones that wait at an image's state."""

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import socket
import sys
from collections import OrderedDict
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sandboxes import IMPORT_ROOT
from sandboxes.container.boot_scripts import FIFOS, PROGRAMS
from sandboxes.container.daemon import HOST, INSTANCE, PLACE, SANDBOX, Daemon
from sandboxes.errors import SandboxError, SpecError
from sandboxes.host.defaults import RESERVE_BYTES
from sandboxes.ipc.channel import Channel, ChannelClosedError
from sandboxes.linux.files import remove_tree
from sandboxes.spec import Limits

STARTS = 2
"""Containers being started at once: dockerd takes longer, not shorter, with more."""
READY_S = 30.0
STOP_S = 10.0
KINDS = 4
"""Combinations of image and limits for which spares are kept: those asked for last."""
_INITS = ("docker-init", "tini-static")

SpareKind = tuple[str, Limits]


@dataclass(slots=True)
class Box:
    """A running container and its keeper. bash: what its sessions run in; otherwise /bin/sh."""

    id: str
    container: str
    channel: Channel
    folder: Path
    bash: bool = True


class Stock:
    """Makes, keeps and removes containers. spares: how many wait for each kind.

    names: of those that are being made or live. A container of this instance under another name is nobody's.
    """

    def __init__(self, daemon: Daemon, data_dir: Path, *, spares: int) -> None:
        self.daemon = daemon
        self.boxes = data_dir / "boxes"
        self.labels = {PLACE: str(data_dir), HOST: socket.gethostname()}
        self.names: set[str] = set()
        # By definition of an MCP server: the tools that it says change nothing.
        self.read_only: dict[str, frozenset[str]] = {}
        self._wanted = spares
        self._spares: OrderedDict[SpareKind, list[Box]] = OrderedDict()
        self._starts = asyncio.Semaphore(STARTS)
        self._restocking: asyncio.Task[None] | None = None
        self._background: set[asyncio.Task[None]] = set()
        self._doorman: Channel | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._closing = False

    async def open(self, instance: str) -> None:
        """Start the doorman.

        Raises:
            SandboxError: it does not start: this is not root, or mounts are refused.
        """
        self._closing = False
        self.labels[INSTANCE] = instance
        await asyncio.to_thread(self._tidy)
        ours, theirs = socket.socketpair()
        start = "from sandboxes.container.keeper_launcher import main; main()"
        program = f"import sys; sys.path.insert(0, {IMPORT_ROOT!r}); {start}"
        try:
            # -I -S: nothing from the user's site and environment; -B: nothing is written next to the sources.
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", "-B", "-c", program, str(theirs.fileno()),
                pass_fds=[theirs.fileno()], env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}, cwd="/",
                stdin=asyncio.subprocess.DEVNULL,
            )  # fmt: skip
        finally:
            theirs.close()
        self._doorman = Channel(ours)
        try:
            async with asyncio.timeout(READY_S):
                ready = await self._doorman.receive()
        except (ChannelClosedError, TimeoutError) as error:
            raise SandboxError(f"containers cannot be looked after here: {error}") from error
        if "error" in ready.fields:
            raise SandboxError(
                f"containers cannot be looked after here: {ready.fields['error']}. Run the proxy as root on the "
                "machine of the Docker daemon; in a container of its own see docs/containers.md."
            )

    def _tidy(self) -> None:
        remove_tree(self.boxes)
        self.boxes.mkdir(parents=True)
        self.boxes.chmod(0o711)

    async def close(self) -> None:
        """Remove the spares, and wait for all that still runs. Idempotent."""
        self._closing = True
        spares = [box for boxes in self._spares.values() for box in boxes]
        self._spares.clear()
        await asyncio.gather(*(self.throw_away(box) for box in spares))
        while self._background:
            await asyncio.wait(self._background)
        if self._doorman is not None:
            self._doorman.close()
            self._doorman = None
        if self._process is not None:
            try:
                async with asyncio.timeout(STOP_S):
                    await self._process.wait()
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    self._process.send_signal(signal.SIGKILL)
            self._process = None

    def later(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine that nobody waits for, until close does."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    # -- containers --------------------------------------------------------------------------------------------------

    async def take(self, image: str, limits: Limits) -> Box:
        """Return a container at its image's state: a spare one, or a new one.

        Raises:
            SpecError: the image cannot be used. SandboxError: Docker failed.
        """
        kind = (image, limits)
        waiting = self._spares.setdefault(kind, [])
        self._spares.move_to_end(kind)
        while waiting:
            box = waiting.pop(0)
            if box.channel.lost is None:
                return box
            self.later(self.throw_away(box))
        return await self.make(image, limits)

    def restock(self) -> None:
        """Have new spares made, while nobody waits."""
        if not self._closing and (self._restocking is None or self._restocking.done()):
            self._restocking = self.later(self._fill())

    async def restocked(self) -> None:
        """Wait until there are as many spares as there should be, or none can be made."""
        if self._restocking is not None:
            await asyncio.wait([self._restocking])

    async def _fill(self) -> None:
        while len(self._spares) > KINDS:
            for box in self._spares.popitem(last=False)[1]:
                self.later(self.throw_away(box))
        # None where Docker fails: whoever needs a sandbox then is told why.
        with contextlib.suppress(SandboxError, SpecError):
            for kind, waiting in reversed(list(self._spares.items())):
                while len(waiting) < self._wanted and not self._closing:
                    box = await self.make(*kind)
                    if self._closing or self._spares.get(kind) is not waiting:
                        await self.throw_away(box)
                        break
                    waiting.append(box)

    async def make(self, image: str, limits: Limits) -> Box:
        """Start a container and its keeper. 0.4 s on an idle machine; no more than `STARTS` at once.

        Raises:
            SpecError: the image cannot be used. SandboxError: Docker failed.
        """
        name = secrets.token_hex(6)
        folder = self.boxes / name
        # Cancelled midway, the container must not stay: the making ends, and is then undone.
        making = asyncio.ensure_future(self._make(image, limits, name, folder))
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            with contextlib.suppress(SandboxError, SpecError):
                await self.throw_away(await making)
            raise

    async def _make(self, image: str, limits: Limits, name: str, folder: Path) -> Box:
        await asyncio.to_thread(_furnish_box, folder)
        self.names.add(name)
        try:
            async with self._starts:
                labels = {**self.labels, SANDBOX: name}
                started = await asyncio.to_thread(
                    self.daemon.run, image, f"forkpoint-{name}", str(folder / "box"), limits, labels
                )
        except BaseException:
            self.names.discard(name)
            await asyncio.to_thread(remove_tree, folder)
            raise
        ours, theirs = socket.socketpair()
        box = Box(name, started.id, Channel(ours), folder)
        fields = {
            "pid": started.pid,
            "container": started.id,
            "upper": started.upper,
            "lowers": started.lowers,
            "view": str(folder / "view"),
            "box": str(folder / "box"),
            "disk_bytes": limits.disk_mb << 20,
            "reserve_bytes": RESERVE_BYTES,
        }
        try:
            async with asyncio.timeout(READY_S):
                await self._fork(fields, theirs)
                ready = await box.channel.receive()
        except (ChannelClosedError, TimeoutError, OSError) as error:
            await self.throw_away(box)
            raise SandboxError(f"a container could not be set up: {error or 'no answer in time'}") from error
        finally:
            theirs.close()
        if "error" in ready.fields:
            await self.throw_away(box)
            raise SandboxError(f"a container could not be set up: {ready.fields['error']}")
        box.bash = bool(ready.fields["bash"])
        return box

    async def _fork(self, fields: dict[str, Any], theirs: socket.socket) -> None:
        if self._doorman is None:
            raise SandboxError("the driver is not open")
        if not fields["upper"] or not os.path.isdir(fields["upper"]):  # noqa: ASYNC240, PTH112 - a few microseconds
            raise SandboxError(
                f"Docker's directory {fields['upper'] or '(none told)'} is not visible here. The container driver has "
                "to run on the daemon's machine, as root, with the overlay2 storage driver; see docs/containers.md."
            )
        await self._doorman.request(fields, fds=[theirs.fileno()])

    async def throw_away(self, box: Box) -> None:
        """Kill a container, and return when nothing is left of it. Its keeper kills it when its channel closes."""
        box.channel.close()
        # What fails here is swept later.
        with contextlib.suppress(SandboxError):
            await asyncio.to_thread(self.daemon.remove, box.container)
        self.names.discard(box.id)
        await asyncio.to_thread(remove_tree, box.folder)


def _furnish_box(folder: Path) -> None:
    """Make what a container sees as its box, and the place where its keeper mounts for a moment."""
    folder.mkdir(mode=0o711)
    (folder / "view").mkdir()
    box = folder / "box"
    box.mkdir()
    for path in (folder, box):
        path.chmod(0o755)
    for name in FIFOS:
        os.mkfifo(box / name)
        (box / name).chmod(0o666)
    for name, text in PROGRAMS.items():
        (box / name).write_text(text)
        (box / name).chmod(0o644)
    if init := next((found for name in _INITS if (found := shutil.which(name))), None):
        # 0.7 MB, in the page cache once for all but copied: it may lie on another file system.
        shutil.copyfile(init, box / "tini")
        (box / "tini").chmod(0o755)
