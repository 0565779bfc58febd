"""Capture: states are frozen after the answer, and a freeze that fails costs no more than the snapshot."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import pytest

from sandboxes.driver import FrozenState
from sandboxes.errors import NotFreezableError, NotFreezableNowError, SandboxError
from sandboxes.pool.lifecycle import SandboxState
from sandboxes.pool.pool import Pool
from sandboxes.pool.room import Room
from sandboxes.pool.roster import Slot
from sandboxes.spec import EnvironmentSpec
from snapshots.cache import SnapshotCache
from snapshots.capture import Capture
from snapshots.store import SnapshotStore
from tests.sandboxes.memory_driver import MemoryDriver, MemorySandbox
from tests.snapshots.nodes import FakeNode, FakeTree, Tally

SPEC = EnvironmentSpec(driver="memory", files={"/root/seed": "seed\n"})


class Rig:
    """A capture over a pool of memory sandboxes, with one tree."""

    def __init__(self, directory: Path) -> None:
        self.driver, self.pool, self.tally, self.tree = (
            MemoryDriver(),
            Pool(Room(4), patience_s=1.0),
            Tally(),
            FakeTree(),
        )
        self.store = SnapshotStore(directory)
        self.store.open()
        self.cache = SnapshotCache(
            self.store, {"memory": self.driver}, self.tally, budget_bytes=1 << 30, checkpoint_bytes=1 << 30
        )
        self.saved: list[FakeNode] = []
        self.capture = Capture(self.cache, self.pool, self.tally, self.saved.append, lambda _tree, _node: None)

    async def lease(self, node: FakeNode) -> Slot:
        """Start a sandbox that is leased at a node."""
        return await self.pool.start(lambda: self.driver.start(SPEC), node, 1)


def run(directory: Path, test: Callable[[Rig], Awaitable[None]]) -> None:
    """Run a test on a new rig."""

    async def body() -> None:
        await test(Rig(directory))

    asyncio.run(body())


def refuse(monkeypatch: pytest.MonkeyPatch, error: Exception) -> list[int]:
    """Let every freeze fail; return the list that counts them."""
    calls: list[int] = []

    async def freeze(_sandbox: MemorySandbox) -> FrozenState:
        calls.append(1)
        raise error

    monkeypatch.setattr(MemorySandbox, "freeze", freeze)
    return calls


def test_a_state_is_frozen_after_its_lease(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        node = FakeNode(7)
        slot = await rig.lease(node)
        await rig.capture.give_back(slot, rig.tree, node, freeze=True)
        assert (slot.state, node.snapshot) == (SandboxState.FREEZING, None)
        await rig.capture.drain()
        snapshot = rig.cache.of(node)
        assert snapshot is not None
        assert (snapshot.node, slot.state, rig.tally.snapshots_taken) == (7, SandboxState.IDLE, 1)
        assert rig.cache.costs["memory"].files.freeze.samples == 1
        assert rig.cache.used_bytes == snapshot.size_bytes > 0

    run(tmp_path, test)


class TravellingSandbox(MemorySandbox):
    """A sandbox whose frozen states arrive when a test says so."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.arrives, self.freezes = asyncio.Event(), 0

    async def begin_freeze(self) -> Awaitable[FrozenState]:
        frozen = await self.freeze()
        self.freezes += 1

        async def arrive() -> FrozenState:
            await self.arrives.wait()
            return frozen

        return arrive()


def test_a_call_does_not_wait_for_a_travelling_state(tmp_path: Path) -> None:
    """The sandbox is free, and a second lease at the same node does not freeze it again."""

    async def test(rig: Rig) -> None:
        rig.driver = MemoryDriver(sandbox=TravellingSandbox)
        node = FakeNode(7)
        slot = await rig.lease(node)
        sandbox = slot.sandbox
        assert isinstance(sandbox, TravellingSandbox)
        await rig.capture.give_back(slot, rig.tree, node, freeze=True)
        for _ in range(2):
            async with asyncio.timeout(30):
                # It is waited for while it freezes, and then leased.
                while not await rig.pool.lease(slot, node, 1):
                    pass
            assert (node.snapshot, sandbox.freezes) == (None, 1)
            await rig.capture.give_back(slot, rig.tree, node, freeze=True)
        sandbox.arrives.set()
        await rig.capture.drain()
        assert node.snapshot is not None
        assert (slot.state, rig.tally.snapshots_taken) == (SandboxState.IDLE, 1)

    run(tmp_path, test)


def test_of_two_sandboxes_at_a_node_the_first_state_is_waited_for(tmp_path: Path) -> None:
    """Whoever needs the state meanwhile gets that one, and freezes nothing."""

    async def test(rig: Rig) -> None:
        rig.driver = MemoryDriver(sandbox=TravellingSandbox)
        node = FakeNode(7)
        slots = [await rig.lease(node) for _ in range(3)]
        first, second, third = [cast("TravellingSandbox", slot.sandbox) for slot in slots]
        for slot in slots[:2]:
            await rig.capture.give_back(slot, rig.tree, node, freeze=True)
        rig.pool.flush_pending_freezes()
        await asyncio.gather(*(slot.freeze_over.wait() for slot in slots[:2]))
        needed = asyncio.ensure_future(rig.capture.freeze_leased(slots[2], rig.tree, node))
        second.arrives.set()
        first.arrives.set()
        async with asyncio.timeout(30):
            assert await needed
            await rig.capture.arrival(node)
            await rig.capture.drain()
        assert (first.freezes, second.freezes, third.freezes, rig.cache.of(node) is None) == (1, 1, 0, False)

    run(tmp_path, test)


def test_states_not_worth_it_are_not_frozen(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        node = FakeNode(7)
        slot = await rig.lease(node)
        await rig.capture.give_back(slot, rig.tree, node, freeze=False)
        assert (slot.state, node.snapshot, len(rig.store)) == (SandboxState.IDLE, None, 0)

    run(tmp_path, test)


def test_a_refused_state_keeps_its_sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(rig: Rig) -> None:
        refuse(monkeypatch, NotFreezableError("a pipe leads outside"))
        node = FakeNode(7)
        slot = await rig.lease(node)
        with pytest.raises(NotFreezableError):
            await rig.capture.freeze_leased(slot, rig.tree, node)
        assert (slot.state, node.unfreezable) == (SandboxState.IDLE, "a pipe leads outside")

    run(tmp_path, test)


@pytest.mark.parametrize("later", [False, True])
def test_a_machine_that_fails_for_now_costs_only_the_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later: bool
) -> None:
    """The disk is full at a freeze. The sandbox goes on, and its state is frozen once there is room."""

    async def test(rig: Rig) -> None:
        node = FakeNode(7)
        slot = await rig.lease(node)
        with monkeypatch.context() as patch:
            refuse(patch, NotFreezableNowError("the disk is full"))
            if later:
                await rig.capture.give_back(slot, rig.tree, node, freeze=True)
                await rig.capture.drain()
                assert await rig.pool.lease(slot, node, 1)
            else:
                with pytest.raises(NotFreezableNowError):
                    await rig.capture.freeze_leased(slot, rig.tree, node)
                assert await rig.pool.lease(slot, node, 1)
        assert await rig.capture.freeze_leased(slot, rig.tree, node)
        assert (slot.state, node.unfreezable) == (SandboxState.IDLE, "")

    run(tmp_path, test)


def test_a_state_that_does_not_arrive_costs_only_its_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full while a checkpoint is completed, beside a sandbox that already runs on."""

    async def begin_freeze(_sandbox: TravellingSandbox) -> Awaitable[FrozenState]:
        async def arrive() -> FrozenState:
            raise NotFreezableNowError("the disk is full")

        return arrive()

    async def test(rig: Rig) -> None:
        rig.driver = MemoryDriver(sandbox=TravellingSandbox)
        monkeypatch.setattr(TravellingSandbox, "begin_freeze", begin_freeze)
        node = FakeNode(7)
        slot = await rig.lease(node)
        await rig.capture.give_back(slot, rig.tree, node, freeze=True)
        await rig.capture.drain()
        assert (slot.state, node.unfreezable, rig.tally.failures) == (SandboxState.IDLE, "", ["freeze"])

    run(tmp_path, test)


def test_a_sandbox_that_fails_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(rig: Rig) -> None:
        refuse(monkeypatch, SandboxError("it died"))
        node = FakeNode(7)
        slot = await rig.lease(node)
        await rig.capture.give_back(slot, rig.tree, node, freeze=True)
        await rig.capture.drain()
        assert (slot.state, node.snapshot, node.unfreezable) == (SandboxState.CLOSED, None, "")
        assert rig.tally.failures == ["freeze"]

    run(tmp_path, test)


def test_a_full_disk_costs_only_the_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError("no space left on device")

    async def test(rig: Rig) -> None:
        monkeypatch.setattr(rig.store, "save", full)
        node = FakeNode(7)
        slot = await rig.lease(node)
        assert not await rig.capture.freeze_leased(slot, rig.tree, node)
        assert (slot.state, rig.tally.failures) == (SandboxState.IDLE, ["freeze"])
        assert rig.cache.used_bytes > 0, "what was frozen stays until something collects"

    run(tmp_path, test)


def test_the_first_freeze_tells_the_root_digest(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        root = rig.tree.root
        slot = await rig.lease(root)
        assert await rig.capture.freeze_leased(slot, rig.tree, root)
        assert root.state is not None
        assert rig.saved == [root]
        assert rig.cache.costs["memory"].files.freeze.samples == 0, "the root's freeze says nothing about other states"

    run(tmp_path, test)


def test_forgotten_nodes_get_no_snapshot(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        node = FakeNode(7)
        slot = await rig.lease(node)
        await rig.capture.give_back(slot, rig.tree, node, freeze=True)
        node.detached = True
        await rig.capture.drain()
        assert (node.snapshot, len(rig.store)) == (None, 0)

    run(tmp_path, test)


def test_states_of_other_machines_are_adopted_once(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        node, frozen = FakeNode(7), FrozenState("memory", "files", {}, 100, None, ("part-100",))
        assert rig.capture.adopt(frozen, rig.tree, node, cost_s=0.01)
        assert not rig.capture.adopt(frozen, rig.tree, node, cost_s=0.01)
        assert (len(rig.store), rig.cache.used_bytes) == (1, 100)

    run(tmp_path, test)
