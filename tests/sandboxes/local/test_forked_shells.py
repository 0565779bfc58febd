"""Shells that are forks of the anchor: they answer as executed ones do, and a changed bash is not passed over.

What a shell shows of itself is compared with an executed one in `tests/sandboxes/guest/test_anchor.py` too.
"""

import asyncio
import re
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from sandboxes.driver import Driver, Sandbox
from sandboxes.effects import Effect
from sandboxes.linux import spawn
from sandboxes.spec import EnvironmentSpec
from tests.machine import require_sandboxes
from tests.sandboxes.box import Answer, file, in_sandbox, local_driver, needs_forks, needs_root, opened, run
from tests.sandboxes.conftest import execute_shells
from tests.sandboxes.guest.forking_anchor import EXECUTABLE, FORK, PROGRAM, SHOWN

SPEC = EnvironmentSpec()


@pytest.fixture(autouse=True)
def _sandboxes() -> None:
    require_sandboxes()


def driven(data_dir: Path, test: Callable[[Driver], Awaitable[None]]) -> None:
    async def go() -> None:
        async with opened(local_driver(data_dir, checkpoints=False)) as driver:
            await test(driver)

    asyncio.run(go())


def involved() -> list[str]:
    """Return the paths of the files that loading bash involves."""
    listed = re.findall(r"(/\S+) \(0x", subprocess.check_output(["ldd", spawn.BASH], text=True))
    return [spawn.BASH, *listed, "/etc/ld.so.cache"]


@needs_forks
def test_shells_are_forks_and_share_no_random_numbers(data_dir: Path) -> None:
    draws = "echo $RANDOM $RANDOM $RANDOM"

    async def test(sandbox: Sandbox) -> None:
        seen = set[str]()
        for command in ("true", "x=1", "touch /tmp/f", "exit 3", "kill -9 $$"):
            await run(sandbox, command)
            assert (await run(sandbox, PROGRAM)).out == f"{FORK}\n", command
            drawn = (await run(sandbox, draws)).out
            assert drawn not in seen
            seen.add(drawn)

    in_sandbox(data_dir, test)


def test_forked_and_executed_shells_answer_alike(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In new shells and restored ones: what they show of themselves, what a call changed, and the session."""
    calls = [SHOWN, "true", "x=1; export y=2; cd /tmp; f() { :; }; set -u; umask 077; ulimit -n 500", SHOWN]
    calls += ["echo $x $y; f", "exec 9</etc/passwd", SHOWN, "exec 9<&-", "exit 3", SHOWN, "kill -9 $$", SHOWN]
    answers: list[list[tuple[object, ...]]] = []

    async def test(driver: Driver) -> None:
        sandbox = await driver.start(SPEC)
        answered = [await run(sandbox, call) for call in calls]
        answers.append([(*answer.outcome, answer.state and answer.state.content) for answer in answered])
        programs.append((await run(sandbox, PROGRAM)).out)

    programs: list[str] = []
    driven(data_dir, test)
    execute_shells(monkeypatch)
    driven(data_dir, test)
    for call, forked, executed in zip(calls, *answers, strict=True):
        assert forked == executed, call
    assert programs == [f"{FORK if Path(spawn.ANCHOR).exists() else EXECUTABLE}\n", f"{EXECUTABLE}\n"]


@pytest.mark.usefixtures("shells")
def test_a_sandbox_works_with_each_kind_of_shell(data_dir: Path) -> None:
    async def test(driver: Driver) -> None:
        sandbox = await driver.start(SPEC)
        assert (await run(sandbox, "x=5; cd /tmp; echo a >f; exit 3")).code == 3
        assert (await run(sandbox, "x=5; cd /tmp")).effect is Effect.SESSION
        assert (await file(sandbox, "put", "/tmp/g", b"text"))[0] == 201
        restored = await driver.restore(SPEC, await sandbox.freeze())
        for each in (sandbox, restored):
            assert (await run(each, "echo $x; pwd; cat f g; read y; echo $?")).out == "5\n/tmp\na\ntext1\n"
            assert (await run(each, "sleep 60 & echo $((1+1)) | cat; kill $!")).out == "2\n"
            assert (await run(each, "echo $x", session="other")).out == "\n"

    driven(data_dir, test)


CHANGES = {
    "another bash": "sed 's/command not found/kommand not found/' {bash} >/tmp/b; chmod 755 /tmp/b; mv /tmp/b {bash}",
    "a longer bash": "printf x >>{bash}",
    "a link to bash": "mv {bash} {bash}.real; ln -s bash.real {bash}",
    "the times of bash": "touch -r /etc/passwd {bash}",
    "a library that is loaded before": "touch /etc/ld.so.preload",
    "libraries of a directory": "mkdir -p /tmp/lib; echo /tmp/lib >/etc/ld.so.conf; ldconfig",
}
"""Commands after which a fork would be another shell than the sandbox's own, or might be."""


async def own_shell(sandbox: Sandbox) -> Answer:
    """Return what a call shows of its shell, which is the sandbox's own bash."""
    answer = await run(sandbox, f"{PROGRAM}; readlink -f /bin/bash; nope")
    program, own = answer.out.splitlines()
    assert program == own
    return answer


@needs_root
@pytest.mark.parametrize("name", CHANGES)
def test_after_a_change_the_shell_is_the_sandbox_s_own(data_dir: Path, name: str) -> None:
    """In the live sandbox, and in one that is restored from a snapshot. Others are not concerned."""

    async def test(driver: Driver) -> None:
        sandbox = await driver.start(SPEC)
        assert (await run(sandbox, CHANGES[name].format(bash=EXECUTABLE))).outcome == ("", "", 0, Effect.FILES)
        live = await own_shell(sandbox)
        restored = await driver.restore(SPEC, await sandbox.freeze())
        for answer in (await own_shell(restored), await own_shell(sandbox)):
            assert answer.outcome == live.outcome
        assert ("kommand" in live.err) == (name == "another bash")
        assert "kommand" not in (await run(await driver.start(SPEC), "nope")).err

    driven(data_dir, test)


@needs_root
@needs_forks
def test_each_file_that_loading_involves_is_looked_at(data_dir: Path) -> None:
    """Each is replaced by a copy of the same size and the same time of content."""
    paths = involved()

    async def test(driver: Driver) -> None:
        for path in paths:
            sandbox = await driver.start(SPEC)
            assert (await run(sandbox, f"cp -Lp {path} /tmp/copy; mv -f /tmp/copy $(readlink -f {path})")).code == 0
            live = await own_shell(sandbox)
            assert live.outcome == (await own_shell(await driver.restore(SPEC, await sandbox.freeze()))).outcome

    driven(data_dir, test)


@needs_forks
def test_variables_for_the_loader_work_as_in_an_executed_shell(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell that is born with one is executed. A session's own ones come later, and concern its children alone."""
    spec = EnvironmentSpec(env={"LD_LIBRARY_PATH": "/tmp/x"})
    programs, answers = list[str](), list[tuple[object, ...]]()

    async def test(driver: Driver) -> None:
        sandbox = await driver.start(spec)
        programs.append((await run(sandbox, PROGRAM)).out)
        shown = await run(sandbox, "export LD_PRELOAD=/nowhere.so; echo $LD_LIBRARY_PATH; env | grep ^LD_ | sort")
        again = await run(sandbox, "echo $LD_LIBRARY_PATH $LD_PRELOAD; (env | grep ^LD_ | sort) 2>/dev/null")
        assert shown.out == "/tmp/x\nLD_LIBRARY_PATH=/tmp/x\nLD_PRELOAD=/nowhere.so\n"
        answers.append((*shown.outcome, *again.outcome))

    driven(data_dir, test)
    execute_shells(monkeypatch)
    driven(data_dir, test)
    assert programs == 2 * [f"{EXECUTABLE}\n"]
    assert answers[0] == answers[1]


ON_EACH_FILE = [": >>$f", "truncate -s 0 $f", "chmod 777 $f", "chown 7 $f", "touch $f", "rm -f $f", "mv $f /tmp"]
ON_EACH_FILE += ["ln $f /dev/.shell/x", 'python3 -c \'import os, sys; os.setxattr(sys.argv[1], "user.x", b"")\' $f']
ATTACKS = {
    **{f"each file: {attack}": f"for f in /dev/.shell/*; do {attack} && exit; done; exit 1" for attack in ON_EACH_FILE},
    "the running program": ": >>/proc/$$/exe || chmod 777 /proc/$$/exe",
    "a mapped file": "for f in /proc/$$/map_files/*; do : >>$f && exit; done; exit 1",
    "a new file": ": >/dev/.shell/x || mkdir /dev/.shell/x",
    "the directory": "rmdir /dev/.shell || mv /dev/.shell /dev/x || chmod 777 /dev/.shell",
    "a remount": "mount -o remount,rw /dev/.shell || unshare -m mount -o remount,rw /dev/.shell",
    "another mount": "mount -t tmpfs x /dev/.shell || unshare -m mount -t tmpfs x /dev/.shell",
    "no mount": "umount -l /dev/.shell || unshare -m umount -l /dev/.shell",
    "the anchor's program": ": >>/proc/$PPID/exe || head -c 1 /proc/$PPID/exe",
    "the anchor's descriptors": "readlink /proc/$PPID/fd/3 || : >/proc/$PPID/fd/4",
    "the anchor's memory": ": >>/proc/$PPID/mem || head -c 1 /proc/$PPID/maps || head -c 1 /proc/$PPID/environ",
}
"""What must fail, by what it is after."""


@needs_root
@needs_forks
def test_a_command_changes_no_file_of_the_shells_and_enters_no_anchor(data_dir: Path) -> None:
    """Not even root in the sandbox. The files are shared by all sandboxes."""

    def files() -> dict[str, tuple[bytes, int, int, int]]:
        found = {
            path.name: (path.read_bytes(), path.stat()) for path in next(data_dir.glob("shells/*/files")).iterdir()
        }
        return {name: (text, made.st_mode, made.st_uid, made.st_ctime_ns) for name, (text, made) in found.items()}

    async def test(sandbox: Sandbox) -> None:
        before = files()
        succeeded = [name for name, attack in ATTACKS.items() if (await run(sandbox, f"( {attack} )")).code == 0]
        assert succeeded == []
        assert files() == before
        assert (await run(sandbox, PROGRAM)).out == f"{FORK}\n"

    in_sandbox(data_dir, test)


POKE = r"""
import sys
pid, found, changed = sys.argv[1], b'command not found', b'kommand not found'
with open(f'/proc/{pid}/maps') as maps, open(f'/proc/{pid}/mem', 'r+b') as memory:
    for line in maps:
        if '/dev/.shell/bash' in line and ' r' in line:
            begin, end = (int(place, 16) for place in line.split()[0].split('-'))
            memory.seek(begin)
            text = memory.read(end - begin)
            if found in text:
                memory.seek(begin + text.index(found))
                memory.write(changed)
"""


@needs_forks
def test_a_changed_fork_changes_no_other(data_dir: Path) -> None:
    """A command may write to the memory of its own shell, of which the file is shared."""

    async def test(driver: Driver) -> None:
        sandbox, other = await driver.start(SPEC), await driver.start(SPEC)
        await file(sandbox, "put", "/tmp/poke.py", POKE.encode())
        assert "kommand" in (await run(sandbox, "python3 /tmp/poke.py $$; nope")).err
        for each in (sandbox, other):
            assert (await run(each, "nope")).err == "bash: line 1: nope: command not found\n"

    driven(data_dir, test)


HOLD = r"""
import ctypes, fcntl, os, time
libc = ctypes.CDLL(None)
paths = [f'/dev/.shell/{name}' for name in sorted(os.listdir('/dev/.shell'))]
held = [open(path) for path in paths]
watch = libc.inotify_init1(os.O_NONBLOCK)
for path, file in zip(paths, held):
    fcntl.flock(file, fcntl.LOCK_EX)
    assert libc.inotify_add_watch(watch, path.encode(), 0xfff) >= 0
open('/tmp/ready', 'w').close()
while not os.path.exists('/tmp/look'):
    time.sleep(0.01)
try:
    print(len(os.read(watch, 1 << 16)) > 0)
except BlockingIOError:
    print(False)
"""
"""Locks and watches all files, and prints in the end whether anything has happened to one."""
TAKE = r"""
import fcntl, os
for name in sorted(os.listdir('/dev/.shell')):
    with open(f'/dev/.shell/{name}') as file:
        os.read(file.fileno(), 1)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            print(name, 'leased')
        except OSError as error:
            print(name, error.strerror)
"""
"""Reads, locks and leases all files, and prints which can be leased: those that no other process has open."""


@needs_root
@needs_forks
@pytest.mark.parametrize("own", [False, True], ids=["another sandbox", "its own"])
def test_locks_and_watches_stay_in_a_sandbox(data_dir: Path, own: bool) -> None:
    """All sandboxes share the files. The same sandbox shows the lock, so the others could show it too."""

    async def test(driver: Driver) -> None:
        sandbox, other = await driver.start(SPEC), await driver.start(SPEC)
        for each in (sandbox, other):
            await file(each, "put", "/tmp/hold.py", HOLD.encode())
            await file(each, "put", "/tmp/take.py", TAKE.encode())
        alone = await run(other, "python3 /tmp/take.py")
        await run(sandbox, "python3 /tmp/hold.py >/tmp/seen & until [ -e /tmp/ready ]; do :; done")
        taken = await run(sandbox if own else other, "python3 /tmp/take.py")
        assert ("BlockingIOError" in taken.err) == own
        assert own or taken.printed == alone.printed
        assert (await run(sandbox, "touch /tmp/look; wait; cat /tmp/seen")).out == f"{own}\n"

    driven(data_dir, test)
