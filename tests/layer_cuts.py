"""The commits of file layers whose writes are recorded for cuts of power, and what must hold on every disk afterwards.

A root state is committed and synced, as a task's first sandbox does it. Two layers over it get snapshots. Then they are
merged, the merged state gets a snapshot, and the two layers are deleted. The files of a layer are written here and not
by a sandbox, because strace sees a sandbox's own paths only.
"""

import asyncio
import os
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from unittest.mock import patch

from sandboxes.driver import FrozenState
from sandboxes.guest.files import row_table
from sandboxes.host.root_states import RootState, RootStates
from sandboxes.local.layer_check import LayerCheck, fault_of
from sandboxes.local.layers import LayerMeta, Layers, drop, read_manifest
from snapshots import store as snapshot_module
from snapshots.store import SnapshotStore
from tests.power_cuts import tell

STAMP_NS = 1_700_000_000 * 10**9
"""The time of all files. A disk that is built again has no times of its own, and other times would show as damage."""
ROOT = {"a": b"root\n", "d/large": b"0123456789abcdef" * 256, "d/e/c": b"deep\n"}
FIRST = {"a": b"first\n", "f": b"new\n"}
SECOND = {"a": b"second\n", "d/large": b"fedcba9876543210" * 256}
MERGED = {**FIRST, **SECOND}
KEY = "key-of-a-spec"


def opened(data: Path) -> tuple[Layers, RootStates]:
    layers, roots = Layers(data / "local"), RootStates(data / "local" / "roots")
    layers.open()
    roots.open()
    return layers, roots


def commit(layers: Layers, files: Mapping[str, bytes]) -> str:
    """Write files into a fresh upper, as a sandbox does, and make it a layer."""
    upper = layers.allocate()
    top = Path(upper.diff)
    for path, content in files.items():
        (top / path).parent.mkdir(parents=True, exist_ok=True)
        (top / path).write_bytes(content)
    stamp(top)
    table = row_table.pack([], 0, 0, complete=False)
    return layers.freeze(upper, LayerMeta(4096, read_manifest(upper.path, contents=True), links=""), table)


def stamp(top: Path) -> None:
    for folder, _, files in os.walk(top, topdown=False):
        for path in (*(os.path.join(folder, name) for name in files), folder):  # noqa: PTH118
            os.utime(path, ns=(STAMP_NS, STAMP_NS))


def content(layer: Path) -> dict[str, bytes]:
    top = layer / "diff"
    return {str(path.relative_to(top)): path.read_bytes() for path in top.rglob("*") if path.is_file()}


async def root_of(layers: Layers, roots: RootStates) -> tuple[RootState, bool]:
    """Return the task's root state, and whether it had to be built."""
    built, check = False, LayerCheck(layers)

    async def is_present(root: RootState) -> bool:
        return not layers.missing(root.layers) and not await check.damaged(root.layers)

    async def build() -> RootState:
        nonlocal built
        built = True
        layer = commit(layers, ROOT)
        layers.sync([layer])
        return RootState(layers=(layer,), born_ns=STAMP_NS)

    return await roots.get(KEY, is_present, build), built


async def scenario(data: Path) -> None:
    layers, roots = opened(data)
    snapshots = SnapshotStore(data / "snapshots")
    snapshots.open()
    root, _ = await root_of(layers, roots)
    tell("root", 1)

    def keep(above: tuple[str, ...]) -> None:
        stack = (*above, *root.layers)
        frozen = FrozenState("local", "files", {"layers": stack}, 4096, None, stack)
        snapshots.save(frozen, tree=1, node=len(above), cost_s=0.1)

    first = commit(layers, FIRST)
    keep((first,))
    second = commit(layers, SECOND)
    keep((second, first))
    merged = layers.merge((second, first), layers.allocate())
    keep((merged,))
    for snapshot in list(snapshots)[:2]:
        snapshots.drop(snapshot)
    drop(layers, [first, second])


def verify(data: Path, answered: Mapping[str, int]) -> Counter[str]:
    """Open a disk after a cut and check every promise; return how often each outcome came.

    What a check of a layer lets through is what was committed. A root state that a rollout has begun from is there
    as a whole. After a reboot no snapshot is left. Without one, each snapshot is whole or missing.
    """
    if (data / "local" / "layers").exists():
        stamp(data / "local" / "layers")
    seen: Counter[str] = Counter()
    layers, roots = opened(data)
    states = [ROOT, FIRST, SECOND, MERGED]
    for layer in layers.all():
        if fault_of(layers.frozen / layer):
            seen["damaged"] += 1
            continue
        assert content(layers.frozen / layer) in states, f"layer {layer} passes its check with other files"
        seen["intact"] += 1
    _verify_snapshots(data, layers)
    root, built = asyncio.run(root_of(layers, roots))
    assert not (built and answered.get("root")), "a root state was built again, although a rollout has begun from it"
    seen["built" if built else "continued"] += 1
    assert content(layers.frozen / root.layers[0]) == ROOT
    assert asyncio.run(root_of(*opened(data))) == (root, False)
    return seen


def _verify_snapshots(data: Path, layers: Layers) -> None:
    """Check each snapshot as if the machine had not stopped, and that none is left because it has."""
    whole = {1: [FIRST, MERGED], 2: [SECOND]}
    store = SnapshotStore(data / "snapshots")
    mark = data / "snapshots" / "boot-id"
    if mark.exists():
        with patch.object(snapshot_module, "boot_id", mark.read_text):
            store.open()
    for snapshot in store:
        try:
            stack = store.load(snapshot).payload["layers"]
        except (FileNotFoundError, ValueError):
            continue
        if not layers.missing(stack) and not any(fault_of(layers.frozen / layer) for layer in stack):
            assert content(layers.frozen / stack[0]) in whole[len(stack) - 1]
            assert content(layers.frozen / stack[-1]) == ROOT
    with patch.object(snapshot_module, "boot_id", lambda: "after the cut"):
        assert SnapshotStore(data / "snapshots").open() == 0, "a snapshot outlives a loss of power"


if __name__ == "__main__":
    asyncio.run(scenario(Path(sys.argv[1])))
