"""Ordinary calls: a command in the library answers and leaves behind what it does in the regular way."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

from sandboxes.local.ordinary_calls import library
from sandboxes.spec import EnvironmentSpec
from tests.machine import require_sandboxes
from tests.sandboxes.box import local_driver, needs_root, opened, run
from tests.sandboxes.local import ordinary_shell

ORDINARY = [
    "true",
    "exit_code() { return 7; }; unset -f exit_code; (exit 3)",
    "echo out; echo err >&2",
    "cat /etc/passwd",
]
"""Commands that leave nothing behind."""
LEAVES = {
    "a variable": "x=5",
    "a function": "f() { :; }",
    "a directory": "cd /tmp",
    "a limit": "ulimit -n 99",
    "a descriptor": "exec 9</etc/passwd",
    "a background process": "sleep 60 &",
    "a process of its own session": "setsid sleep 60 >/dev/null 2>&1 < /dev/null & disown",
    "niceness": "renice -n 3 -p $$ >/dev/null",
    "a score": "echo 7 > /proc/$$/oom_score_adj",
    "an object": "ipcmk -M 4096 >/dev/null",
    "a moved directory": "mkdir -p /tmp/a && cd /tmp/a && mv /tmp/a /tmp/b",
    "the end of the shell": "exit 5",
    "a killed shell": "kill -9 $$",
    "much output": "head -c 40000 /dev/zero | tr '\\0' x",
    "much output on stderr": "head -c 40000 /dev/zero | tr '\\0' x >&2",
    "time": "sleep 0.2",
    "a syntax error": "if then",
    "a mode of a pipe": "chmod 600 /proc/$$/fd/1",
    "a disabled builtin": "enable -n printf",
}
"""Commands with which the library may not end a call, by what they leave or take."""


@needs_root
def test_library_ends_ordinary_calls_only(ordinary_helper: Path, anchor_helper: Path) -> None:
    """In a pid namespace of its own, where no process runs but those of the test."""
    commands = [*ORDINARY, *LEAVES.values()]
    arguments = [str(ordinary_helper), str(anchor_helper), json.dumps(commands)]
    script = ["unshare", "--pid", "--ipc", "--mount-proc", "--fork", sys.executable, "-m", ordinary_shell.__name__]
    root = Path(__file__).parents[3]
    printed = subprocess.run([*script, *arguments], cwd=root, capture_output=True, timeout=240, check=False)
    assert printed.returncode == 0, printed.stderr.decode()
    results = dict(zip(commands, json.loads(printed.stdout), strict=True))
    assert {command for command, result in results.items() if result} == {*ORDINARY}
    assert [results[command] for command in ORDINARY[:3]] == [[0, "", ""], [3, "", ""], [0, "out\n", "err\n"]]
    assert results[ORDINARY[3]] == [0, Path("/etc/passwd").read_text(), ""]


def test_a_call_is_the_same_in_both_ways(data_dir: Path) -> None:
    """The first call of a sandbox goes the regular way; the third is run by the library, where there is one."""
    require_sandboxes()

    async def test() -> None:
        async with opened(local_driver(data_dir, checkpoints=False)) as driver:
            for name, command in {
                **LEAVES,
                "a file": "echo 1 > /tmp/f",
                "a removed file": "rm -f /etc/hostname",
            }.items():
                regular, ordinary = [await driver.start(EnvironmentSpec()) for _ in range(2)]
                for plain in ("true", "echo 1"):
                    await run(ordinary, plain)
                outcomes = []
                for sandbox in (regular, ordinary):
                    answer = await run(sandbox, command)
                    after = await run(sandbox, "pwd; ulimit -n; nice; umask; echo $x; ls /tmp /proc/self/fd")
                    outcomes.append((answer.outcome, answer.state and answer.state.content, after.printed))
                    await sandbox.close()
                assert outcomes[0] == outcomes[1], name

    asyncio.run(test())


def test_broken_library_is_no_library(tmp_path: Path) -> None:
    broken = tmp_path / "libordinary.so"
    broken.write_bytes(b"no library")
    assert library(str(broken)) is None
    assert library(str(tmp_path / "missing.so")) is None
