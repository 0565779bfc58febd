"""The limit of processes: a call that comes to it has one answer, and its processes end."""

from pathlib import Path

import pytest

from sandboxes.calls import ToolCall
from sandboxes.driver import Sandbox
from sandboxes.effects import Effect
from sandboxes.spec import Limits
from tests.sandboxes.box import Answer, in_sandbox, needs_root, ran, run

LIMITS = Limits(pids=100, timeout_s=60)
NOTE = "[forkpoint: killed: the sandbox may run no more processes and threads at once (limits.pids)]\n"
IDLE = "[ $(pgrep -vc 'init|anchor|bash|pgrep') = 0 ]"
"""Whether nothing runs but what is Forkpoint's own, and the command itself."""
FILL = "while n=(/proc/[0-9]*); [ ${#n[@]} -lt 102 ]; do sleep 1000 & done"
"""Starts as many processes as there may be, with the two that are Forkpoint's own, and no more."""
BOMBS = {
    "a function": "f() { f | f & }; f; sleep 1000",
    "a program that goes on": "python3 -c 'import os\nwhile True:\n try: os.fork()\n except OSError: pass'",
    "a program that gives up": f"python3 -c 'import os, time\nwhile os.fork(): pass\ntime.sleep(1000)'; {IDLE}",
    "threads": "python3 -c 'import threading as t, time\nwhile True: t.Thread(target=time.sleep, args=[1000]).start()'",
    "sleepers in the background": "for i in $(seq 200); do sleep 1000 & done",
}

pytestmark = needs_root


def is_note(answer: Answer) -> bool:
    return answer.code == 137 and answer.err.endswith(NOTE)


@pytest.mark.parametrize("name", BOMBS)
def test_a_call_at_the_limit_is_killed(data_dir: Path, name: str) -> None:
    """What a program makes of a fork that fails depends on moments, and others would get the answer of one of them."""

    async def test(sandbox: Sandbox) -> None:
        for _ in range(2):
            assert is_note(await run(sandbox, BOMBS[name]))
            assert (await run(sandbox, IDLE)).code == 0
        process = await ran(sandbox, "bash", "-c", BOMBS[name], cwd="/")
        assert (process.ending.exit_code, process.err.decode().endswith(NOTE)) == (137, True)
        assert (await run(sandbox, IDLE)).code == 0

    in_sandbox(data_dir, test, limits=LIMITS)


def test_earlier_processes_outlive_a_call_at_the_limit(data_dir: Path) -> None:
    async def test(sandbox: Sandbox) -> None:
        await run(sandbox, "sleep 1001 & sleep 1002 &")
        assert is_note(await run(sandbox, BOMBS["a function"]))
        assert (await run(sandbox, "pgrep -c sleep")).out == "2\n"

    in_sandbox(data_dir, test, limits=LIMITS)


@pytest.mark.parametrize("call", ["a session", "another session", "a process", "a file"])
def test_full_sandboxes_answer(data_dir: Path, call: str) -> None:
    """What goes on leaves no room for a process, so a process of ours fails to start; the call still has an answer."""

    async def test(sandbox: Sandbox) -> None:
        for _ in range(2):
            # The second time, what only the first call needed is gone.
            await run(sandbox, FILL)
        if call == "a file":
            done = await sandbox.execute(ToolCall("shell", "put", {"path": "/tmp/f"}, b"x"))
            assert done.result.status in {204, 507}
        elif call == "a process":
            assert (await ran(sandbox, "true", cwd="/")).ending.exit_code == 137
        else:
            assert is_note(await run(sandbox, "ls", session="main" if call == "a session" else "other"))
        assert (await run(sandbox, f"{IDLE} && echo alive")).out == "alive\n"
        assert (await run(sandbox, "true")).effect is Effect.NONE

    in_sandbox(data_dir, test, limits=LIMITS)
