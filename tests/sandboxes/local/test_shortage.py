"""While the machine has none left of what all sandboxes share, an answer is its rollout's own."""

import asyncio
import contextlib
import fcntl
import os
from pathlib import Path

import pytest

from sandboxes.calls import ToolCall
from sandboxes.driver import Sandbox
from sandboxes.host.guest import note_shortage
from sandboxes.linux.descriptors import Opened, close_all
from sandboxes.pool.room import SANDBOX_PIPE_PAGES
from sandboxes.spec import EnvironmentSpec
from tests.machine import children, until
from tests.sandboxes.box import local_driver, opened, run

_LARGE = 1 << 20
_ALLOWED = int(Path("/proc/sys/fs/pipe-user-pages-soft").read_text()) * os.sysconf("SC_PAGESIZE")
"""The bytes that the pipes of a user without rights may have."""
READ = "python3 -c 'import fcntl, os; print(fcntl.fcntl(os.pipe()[0], 1032))'"


def test_idle_sandboxes_leave_pipes_to_others(data_dir: Path) -> None:
    """The pipes to a sandbox are small between calls, also where processes live, and of the usual size for commands."""
    program = "import fcntl; print(*[fcntl.fcntl(fd, 1032) for fd in (1, 2)])"

    async def go() -> None:
        async with opened(local_driver(data_dir)) as driver:
            sandbox = await driver.start(EnvironmentSpec())
            for command in ("cd /tmp", "seq 100000 | tail -n 1", "X=1", f'python3 -c "{program}"'):
                answer = await run(sandbox, command)
            assert answer.out == "65536 65536\n"
            other = await driver.start(EnvironmentSpec())
            for command in ("sleep 1000 & seq 100000 | tail -n 1", "sleep 1000 & exit 3"):
                await run(other, command)
            await until(lambda: 0 < _pages() <= 2 * SANDBOX_PIPE_PAGES)

    asyncio.run(go())


def _pages() -> int:
    """Return the pages that all pipes to sandboxes of this process may hold."""
    sizes: dict[str, int] = {}
    below = children(os.getpid())
    for pid in below:
        with contextlib.suppress(OSError):
            below += children(pid)
            for end in Path(f"/proc/{pid}/fd").iterdir():
                if (name := str(end.readlink())).startswith("pipe:"):
                    with Opened(os.open(end, os.O_RDONLY | os.O_NONBLOCK)) as pipe:
                        sizes[name] = fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ)
    return sum(sizes.values()) // os.sysconf("SC_PAGESIZE")


@pytest.mark.alone
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may hold more in pipes than it may")
def test_answers_of_a_shortage_are_their_rollouts_own(data_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A new pipe is smaller then: a write that fits otherwise does not, and a program that tests it fails."""
    note_shortage.cache_clear()

    async def told(sandbox: Sandbox) -> tuple[bytes, bool]:
        execution = await sandbox.execute(ToolCall("shell", "exec", {"command": READ, "session": "main"}))
        assert execution.short is not execution.shareable
        return execution.result.body, execution.shareable

    async def go() -> None:
        async with opened(local_driver(data_dir)) as driver:
            sandbox = await driver.start(EnvironmentSpec())
            assert (whole := await told(sandbox))[1]
            pipes: list[int] = []
            try:
                for _ in range(_ALLOWED // _LARGE + 1):
                    pipes += os.pipe()
                    fcntl.fcntl(pipes[-1], fcntl.F_SETPIPE_SZ, _LARGE)
                small, shared = await told(sandbox)
            finally:
                close_all(pipes)
            assert (small != whole[0], shared) == (True, False)
            assert "fs.pipe-user-pages-soft" in caplog.text
            assert await told(sandbox) == whole

    asyncio.run(go())
