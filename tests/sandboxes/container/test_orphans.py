"""Containers that nobody knows any more are found by their boxes, without Docker."""

import asyncio
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from sandboxes.ipc.fork_server import ForkServer
from tests.machine import needs_root

# A pid namespace whose first process sees its box where a container does. A tmpfs stands for Docker's /dev.
_CONTAINER = 'mount -t tmpfs none /dev && mkdir /dev/.box && mount --bind "$1" /dev/.box && echo up && exec sleep 1000'


@contextmanager
def container(box: Path) -> Iterator["subprocess.Popen[str]"]:
    box.mkdir(parents=True)
    namespaces = ["unshare", "--mount", "--pid", "--fork", "--kill-child"]
    command = [*namespaces, "sh", "-c", _CONTAINER, "sh", str(box)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    with process:
        assert process.stdout.readline() == "up\n"
        try:
            yield process
        finally:
            process.kill()


@needs_root
def test_launcher_ends_containers_without_keepers(tmp_path: Path) -> None:
    """Docker started them for a proxy that is dying: its sockets are closed, and it is still the launcher's parent."""

    async def dying() -> None:
        launcher = ForkServer("the launcher", "sandboxes.container.keeper.launcher", [str(tmp_path / "boxes")])
        await launcher.start()
        await launcher.close()

    with ExitStack() as stack:
        started = [stack.enter_context(container(tmp_path / "boxes" / name / "box")) for name in "ab"]
        other = stack.enter_context(container(tmp_path / "elsewhere" / "a" / "box"))
        asyncio.run(dying())
        for process in started:
            assert process.wait(30) != 0
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(0.1)
