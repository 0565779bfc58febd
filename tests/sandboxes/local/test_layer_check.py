"""Damage of layers on disk: a damaged state is gone, and never served."""

import asyncio
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from sandboxes.driver import FrozenState
from sandboxes.errors import StateGoneError
from sandboxes.local.driver import LocalDriver
from sandboxes.spec import EnvironmentSpec
from tests.sandboxes.box import opened, run
from tests.sandboxes.damaged_files import flip

SPEC = EnvironmentSpec()
SMALL = "mkdir d e; echo alpha > d/f; ln -s f d/l; : > d/none; rm -rf /etc/alternatives; mkdir /etc/alternatives"
LARGE = f"{SMALL}; head -c 5000000 /dev/urandom > d/large"


def forget_manifest(path: Path) -> None:
    meta = json.loads(path.read_bytes())
    del meta["contents"]
    path.write_text(json.dumps(meta))


def relink(path: Path) -> None:
    path.unlink()
    path.symlink_to("g")


DAMAGE: dict[str, Callable[[Path], object]] = {
    "a flipped byte": lambda layer: flip(layer / "diff/root/d/f"),
    "a missing file": lambda layer: (layer / "diff/root/d/none").unlink(),
    "another file": lambda layer: (layer / "diff/root/d/more").touch(),
    "an emptied file": lambda layer: os.truncate(layer / "diff/root/d/f", 0),
    "another link": lambda layer: relink(layer / "diff/root/d/l"),
    "another mode": lambda layer: (layer / "diff/root/d/f").chmod(0o666),
    "another time": lambda layer: os.utime(layer / "diff/root/d/f"),
    "a directory that hides nothing": lambda layer: os.removexattr(
        layer / "diff/etc/alternatives", "user.overlay.opaque"
    ),
    "changed rows": lambda layer: flip(layer / "rows"),
    "no rows": lambda layer: (layer / "rows").unlink(),
    "cut metadata": lambda layer: os.truncate(layer / "meta.json", 30),
    "metadata without a digest": lambda layer: forget_manifest(layer / "meta.json"),
    "no files": lambda layer: shutil.rmtree(layer / "diff"),
    "nothing": shutil.rmtree,
}


def frozen_once(data_dir: Path, command: str, damage: Callable[[Path], object] | None) -> None:
    """Freeze a state, stop, damage its layer, and restore it after a new start."""

    async def freeze() -> FrozenState:
        async with opened(LocalDriver(data_dir)) as driver:
            sandbox = await driver.start(SPEC)
            assert (await run(sandbox, command)).code == 0
            return await sandbox.freeze()

    async def restore(frozen: FrozenState) -> None:
        async with opened(LocalDriver(data_dir)) as driver:
            sandbox = await driver.restore(SPEC, frozen)
            assert (await run(sandbox, "cat d/f; ls /etc/alternatives")).outcome[:2] == ("alpha\n", "")
            assert (await run(sandbox, "true")).state == frozen.state

    async def refuse(frozen: FrozenState) -> None:
        async with opened(LocalDriver(data_dir)) as driver:
            assert isinstance(driver, LocalDriver)
            # Another machine would take it for intact.
            with pytest.raises(OSError, match="is damaged"):
                next(iter(driver.porter.pack(frozen.parts[0])))
            for _ in range(2):
                with pytest.raises(StateGoneError):
                    await driver.restore(SPEC, frozen)
            await driver.collect(frozen.parts)
            assert (await run(await driver.start(SPEC), "echo on")).out == "on\n"

    frozen = asyncio.run(freeze())
    if damage is None:
        asyncio.run(restore(frozen))
        return
    damage(data_dir / "layers" / frozen.parts[0])
    asyncio.run(refuse(frozen))


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_layer_is_never_served(data_dir: Path, name: str) -> None:
    frozen_once(data_dir, SMALL, DAMAGE[name])


@pytest.mark.parametrize("name", ["a flipped byte", "a missing file"])
def test_a_large_damaged_layer_is_never_served(data_dir: Path, name: str) -> None:
    """A large layer is checked in a process of its own."""
    frozen_once(data_dir, LARGE, DAMAGE[name])


@pytest.mark.parametrize("command", [SMALL, LARGE])
def test_an_intact_layer_is_restored_after_a_restart(data_dir: Path, command: str) -> None:
    frozen_once(data_dir, command, None)


def test_access_times_are_those_of_the_sandboxs_programs(data_dir: Path) -> None:
    """Neither the comparison of a call's changes nor the check of a layer reads a file for a program of the sandbox."""
    look = "stat -c '%n %X' d d/f d/large"

    async def freeze() -> FrozenState:
        async with opened(LocalDriver(data_dir)) as driver:
            sandbox = await driver.start(SPEC)
            assert (await run(sandbox, f"{LARGE}; touch -a -d @981158400 d/f d/large d")).code == 0
            assert (await run(sandbox, look)).out == shown
            return await sandbox.freeze()

    async def restore(frozen: FrozenState) -> None:
        async with opened(LocalDriver(data_dir)) as driver:
            sandbox = await driver.restore(SPEC, frozen)
            assert (await run(sandbox, look)).out == shown

    shown = "".join(f"{name} 981158400\n" for name in ("d", "d/f", "d/large"))
    asyncio.run(restore(asyncio.run(freeze())))


def test_a_damaged_root_state_is_built_again(data_dir: Path) -> None:
    spec = EnvironmentSpec(files={"/root/seed": "seed\n"})

    async def go(*, damaged: bool) -> None:
        async with opened(LocalDriver(data_dir)) as driver:
            assert (await run(await driver.start(spec), "cat seed")).out == "seed\n"
            assert isinstance(driver, LocalDriver)
            layers = [layer for root in driver.roots.used() for layer in root.layers]
            # The other root states are those of spare sandboxes.
            layer = next(layer for layer in layers if (data_dir / "layers" / layer / "diff/root/seed").exists())
        if damaged:
            flip(data_dir / "layers" / layer / "diff/root/seed")

    asyncio.run(go(damaged=True))
    asyncio.run(go(damaged=False))
