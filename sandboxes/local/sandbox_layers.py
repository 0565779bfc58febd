"""The layers of one live sandbox, and its moves to a fresh upper.

Layers in `_unkept` are this sandbox's own: no frozen state has them, and closing deletes them. A freeze moves them out
(`keep`).
"""

import asyncio
import os
from socket import socket

from sandboxes.errors import NotFreezableNowError, SandboxError
from sandboxes.host.guest_link import GuestLink
from sandboxes.ipc.codec import pack_message
from sandboxes.ipc.launch_messages import LayerStack, MountLayers, SwitchLayers
from sandboxes.ipc.messages import Done
from sandboxes.ipc.state_messages import NotFreezable
from sandboxes.linux.descriptors import Opened
from sandboxes.local.bases import Base
from sandboxes.local.layers import MAX_DEPTH, LayerMeta, Upper, copied, copy_upper, mergeable
from sandboxes.local.machine import Machine


class SandboxLayers:
    """An upper, which the sandbox writes to, on a stack of read-only layers, the topmost first."""

    def __init__(
        self,
        machine: Machine,
        link: GuestLink,
        base: Base,
        root_layers: tuple[str, ...],
        layers: tuple[str, ...],
        switches: socket,
    ) -> None:
        """Begin with a fresh upper over the layers, the last of which are the root state's."""
        # The launcher reports to pid 1 on the socket `switches`, which `close` closes.
        self._machine, self._link, self._base = machine, link, base
        self._root_layers, self.stack = root_layers, layers
        self._switches = switches
        self.upper: Upper = machine.uppers.take()
        self._namespace: int | None = None
        # The layer that was the upper directory of the mount which serves as the view of what lies below the upper.
        self._view: tuple[str, ...] = ()
        self._unkept: set[str] = set()
        # Held while the descriptors of the sandbox are in use for a move to other layers; `close` takes it before it
        # closes them.
        self._switching = asyncio.Lock()

    @property
    def above_root(self) -> tuple[str, ...]:
        """The layers above those of the root state."""
        return self.stack[: len(self.stack) - len(self._root_layers)]

    async def mount(self) -> None:
        """Have the launcher mount the layers for pid 1, with those of the root state beside them."""
        order = MountLayers(self._mounted(self._lowers(self._root_layers)))
        await self._machine.launcher.post(order, [self._switches.fileno()])

    @property
    def linked(self) -> bool:
        """Whether the layers have hard links that stay links if something is written over them."""
        return self._machine.layers.links(self.stack) == "regular"

    @property
    def linked_root(self) -> bool:
        """Whether those of the root state have some."""
        return self._machine.layers.links(self._root_layers) == "regular"

    async def keep_links(self) -> bool:
        """Return whether hard links stay links over frozen layers; see `Machine.keeps_links`."""
        other = self._machine.layers.links(self._root_layers) == "other"
        return not other and await self._machine.keeps_links(self._base.lowers)

    def _mounted(self, root: list[str] | None = None) -> LayerStack:
        return LayerStack(self._lowers(self.stack), self.upper.diff, self.upper.work, root, self.linked)

    def _lowers(self, layers: tuple[str, ...]) -> list[str]:
        return [*self._machine.layers.lowers(layers), *self._base.lowers]

    def enter(self, namespace: int) -> None:
        """Take over the descriptor of the mount namespace of pid 1, for `switch`."""
        self._namespace = namespace

    def keep(self) -> int:
        """Hand the layers over to a frozen state; return the bytes of those that no state had before."""
        mine = self._unkept.intersection(self.stack)
        # From here on the frozen state owns them: closing this sandbox deletes only what is still in `_unkept`.
        self._unkept -= mine
        return sum(map(self._machine.layers.size_bytes, mine))

    def copy_upper(self, copy: Upper, meta: LayerMeta, table: bytes) -> None:
        """Make a layer of a copy of what the sandbox has written so far; it keeps writing to the original."""
        copy_upper(self.upper, copy)
        self._machine.layers.freeze(copy, meta, table)

    async def switch(self, meta: LayerMeta | None, table: bytes) -> None:
        """Move the sandbox, which has paused, to a fresh upper; the old one becomes a layer, or is thrown away."""
        async with self._switching:
            if self._namespace is None:
                raise SandboxError(f"sandbox {self._link.name} was closed")
            await self._switch_in(self._namespace, meta, table)

    async def _switch_in(self, namespace: int, meta: LayerMeta | None, table: bytes) -> None:
        layers, old = self._machine.layers, self.upper
        try:
            same_below = False
            if meta is not None:
                linked = meta.links == "regular" or self.linked
                # The sandbox still has the upper mounted, but pid 1 has paused: nothing writes to it any more.
                await self._place(old, meta, table, apart=linked)
                self._look_away()
                self.stack = (old.id, *self.stack)
                self._unkept.add(old.id)
                # The layers that a merge replaces may be deleted, so the old root, which has them, must go.
                same_below = not await self._merge_when_deep() and not linked
                if linked:
                    self._machine.regular_bases.add(self._base.lowers)
                    await self._copy_viewed()
            else:
                self._look_away()
            if same_below:
                self._view = (old.id,)
                self._machine.viewed.update(self._view)
            # A kill -9 from here on leaves an upper without a sandbox; the next `Layers.open` removes it.
            self.upper = self._machine.uppers.take()
            added = 0 if meta is None else meta.size_bytes
            order = SwitchLayers(self._mounted(), list(self._base.binds), self._base.services, added, same_below)
            with Opened(layers.tables.open_complete(() if meta is None else (old.id,))) as complete:
                # Only the launcher may mount. It enters the sandbox's mount namespace for this, by the descriptor, and
                # reports to pid 1, which then answers here.
                await self._machine.launcher.post(order, [namespace, self._switches.fileno(), complete])
            if meta is not None:
                # While the launcher works.
                layers.describe(old.id, meta, table)
            await self._link.next(Done)
        except (SandboxError, OSError) as error:
            # The sandbox is half moved, so it cannot continue. Its frozen layers are complete.
            self._link.die(str(error))
            raise SandboxError(f"sandbox {self._link.name} could not be put on a new layer: {error}") from error
        # A layer keeps its `diff` only: overlayfs needs `work` just for the upper of a mount.
        self._machine.reaper.remove([old.folder if meta is None else f"{layers.frozen}/{old.id}/work"])

    async def _place(self, upper: Upper, meta: LayerMeta, table: bytes, *, apart: bool) -> None:
        """Make the upper a layer; if the disk fails, the sandbox goes on with it. Raises NotFreezableNowError then."""
        try:
            self._machine.layers.place(upper, meta, table, apart=apart)
        except OSError as error:
            if apart:
                # Its files may be in two directories.
                raise
            reason = f"what it has written cannot be made a layer: {error}"
            self._switches.send(pack_message(NotFreezable(reason)))
            await self._link.next(NotFreezable)
            raise NotFreezableNowError(reason) from error

    def _look_away(self) -> None:
        """Take note that the sandbox's view of what lies below its upper ends: a mount whose upper is a layer now."""
        self._machine.viewed.difference_update(self._view)
        self._view = ()

    async def _copy_viewed(self) -> None:
        """Replace layers by copies that are the upper directory of no sandbox's view; see `syscalls.overlay`."""
        # Few are: each sandbox looks at one layer at most, of its own last change.
        machine = self._machine
        for layer in self.stack:
            if layer in machine.viewed:
                upper = machine.layers.allocate()
                with machine.holding((upper.id,)):
                    await asyncio.to_thread(copied, machine.layers, layer, upper)
                    self._unkept.add(upper.id)
                    self.stack = tuple(upper.id if other == layer else other for other in self.stack)

    async def _merge_when_deep(self) -> bool:
        """Merge small layers into one if there are many; return whether any were merged."""
        # At once and not in the background: depth must depend on the calls alone.
        above = self.above_root
        if len(above) <= MAX_DEPTH:
            return False
        layers = self._machine.layers
        # A complete table ends what is read of a state, so it keeps its layer.
        sizes = {layer: layers.size_bytes(layer) for layer in above if not layers.tables.is_complete(layer)}
        run = tuple(mergeable(above, sizes))
        if run:
            upper = layers.allocate()
            # Held before it exists as a layer: a collection may run in between.
            with self._machine.holding((upper.id,)):
                merged = await asyncio.to_thread(layers.merge, run, upper)
                self._unkept.add(merged)
                at = self.stack.index(run[0])
                self.stack = (*self.stack[:at], merged, *self.stack[at + len(run) :])
        return bool(run)

    async def close(self) -> None:
        """Close the descriptors. Pid 1 must be dead."""
        # A move to another upper in flight fails soon, because its pid 1 is dead. Until then it uses the descriptors: a
        # number that is closed now could name another sandbox's namespace a moment later.
        async with self._switching:
            self._switches.close()
            if self._namespace is not None:
                os.close(self._namespace)
                self._namespace = None

    def remove(self) -> None:
        """Delete what only this sandbox has, in the background."""
        self._look_away()
        # No frozen state has the layers in `_unkept`, so nothing else can refer to them.
        self._machine.reaper.remove([self.upper.path, *self._machine.layers.detach(self._unkept)])
