"""A proxy that is not root, beside a launcher that is: how both run, and what the proxy does with files of others.

`python -m tests.beside FOLDER` runs the second as this process, with the rights that it has. Its exit code says whether
every state came back with the owners, modes and capabilities that it had.
"""

import asyncio
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sandboxes.local.driver import LocalDriver
from sandboxes.local.layers import MAX_DEPTH
from sandboxes.local.sandbox import LocalSandbox
from sandboxes.rights import held
from sandboxes.spec import EnvironmentSpec
from tests import forks
from tests.machine import wait_until
from tests.rights import Rights
from tests.sandboxes.box import opened, run

USER, UID = "daemon", 1
"""A user that each Linux has."""
BESIDE = Rights(tuple(held.NEEDED), uid=UID)
"""The rights of the unit's proxy."""
_FILES = """
mkdir -p w/d && cd w && touch owned sticky capable && chown 1234:4321 owned d && chmod 2755 owned && chmod 3700 d
chmod 4711 sticky && touch d/inner && chmod 000 d/inner
python3 -c "import os, struct
os.setxattr('capable', 'security.capability', struct.pack('<5I', 0x2000001, 1024, 0, 0, 0))"
"""
_LOOK = """
cd /root/w && stat -c '%n %u %g %a' * d/*
python3 -c "import os; print(os.getxattr('capable', 'security.capability').hex())"
stat -c '%u %g %a %n' / /etc /etc/hostname /home /root /tmp /dev/.shell /dev/.shell/bash
"""


@contextmanager
def launcher_beside(folder: Path) -> Iterator[Path]:
    """Run `forkpoint launcher` for proxies of `USER` with data below `folder`; yield its socket."""
    path = folder / "run" / "launcher"
    command = ["forkpoint", "launcher", "--user", USER, "--data", str(folder / "data"), "--socket", str(path)]
    launcher = forks.server().fork(command, folder, os.environ, folder / "launcher.log")
    try:
        wait_until(lambda: path.exists() or launcher.poll() is not None)
        assert launcher.poll() is None
        yield path
    finally:
        launcher.kill()
        launcher.wait()


async def _keep_and_merge(folder: Path) -> None:
    """Have layers merged, which reads and writes all files as this process, and look at the state that comes back."""
    async with opened(LocalDriver(folder)) as driver:
        sandbox = await driver.start(EnvironmentSpec())
        answer = await run(sandbox, _FILES)
        assert answer.code == 0, answer.err
        # Below a directory that a lower layer has already: its set-group-ID bit decides about new files.
        await run(sandbox, "cd /root/w/d && echo text > later && chgrp 0 later && mkfifo pipe && ln -s later link")
        before = (await run(sandbox, _LOOK)).out
        for number in range(MAX_DEPTH + 1):
            await run(sandbox, f"echo {number} > /tmp/n")
        frozen = await sandbox.freeze()
        restored = await driver.restore(EnvironmentSpec(), frozen)
        after = (await run(restored, _LOOK)).out
        assert after == before, f"{before}\nbecame\n{after}"
        assert "\n0 0 755 /\n0 0 755 /etc\n0 0 644 /etc/hostname\n" in before, before
        # What does not leave by itself is killed.
        assert isinstance(restored, LocalSandbox)
        restored.link.die("the test ends it")
    assert not any((folder / "uppers").iterdir())


def main() -> None:
    """Keep and merge states, whatever rights this process lacks."""
    # The driver would say at its start what is missing.
    held.missing = lambda: ()  # type: ignore[assignment]
    with suppress(KeyError):
        del os.environ["HOME"]
    asyncio.run(_keep_and_merge(Path(sys.argv[1])))


if __name__ == "__main__":
    main()
