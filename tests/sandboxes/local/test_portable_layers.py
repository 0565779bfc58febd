"""Layers as canonical tars: what is unpacked is what was packed, in all that a sandbox can see."""

import asyncio
import hashlib
import io
import os
from pathlib import Path

import pytest

from sandboxes.driver import FrozenState
from sandboxes.errors import NotFreezableError
from sandboxes.guest.files import row_table
from sandboxes.guest.files.manifest import Manifest
from sandboxes.local.driver import LocalDriver
from sandboxes.local.layer_check import fault_of
from sandboxes.local.layers import LayerMeta, Layers
from sandboxes.local.portable_layers import LayerUnpacking
from sandboxes.portability import NotPortableError, PortableDriver, Porter
from sandboxes.spec import EnvironmentSpec
from tests.sandboxes.box import opened, run
from tests.sandboxes.local.test_states import CHANGES

SPEC = EnvironmentSpec(
    setup=("mkdir -p /root/d /root/e/deep; echo x > /root/d/f; ln /root/d/f /root/twin; echo y > /root/e/y",)
)
LOOK = (
    "ls -lRA --time-style=full-iso /root /tmp /run/shm/ | grep -v ^total; "
    'python3 -c \'import os; print([(n, os.listxattr(n)) for n in ("/root", "/root/twin")])\'; '
    "[ /root/d/f -ef /root/twin ]; echo $?"
)

TOOLS = ("setfattr", "setfacl", "setcap", "chattr")
"""Programs that change attributes."""


def taken(porter: Porter, frozen: FrozenState, unpacking: LayerUnpacking) -> FrozenState:
    for part in frozen.parts:
        data = b"".join(porter.pack(part))
        assert data == b"".join(porter.pack(part))
        unpacking.part(part, io.BytesIO(data), hashlib.sha256(data).hexdigest())
    return unpacking.state(frozen)


def test_unpacked_layer_equals_the_packed_one(data_dir: Path) -> None:
    async def go() -> None:
        async with opened(LocalDriver(data_dir)) as driver:
            assert isinstance(driver, LocalDriver)
            assert isinstance(driver, PortableDriver)
            # Not every machine has the programs of the others, and flags do not travel.
            changes = [command for command in CHANGES.values() if command.split()[0] not in ("ln", *TOOLS)]
            # Attributes of overlayfs' own kind are refused in bundles.
            changes = [command for command in changes if "user.overlay." not in command]
            changes += ["ln -s f /root/d/l"]
            changes += ['python3 -c \'import os; os.setxattr("/root/twin", "user.k", b"\\xff\\0")\'']
            changes += ["ln -s ./d/ /root/l; ln -s a//b/. /root/m; touch -hd 1960-01-01T00:00:00.5 /root/m"]
            changes += ["rm -r /root/e; mkdir /root/e; echo new > /root/e/only", f"X=1; echo > /root/{'n' * 200}"]
            changes += [
                "echo > $'/root/\\xff\\n'; truncate -s 3M /root/sparse; chmod 1777 /root/d; chmod u+s /root/twin"
            ]
            changes += ["head -c 2500000 /dev/urandom > /root/large"]
            for change in changes:
                sandbox = await driver.start(SPEC)
                for command in ("mkdir -p /root/d; echo one > /root/d/f", change):
                    assert (await run(sandbox, command)).code == 0, change
                frozen = await sandbox.freeze()
                with driver.porter.unpacking() as unpacking:
                    copied = taken(driver.porter, frozen, unpacking)
                    # What was noted while it was written is what a later look at the files finds.
                    assert not any(fault_of(driver.machine.layers.frozen / layer) for layer in copied.parts), change
                    copy = await driver.restore(SPEC, copied)
                assert (await copy.freeze()).state == frozen.state, change
                for command in (LOOK, "declare -p X; pwd", "echo next > /root/next", "rm -rf /root/d /root/e"):
                    before, after = await run(sandbox, command), await run(copy, command)
                    assert before.outcome == after.outcome, (change, command)
                    assert before.state is not None
                    assert after.state is not None
                    # Not `exact`: a tick of the clock may come between a file and its directory in one of the two.
                    assert before.state.content == after.state.content, (change, command)
                await sandbox.close()
                await copy.close()

    asyncio.run(go())


def test_a_state_of_another_machine_goes_on_equally(data_dir: Path) -> None:
    """The bases of two machines are made at different times, which no digest may show."""

    async def go() -> None:
        here, there = LocalDriver(data_dir / "here"), LocalDriver(data_dir / "there")
        async with opened(here), opened(there):
            sandbox = await here.start(EnvironmentSpec())
            await run(sandbox, "echo one > /tmp/f; mkdir -p /etc/d/e /var/tmp/d")
            frozen = await sandbox.freeze()
            with there.porter.unpacking() as unpacking:
                for part in frozen.parts:
                    data = b"".join(here.porter.pack(part))
                    unpacking.part(part, io.BytesIO(data), hashlib.sha256(data).hexdigest())
                copy = await there.restore(EnvironmentSpec(), unpacking.state(frozen))
            for command in ("echo two > /tmp/g", "echo > /etc/d/e/f; echo > /root/x", "rm -r /var/tmp/d"):
                before, after = await run(sandbox, command), await run(copy, command)
                assert before.state is not None
                assert after.state is not None
                assert before.state.content == after.state.content, command
            await sandbox.close()
            await copy.close()

    asyncio.run(go())


def test_imported_parts_are_held_until_the_end(data_dir: Path) -> None:
    async def go() -> None:
        async with opened(LocalDriver(data_dir)) as driver:
            assert isinstance(driver, LocalDriver)
            sandbox = await driver.start(EnvironmentSpec())
            await run(sandbox, "echo one > /root/f")
            frozen = await sandbox.freeze()
            with driver.porter.unpacking() as unpacking:
                copied = taken(driver.porter, frozen, unpacking)
                assert not set(copied.parts) & set(frozen.parts)
                await driver.collect([])
                assert set(copied.parts) <= driver.machine.layers.all()
                with driver.porter.unpacking() as empty, pytest.raises(NotPortableError, match="was not imported"):
                    empty.state(frozen)
            assert await driver.collect(copied.parts) - await driver.collect([]) == copied.size_bytes > 0
            assert not set(copied.parts) & driver.machine.layers.all()

    asyncio.run(go())


def test_a_layer_with_a_socket_stays_at_home(data_dir: Path) -> None:
    async def go() -> None:
        async with opened(LocalDriver(data_dir)) as driver:
            assert isinstance(driver, LocalDriver)
            sandbox = await driver.start(EnvironmentSpec())
            await run(sandbox, "python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"/root/s\")'")
            with pytest.raises(NotFreezableError, match="/root/s is a socket"):
                list(driver.porter.pack((await sandbox.freeze()).parts[0]))

    asyncio.run(go())


def test_merged_layers_have_links_as_they_were_written(tmp_path: Path) -> None:
    layers = Layers(tmp_path)
    layers.open()
    uppers = [layers.allocate(), layers.allocate()]
    (uppers[0].path / "diff" / "l").symlink_to("./d//")
    ids = [
        layers.freeze(upper, LayerMeta(0, Manifest(b"", b""), links=""), row_table.pack([], 0, 0, complete=False))
        for upper in uppers
    ]
    merged = layers.merge(ids, layers.allocate())
    assert os.readlink(layers.frozen / merged / "diff" / "l") == "./d//"  # noqa: PTH115
