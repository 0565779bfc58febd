"""Ordinary calls: a command in the library answers and leaves behind what it does in the regular way."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hatch_build import ORDINARY_SOURCE
from sandboxes.local.ordinary_calls import _DUMP as DUMP
from sandboxes.local.ordinary_calls import _OUTPUT as OUTPUT
from sandboxes.local.ordinary_calls import library
from sandboxes.spec import EnvironmentSpec
from tests.machine import require_sandboxes
from tests.sandboxes.box import local_driver, needs_root, opened, run
from tests.sandboxes.conftest import checked_library
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


_TO_DUMP = "for f in /proc/$$/fd/1?; do [[ $(readlink $f) == pipe:* ]] && {} >$f; done; exit 3"
"""Writes to the pipes that a shell keeps for itself while a command runs, that of its dump among them."""
LONG = "n" * 250
ODD_AND_ORDINARY = {
    "one byte less than the buffer of output": (f"printf %{OUTPUT - 1}s x", 0, " " * (OUTPUT - 2) + "x", ""),
    "so much on both": (f"printf %{OUTPUT - 1}s; printf %9000s >&2", 0, " " * (OUTPUT - 1), " " * 9000),
    "bytes of all kinds": (r"printf 'a\0b\177\0'", 0, "a\0b\x7f\0", ""),
    "many that end": ("for i in {1..20}; do (:); done", 0, "", ""),
    "a name like the fields of a process": ("(echo -n ') R 1 (' >/proc/$BASHPID/comm; exit 4)", 4, "", ""),
    "signals for pid 1": ("kill -WINCH 1; kill -CHLD 1; kill -URG 1", 0, "", ""),
    "the mark of a dump": (r"printf 'forkpoint-end-of-dump\0'", 0, "forkpoint-end-of-dump\0", ""),
}
"""Commands that leave nothing behind, with their exit code and output."""
ODD = {
    "as much output as the buffer": f"printf %{OUTPUT}s",
    "one byte more": f"printf %{OUTPUT + 1}s >&2",
    "a dump of the size of the buffer": f"v=$(printf %{DUMP}s); w=$(declare -p | wc -c)",
    **{
        f"{size} bytes for a dump": _TO_DUMP.format(f"head -c {size} /dev/zero")
        for size in (1, DUMP - 1, DUMP, DUMP + 1)
    },
    "an end of a dump": _TO_DUMP.format(r"printf 'forkpoint-end-of-dump\0'"),
    "a number for a status": _TO_DUMP.format(r"printf '99999999999999999999\0forkpoint-end-of-dump\0'"),
    "a status without a dump": _TO_DUMP.format(r"printf '0forkpoint-end-of-dump\0'"),
    "hundreds of descriptors": 'for i in {100..400}; do eval "exec $i</etc/passwd"; done; unset i',
    "descriptors of long names": f"cd /tmp; n={LONG}; mkdir -p $n/$n; exec 50<$n/$n; rm -r $n; cd /; unset n",
    "a directory of 4,000 bytes": f"cd /tmp; d={LONG}; for i in {{1..16}}; do mkdir -p $d; cd $d; done; unset i d",
    "a process behind a name": "(bash -c 'echo -n \") Z 1 (\" >/proc/$$/comm; exec -a x sleep 60' >/dev/null 2>&1 &)",
    "a sleeping process": "(sleep 60 >/dev/null 2>&1 &); :",
    "a full pipe of orders": _TO_DUMP.format("head -c 70000 /dev/zero | timeout 1 cat"),
    "a stopped shell": "kill -STOP $$",
    "processes that come and go": "(while :; do /bin/true; done >/dev/null 2>&1 &)",
    "the limit of pid 1": "prlimit --pid 1 --nofile=20:",
    "the name of its directory": "mkdir -p /tmp/odd && cd /tmp/odd && rmdir /tmp/odd",
}
"""Commands that a hostile agent may send, with which the library may not end a call."""


def ran_in_library(
    helper: Path, anchor: Path, commands: list[str], *options: str, variables: Mapping[str, str] = {}
) -> list[Any]:
    """Return the library's results for commands, in a pid namespace that has the processes of the test alone."""
    arguments = [str(helper), str(anchor), json.dumps(commands), *options]
    script = ["unshare", "--pid", "--ipc", "--mount-proc", "--fork", sys.executable, "-m", ordinary_shell.__name__]
    root, environment = Path(__file__).parents[3], {**os.environ, **variables}
    printed = subprocess.run(
        [*script, *arguments], cwd=root, env=environment, capture_output=True, timeout=240, check=False
    )
    assert printed.returncode == 0, printed.stderr.decode()
    results: list[Any] = json.loads(printed.stdout)
    return results


@pytest.fixture(scope="session")
def checked_helper(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Mapping[str, str]]:
    """The library with the checks of AddressSanitizer and UBSan, and the variables that a process with it needs."""
    return checked_library(ORDINARY_SOURCE, tmp_path_factory.mktemp("checked") / "libordinary.so")


@pytest.fixture(params=["a program", "templates"])
def anchor_of_shells(request: pytest.FixtureRequest) -> Path:
    """What the anchor is made of; see `ordinary_shell`."""
    path: Path = request.getfixturevalue("anchor_helper" if request.param == "a program" else "shell_folder")
    return path


@needs_root
def test_library_holds_against_hostile_commands(
    checked_helper: tuple[Path, Mapping[str, str]], anchor_of_shells: Path
) -> None:
    """Each access to memory is checked while the library reads what commands made."""
    helper, variables = checked_helper
    commands = [*(command for command, *_ in ODD_AND_ORDINARY.values()), *ODD.values()]
    results = ran_in_library(helper, anchor_of_shells, commands, variables=variables)
    shown = dict(zip([*ODD_AND_ORDINARY, *ODD], results, strict=True))
    # The library gives a call that takes 50 ms to the regular way, as it does on a busy machine.
    ordinary = {name: None if shown[name] is None else result for name, (_, *result) in ODD_AND_ORDINARY.items()}
    assert shown == {**ordinary, **dict.fromkeys(ODD)}


@needs_root
def test_process_does_not_hide_behind_a_limit_of_pid_1(ordinary_helper: Path, anchor_helper: Path) -> None:
    """The list of processes can be opened there, and the file of none of them."""
    commands = ["true", "(setsid sleep 60 >/dev/null 2>&1 &)"]
    assert ran_in_library(ordinary_helper, anchor_helper, commands, "few") == [[0, "", ""], None]


@needs_root
def test_library_ends_ordinary_calls_only(ordinary_helper: Path, anchor_of_shells: Path) -> None:
    """In a pid namespace of its own, where no process runs but those of the test."""
    commands = [*ORDINARY, *LEAVES.values()]
    results = dict(zip(commands, ran_in_library(ordinary_helper, anchor_of_shells, commands), strict=True))
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
