"""The processes of a replay get the pids of the recording, in whatever sandbox it runs."""

import asyncio
from pathlib import Path

from sandboxes.calls import Course, ToolCall
from sandboxes.driver import expect
from sandboxes.spec import EnvironmentSpec
from tests.machine import require_sandboxes
from tests.sandboxes.box import Answer, local_driver, needs_root, opened, run

TELLS = "echo $$; sleep 1000 & echo $!; sh -c 'echo $$'; python3 -c 'import os; print(os.getpid())'"
STOPS = """
import os, signal
while True:
    for name in os.listdir('/proc'):
        if name.isdigit() and int(name) not in (1, 2, 3, os.getpid()):
            try: os.kill(int(name), signal.SIGSTOP)
            except OSError: pass
"""

pytestmark = needs_root


def test_replays_get_the_recorded_pids(tmp_path: Path) -> None:
    """The recording began after observations, which no replay repeats; one of them forked thousands of processes."""
    require_sandboxes()
    call = ToolCall("shell", "exec", {"command": TELLS, "timeout_s": 30.0, "session": "main"})

    async def go() -> None:
        async with opened(local_driver(tmp_path)) as driver:
            for looks in ("ls / | wc -l", "for i in {1..3000}; do (:); done"):
                sandbox = await driver.start(EnvironmentSpec())
                await run(sandbox, looks)
                recorded = await sandbox.execute(call)
                assert recorded.course.last_pid > 0
                replay, other = await driver.start(EnvironmentSpec()), await driver.start(EnvironmentSpec())
                await expect(replay, recorded.course)
                assert Answer(await replay.execute(call)).out == Answer(recorded).out
                assert Answer(await other.execute(call)).out != Answer(recorded).out, "it has these pids anyway"

    asyncio.run(go())


def test_a_sandbox_that_stops_whatever_it_sees_holds_up_nobody(tmp_path: Path) -> None:
    """The process that sets the pids is seen in the sandbox, whose root may stop it."""
    require_sandboxes()

    async def go() -> None:
        async with opened(local_driver(tmp_path)) as driver:
            sandbox = await driver.start(EnvironmentSpec())
            await run(sandbox, f'python3 -c "{STOPS}" > /dev/null 2>&1 &')
            for number in range(12):
                await expect(sandbox, Course(None, 1000 + number))
            other = await driver.start(EnvironmentSpec())
            assert (await run(other, "echo on")).out == "on\n"

    asyncio.run(go())
