"""The processes of a replay get the pids of the recording, in whatever sandbox it runs."""

import asyncio
from pathlib import Path

import pytest

from sandboxes.calls import Course, ToolCall
from sandboxes.driver import Sandbox, expect
from sandboxes.spec import EnvironmentSpec
from tests.machine import require_sandboxes
from tests.sandboxes.box import Answer, file, local_driver, needs_root, opened, run

TELLS = "echo $$; sleep 1000 & echo $!; sh -c 'echo $$'; python3 -c 'import os; print(os.getpid())'"
STOPS = """
import ctypes, os, signal
libc = ctypes.CDLL(None, use_errno=True)
def reached(pid, look):
    try: look(pid)
    except OSError: return False
    return True
LOOKS = {
    'root': lambda pid: os.listdir(f'/proc/{pid}/root/'),
    'cwd': lambda pid: os.listdir(f'/proc/{pid}/cwd/'),
    'descriptors': lambda pid: os.readlink(f'/proc/{pid}/fd/0'),
    'memory': lambda pid: open(f'/proc/{pid}/mem', 'rb+'),
    'namespace': lambda pid: os.readlink(f'/proc/{pid}/ns/mnt'),
    'trace': lambda pid: libc.ptrace(0x4206, pid, 0, 0) and os.strerror(1) and open('/nothing'),
}
ours = {int(name) for name in os.listdir('/proc') if name.isdigit()}
left = 3
while left > 0:
    for pid in {int(name) for name in os.listdir('/proc') if name.isdigit()} - ours:
        try: os.kill(pid, signal.SIGSTOP)
        except OSError: continue
        if os.path.exists(f'/proc/{pid}'):
            got = [name for name, look in LOOKS.items() if reached(pid, look)]
            print('seen', *got, flush=True)
            left -= 1
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


@pytest.mark.parametrize(
    ("path", "calls"),
    [
        # No shell with such a PATH is a fork of a template, nor is one with a stack of directories.
        ("/opt/bin:/usr/bin:/bin", []),
        ("/opt/bin:/usr/bin:/bin", ["?ls /"]),
        ("/usr/bin:/bin", ["pushd /tmp", "?ls"]),
        # The second session's shell, or a file operation, comes between the shell and its command.
        ("/usr/bin:/bin", ["?ls /", "?other:ls /"]),
        ("/opt/bin:/usr/bin:/bin", ["?ls /", "?file"]),
    ],
    ids=["first", "a PATH", "a stack", "a second session", "a file"],
)
def test_shells_begin_with_their_calls_or_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, calls: list[str]
) -> None:
    """No replay makes the observations (`?`), after which the recording's shell has another history."""
    require_sandboxes()
    spec = EnvironmentSpec(env={"PATH": path})

    async def make(sandbox: Sandbox, call: str) -> None:
        if call == "?file":
            assert (await file(sandbox, "get", "/etc/passwd"))[0] == 200
            return
        session, _, command = call.lstrip("?").rpartition(":")
        await run(sandbox, command, session=session or "main")

    async def go() -> None:
        async with opened(local_driver(tmp_path)) as driver:
            first, replay = await driver.start(spec), await driver.start(spec)
            for call in calls:
                await make(first, call)
                if not call.startswith("?"):
                    await make(replay, call)
            told = ToolCall("shell", "exec", {"command": TELLS, "timeout_s": 30.0, "session": "main"})
            recorded = await first.execute(told)
            if not calls:
                # Its shell has the pid already, so that no launcher has to set one.
                monkeypatch.setattr(replay, "_at_launcher", None)
            await expect(replay, recorded.course)
            assert Answer(await replay.execute(told)).out == Answer(recorded).out

    asyncio.run(go())


def test_a_sandbox_that_stops_whatever_it_sees_holds_up_nobody(tmp_path: Path) -> None:
    """The process that sets the pids is seen in the sandbox. Its root may stop it, and reaches nothing through it."""
    require_sandboxes()

    async def go() -> None:
        async with opened(local_driver(tmp_path)) as driver:
            sandbox = await driver.start(EnvironmentSpec())
            await run(sandbox, f'python3 -c "{STOPS}" > /root/log 2>&1 &')
            # The program stops three of them, each of which the proxy waits for; then it ends.
            for number in range(300):
                await expect(sandbox, Course(None, 1000 + number))
            other = await driver.start(EnvironmentSpec())
            assert (await run(other, "echo on")).out == "on\n"
            status, seen = await file(sandbox, "get", "/root/log")
            assert (status, set(seen.splitlines())) == (200, {b"seen"}), seen

    asyncio.run(go())
