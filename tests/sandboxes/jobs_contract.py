"""Jobs of a shell from call to call, compared with one plain bash; the suite of every driver that has bash."""

import asyncio
import subprocess
from pathlib import Path

import pytest

from sandboxes.driver import Driver
from sandboxes.effects import Effect
from sandboxes.spec import EnvironmentSpec
from tests.sandboxes.box import opened, run

DIALOGUES = {
    "ended between": ["(sleep 0.3; exit 3) & PID=$!", "sleep 0.6", "echo between", *["wait $PID; echo $?"] * 3],
    "ended in its call": ["(exit 4) & PID=$!; sleep 0.2", "echo between", "wait $PID; echo $?"],
    "two jobs": ["(exit 5) & A=$!; (exit 6) & B=$!; sleep 0.2", "x=1", "wait $A; echo $?; wait $B; echo $?"],
    "killed": ["sleep 60 & PID=$!", "kill $PID; sleep 0.2", "true", "wait $PID 2>/dev/null; echo $?"],
    # A job that has ended loses its number whenever the shell waits for another command, so these wait for `go`.
    "any of them": ["mkfifo go; (read -r <go; exit 7) &", "echo >go; wait -n; echo $?", "wait -n; echo $?", "jobs"],
    "all of them": ["(sleep 0.3; exit 8) & (sleep 0.2; exit 9) &", "wait; echo $?", "jobs"],
    "by its number": [
        "sleep 60 & sleep 61 &",
        "kill %1; wait %1 2>/dev/null; echo $?",
        "jobs",
        "kill %2; wait %2 2>/dev/null; echo $?",
    ],
    "disowned": ["sleep 60 & PID=$!", "disown %1", "jobs; kill $PID", "wait $PID; echo $?"],
    "stopped": [
        "sleep 60 &",
        "kill -STOP %1; jobs",
        "kill -CONT %1; kill %1; wait %1 2>/dev/null; echo $?",
    ],
    "in front": ["mkfifo go; (read -r <go; exit 3) &", "fg %1 2>/dev/null; echo $?", "echo >go; wait %1; echo $?"],
    "the last one": ["(sleep 0.2; exit 3) & P=$!", "[ $! = $P ]; echo $?", "sleep 0.4", "[ $! = $P ]; echo $?"],
    "a function's": ["f() { (sleep 0.2; exit 3) & }; f", "sleep 0.4", "wait $!; echo $?"],
    "a coprocess": ["coproc C { sleep 0.2; exit 3; }; P=$C_PID", "sleep 0.4", "wait $P; echo $?"],
}


LOOK = (
    'os.getpriority(0, p), os.sched_getscheduler(p), os.sched_getaffinity(p), open(f"/proc/{p}/oom_score_adj").read()'
)


def in_plain_bash(dialogue: list[str], folder: Path) -> list[str]:
    """Return what one bash in a directory prints for each command of a dialogue."""
    script = 'for command; do eval "$command" 2>&1; printf "\\0"; done'
    command = ["bash", "-c", script, "bash", *dialogue]
    printed = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return printed.stdout.split("\0")[:-1]


class JobsContract:
    @pytest.mark.parametrize("name", DIALOGUES)
    def test_jobs_outlive_calls_as_in_bash(self, driver: Driver, name: str, tmp_path: Path) -> None:
        """Jobs, their exit codes and `$!` are those of one bash that got all commands."""

        async def go() -> list[str]:
            async with opened(driver):
                sandbox = await driver.start(EnvironmentSpec())
                return [(await run(sandbox, f"{{ {command}\n}} 2>&1")).out for command in DIALOGUES[name]]

        assert asyncio.run(go()) == in_plain_bash(DIALOGUES[name], tmp_path)

    def test_known_jobs_have_a_digest(self, driver: Driver) -> None:
        """A shell that knows of an ended job is no live process: the state is named, and reads stay observations."""

        async def go() -> None:
            async with opened(driver):
                sandbox = await driver.start(EnvironmentSpec())
                before = (await run(sandbox, "PID=0")).state
                await run(sandbox, "(sleep 0.2; exit 3) & PID=$!")
                ended = await run(sandbox, "while kill -0 $PID 2>/dev/null; do sleep 0.05; done")
                assert ended.state is not None
                read = await run(sandbox, "cat /dev/null")
                assert (read.effect, read.state) == (Effect.NONE, ended.state)
                assert (await run(sandbox, "PID=0")).state not in {before, None}
                assert (await run(sandbox, "sleep 0.1 & wait")).effect is Effect.PROCESSES

        asyncio.run(go())

    @pytest.mark.parametrize(
        "change",
        [
            "os.setpriority(0, os.getppid(), 5)",
            "os.sched_setscheduler(os.getppid(), os.SCHED_BATCH, os.sched_param(0))",
            "os.sched_setaffinity(os.getppid(), {max(os.sched_getaffinity(0))})",
            "open(f'/proc/{os.getppid()}/oom_score_adj', 'w').write('321')",
        ],
    )
    def test_scheduling_of_a_shell_stays(self, driver: Driver, change: str) -> None:
        """What a command sets of its own shell holds for the next command, as in one bash."""
        look = f"python3 -c 'import os; p = os.getppid(); print({LOOK})'"

        async def go() -> None:
            async with opened(driver):
                sandbox = await driver.start(EnvironmentSpec())
                before = (await run(sandbox, look)).out
                changed = await run(sandbox, f'python3 -c "import os; {change}"; {look}')
                assert changed.effect
                assert changed.out == (await run(sandbox, look)).out != before

        asyncio.run(go())
