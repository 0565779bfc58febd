"""The machine: the launcher, control groups, layers, checkpointer and spares, which one driver's sandboxes share.

A sandbox is made in two steps. The first needs no spec and is slow: the launcher forks a pid 1, which joins its control
groups (up to 15 ms, for RCU) and makes its namespaces. It is then a *spare*. `LocalSandbox.begin` sends it its layers
and its spec. The machine keeps as many spares as sandboxes begin at once (`spare_demand`). Spares die with the
launcher; one whose channel is lost is thrown away, and the next sandbox starts another launcher.
"""

import asyncio
import contextlib
import errno
import logging
import os
import secrets
import signal
import socket
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from sandboxes.checkpointing import Checkpointer
from sandboxes.egress.gateway import EgressGateway
from sandboxes.errors import SandboxError
from sandboxes.host.guest_link import GuestLink
from sandboxes.host.spare_demand import LEAST, SpareDemand
from sandboxes.ipc.channel import Channel, ChannelClosedError, PeerFailedError
from sandboxes.ipc.fork_server import ForkServer
from sandboxes.ipc.launch_messages import ForkSandbox, LayerStack, LinksTried, TryLinks, WritePages
from sandboxes.ipc.state_messages import ListPages, Ready
from sandboxes.linux import syscalls as kernel
from sandboxes.linux.cgroups import Cgroups
from sandboxes.local.layer_check import LayerCheck
from sandboxes.local.layers import Layers, ReadyUppers
from sandboxes.local.reaper import Reaper
from sandboxes.open_sandboxes import Holding
from sandboxes.rights import held
from sandboxes.shell_files import copies as shell_copies
from sandboxes.task_owner import TaskOwner

_log = logging.getLogger(__name__)

SEE_DOCTOR = "Run `forkpoint doctor` to see why."
"""Ends the text of errors that say that this machine cannot run sandboxes; doctor itself leaves it out."""
START_S = 30.0
"""Longest wait for a sandbox to start; on an idle machine it takes milliseconds. The value is an estimate."""

_AT_ONCE = 4
"""How many spares are made at the same time: each mostly waits for the kernel. The value is an estimate."""

_FIRST_CALL_S = 0.03
"""How long after a start the next spare is made. The first call of a sandbox waits for its shell, and a new spare takes
10 ms of CPU: on two busy cores that call took a quarter longer. Halved, longer calls compete with it again; doubled,
spares of a burst come later."""

_REVIEW_S = 60.0
"""How often spares that were kept for a burst are reviewed. The value is an estimate."""

END_S = 10.0
"""Longest wait for a killed sandbox to end. A process that is stuck in the kernel is left to the next `open`. The value
is an estimate."""

_CGROUP_ATTEMPTS, _CGROUP_RETRY_S = 200, 0.005
"""How often, and after which pause, a dead sandbox's control groups are tried to be removed: for one second."""


@dataclass(frozen=True, slots=True)
class Spare:
    """A sandbox that waits for a spec: it has namespaces and control groups, but no root file system."""

    id: str  # The sandbox's id, which also names its control groups.
    channel: Channel
    process: int  # The process descriptor (pidfd) of its pid 1.
    # The socket on which the launcher reports to its pid 1; see `MountLayers` and `SwitchLayers`.
    switches: socket.socket
    launcher: int | None  # The pid of the launcher that has forked it, and with which it dies.


class Machine:
    """The shared parts of one local driver, open for as long as the driver is."""

    def __init__(self, data_dir: Path, host_view: Path, checkpointer: Checkpointer, holding: Holding) -> None:
        """Describe the machine; `open` starts the launcher. `holding` keeps layers that are in no stack yet."""
        self.data_dir = data_dir
        self.host_view = host_view
        self.layers = Layers(data_dir)
        self.layer_check = LayerCheck(self.layers)
        # A random name: the groups of a killed instance may still exist while this one starts.
        self.cgroups = Cgroups(f"forkpoint-{secrets.token_hex(6)}")
        self.checkpointer = checkpointer
        self.holding = holding
        # Tools that an MCP server declares as read-only, for each server: its declaration holds for every sandbox.
        self.read_only: dict[str, frozenset[str]] = {}
        self.background = TaskOwner()
        self.uppers = ReadyUppers(self.layers.allocate, self.background)
        self.egress = EgressGateway(data_dir / "egress")
        self.reaper = Reaper(self.background)
        self.shell: shell_copies.ShellFiles | None = None
        self.launcher = ForkServer(
            "the launcher of sandboxes",
            "sandboxes.local.launcher",
            [str(host_view), *([kernel.OLDER_MOUNTS] if os.environ.get(kernel.OLDER_MOUNTS) else [])],
            hint=SEE_DOCTOR,
            prepare=self.cgroups.put_behind,
            service=held.launcher_socket(),
        )
        self._keeps_links: dict[tuple[str, ...], bool] = {}
        self._trying_links = asyncio.Lock()
        # The bases, by their directories, in which only regular files have several names, as a sandbox has found: the
        # look takes a second for a large base.
        self.regular_bases: set[tuple[str, ...]] = set()
        # The layers that are the upper directory of a mount that some sandbox still looks at.
        self.viewed = set[str]()
        self._spares: deque[Spare] = deque()
        self._demand = SpareDemand()
        self._starting = 0
        self._pages_of: int | None = None
        self._restocking: asyncio.Task[None] | None = None
        self._review: asyncio.TimerHandle | None = None
        self._refill: asyncio.TimerHandle | None = None

    async def open(self) -> None:
        """Start the launcher, and the first spares; `SandboxError` if this machine cannot run sandboxes."""
        # Anew for each process: this machine's bash may be another one by now.
        self.shell = await asyncio.to_thread(shell_copies.made_or_none, self.data_dir / "shells")
        await self.launcher.start()
        await self._fill_spares()

    async def close(self) -> None:
        """End the launcher and the spares, and wait for all background tasks. Idempotent."""
        # First the launcher: its death kills all pid 1s, so the spares below end together.
        self.launcher.disconnect()
        self.reaper.remove([upper.folder for upper in await self.uppers.close()])
        self.reaper.close()
        for timer in (self._review, self._refill):
            if timer is not None:
                timer.cancel()
        if self._restocking is not None:
            # Without a launcher it ends at once, perhaps with one more spare.
            await asyncio.wait([self._restocking])
        # Taken out first: a sandbox that is started even now must not end a spare a second time.
        spares, self._spares = self._spares, deque()
        await asyncio.gather(*map(self._throw_away, spares))
        await self.launcher.close()
        await self.egress.close()
        await self.background.wait()
        await asyncio.to_thread(self.cgroups.close)

    async def keeps_links(self, lowers: tuple[str, ...]) -> bool:
        """Return whether hard links can stay links over a base's directories."""
        # The file systems must have file handles. And we must have rights over files: without them a directory that an
        # agent has made read-only cannot be moved (`Layers.place`).
        async with self._trying_links:
            # Once, however many sandboxes start together.
            if lowers not in self._keeps_links:
                tried = await self._try_links(lowers)
                keeps = held.over_files() and not tried.refusal
                # After a shortage the next sandbox tries again: this answer holds until the proxy ends.
                if not tried.final:
                    return keeps
                self._keeps_links[lowers] = keeps
        return self._keeps_links[lowers]

    async def _try_links(self, lowers: tuple[str, ...]) -> LinksTried:
        upper = await asyncio.to_thread(self.layers.allocate)
        stack = LayerStack(list(lowers), upper.diff, upper.work, links=True)
        try:
            tried = (await self.launcher.ask(TryLinks(stack))).message
        finally:
            self.reaper.remove([upper.folder])
        if tried.refusal:
            _log.warning("states with hard links that agents make are not kept over %s: %s", lowers[0], tried.refusal)
        return tried

    async def spare(self) -> Spare:
        """Return a spare sandbox, or a new one; ChannelClosedError if it ends. Call `restock` when it has started."""
        self._starting += 1
        self._demand.note(time.monotonic())
        while self._spares:
            spare = self._spares.popleft()
            # A spare dies with the launcher. Its channel may show that a little later.
            if spare.channel.lost is None and spare.launcher == self.launcher.pid and not self.launcher.has_died:
                return spare
            self._discard(spare)
        return await self._new_spare()

    async def _new_spare(self) -> Spare:
        await self.launcher.ensure_running()
        name, launcher = secrets.token_hex(6), self.launcher.pid
        # When this process dies, the kernel closes `ours`, and the pid 1 at the other end exits.
        ours, theirs = socket.socketpair()
        switches, reports = socket.socketpair()
        channel, shown = Channel(ours), "" if self.shell is None else self.shell.folder
        try:
            given = [theirs.fileno(), reports.fileno()]
            forked = await self.launcher.ask(ForkSandbox(self.cgroups.create(name), shown), given)
        except BaseException:
            channel.close()
            switches.close()
            raise
        finally:
            # pid 1 has its own copies. With ours open, the end of pid 1 would not show as a lost channel.
            theirs.close()
            reports.close()
        if not forked.fds:
            # The kernel drops descriptors that this process has no room for (recvmsg(2)). Without its channel the
            # sandbox ends.
            channel.close()
            switches.close()
            raise SandboxError(f"a sandbox could not be started: {os.strerror(errno.EMFILE)}")
        spare = Spare(name, channel, forked.fds[0], switches, launcher)
        try:
            await channel.next(Ready)
        except BaseException as error:
            self._discard(spare)
            # The process has reported why it ended, which is worth more than a closed channel.
            if isinstance(error, PeerFailedError):
                raise SandboxError(f"a sandbox could not be set up: {error}. {SEE_DOCTOR}") from error
            raise
        return spare

    async def learn_pages(self, link: GuestLink) -> None:
        """Have later spares given the pages that an idle sandbox has written to, once for each launcher."""
        launcher = self.launcher.pid
        if launcher is None or self._pages_of == launcher:
            return
        # First: what goes wrong with one sandbox may go wrong with each.
        self._pages_of = launcher
        listed = await link.ask(ListPages())
        await self.launcher.ask(WritePages(listed.message.runs))

    def restock(self) -> None:
        """Note that a sandbox has started or failed, and make the spares in the background that are wanted."""
        self._starting -= 1
        if self._refill is not None:
            self._refill.cancel()
        # The next start would have to wait for a spare, so the first call of this one gives way.
        delay_s = _FIRST_CALL_S if self._spares else 0.0
        self._refill = asyncio.get_running_loop().call_later(delay_s, self._begin_filling)

    def _begin_filling(self) -> None:
        # One task at a time: two would make twice as many spares.
        if self.launcher.is_open and (self._restocking is None or self._restocking.done()):
            self._restocking = self.background.spawn("make spare sandboxes", self._fill_spares())

    @property
    def _missing_spares(self) -> int:
        """How many spares are missing; negative if there are too many."""
        # Sandboxes that start now have the CPU first: the spares of the next burst wait for the end of this one.
        wanted = LEAST if self._starting else self._demand.wanted(time.monotonic())
        return wanted - len(self._spares)

    async def _fill_spares(self) -> None:
        while (missing := self._missing_spares) > 0 and self.launcher.is_open:
            made = await asyncio.gather(
                *(self._new_spare() for _ in range(min(missing, _AT_ONCE))), return_exceptions=True
            )
            self._spares += [spare for spare in made if isinstance(spare, Spare)]
            failures = [failure for failure in made if isinstance(failure, BaseException)]
            for failure in failures:
                # Not reported here: the next sandbox that needs a spare meets the failure and reports it to its caller.
                if not isinstance(failure, SandboxError | ChannelClosedError | OSError):
                    raise failure
            if failures:
                break
        if not self._starting:
            for _ in range(-self._missing_spares):
                self._discard(self._spares.pop())
        if self._review is not None:
            self._review.cancel()
        if len(self._spares) > LEAST and self.launcher.is_open:
            self._review = asyncio.get_running_loop().call_later(_REVIEW_S, self._begin_filling)

    def _discard(self, spare: Spare) -> None:
        self.background.spawn(f"end spare {spare.id}", self._throw_away(spare))

    async def _throw_away(self, spare: Spare) -> None:
        with contextlib.suppress(ProcessLookupError):
            # A pidfd names this process for ever; a pid could belong to another one by now (pidfd_open(2)).
            signal.pidfd_send_signal(spare.process, signal.SIGKILL)
        spare.channel.close()
        spare.switches.close()
        # The group can be removed only when the last process in it is gone (cgroups(7)).
        await ended(spare.process)
        os.close(spare.process)
        await self.forget_group(spare.id)

    async def forget_group(self, name: str) -> None:
        """Remove a dead sandbox's control groups. The kernel refuses while processes in them are still ending."""
        for _ in range(_CGROUP_ATTEMPTS):
            if self.cgroups.remove(name):
                return
            await asyncio.sleep(_CGROUP_RETRY_S)


async def ended(process: int, within_s: float = END_S) -> None:
    """Wait until a process, such as a pid 1 with its namespace, has ended (pidfd_open(2)); at most this long."""
    loop = asyncio.get_running_loop()
    exited = asyncio.Event()
    # The reader and not a thread in waitid(2): a pid 1 is a child of the launcher, not of this process.
    loop.add_reader(process, exited.set)
    try:
        async with asyncio.timeout(within_s):
            await exited.wait()
    except TimeoutError:
        # Stopped, or stuck in the kernel. The next `open` sweeps the control group of a pid 1.
        return
    finally:
        loop.remove_reader(process)
