"""ACLs and `user.` attributes of files are state, in local sandboxes and in containers."""

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from sandboxes.driver import Driver
from sandboxes.effects import Effect
from sandboxes.spec import EnvironmentSpec
from tests.machine import require_sandboxes
from tests.sandboxes.box import local_driver, opened, run
from tests.sandboxes.docker import OnImage
from tests.sandboxes.image_archives import agent_image

SPEC = EnvironmentSpec()
SET = """python3 -c 'import os; os.setxattr("/root/{}", "user.{}", b"{}")'"""
CHANGES = (
    "setfacl -m u:1:r /root/f",
    "setfacl -m u:1:rw /root/f",
    "setfacl -m g:7:r /root/d",
    "setfacl -d -m u:1:rx /root/d",
    SET.format("f", "k", "v"),
    SET.format("f", "k", "other"),
    SET.format("f", "other", "v"),
    SET.format("d", "k", "v"),
)
SHOW = """getfacl -R /root; cd /root; python3 -c '
import os
for name in ("d", "f", "d/g"): print(name, [(key, os.getxattr(name, key)) for key in os.listxattr(name)])'"""
REMOVE = "setfacl -b /root/f"


def local(folder: Path) -> Driver:
    require_sandboxes()
    return local_driver(folder)


def of_image(folder: Path) -> Driver:
    require_sandboxes()
    return OnImage(folder, agent_image())


@pytest.mark.skipif(not shutil.which("setfacl"), reason="setfacl is not installed (Debian: apt-get install acl)")
@pytest.mark.parametrize("make", [local, of_image])
def test_attributes_of_files_are_state(data_dir: Path, make: Callable[[Path], Driver]) -> None:
    """Each change of an attribute is a state of its own, which is restored with files made below it afterwards."""

    made = make(data_dir)

    async def go() -> None:
        async with opened(made) as driver:
            sandbox = await driver.start(SPEC)
            begun = await run(sandbox, "cd /root; mkdir d; echo text > f")
            frozen = await sandbox.freeze()
            seen = {begun.state}
            for change in CHANGES:
                changed = await driver.restore(SPEC, frozen)
                answer = await run(changed, change)
                assert (answer.effect, answer.code, answer.err) == (Effect.FILES, 0, ""), change
                assert answer.state not in seen, change
                seen.add(answer.state)
                restored = await driver.restore(SPEC, await changed.freeze())
                # An ACL by default shows in files that are made later.
                shown = [await run(each, f"echo x > /root/d/g; {SHOW}") for each in (changed, restored)]
                assert shown[0].code == 0, shown[0].err
                assert shown[0].out == shown[1].out, change
                # Not `exact`: a tick of the clock may come between the file and its directory in one of the sandboxes.
                states = [answer.state for answer in shown]
                assert None not in states, change
                assert len({state.content for state in states if state is not None}) == 1, change
                for each in (changed, restored):
                    await each.close()
            listed = await driver.restore(SPEC, frozen)
            await run(listed, CHANGES[0])
            assert (await run(listed, REMOVE)).state == begun.state
            assert (await run(listed, CHANGES[0] + "; " + REMOVE)).effect is Effect.NONE

    asyncio.run(go())
