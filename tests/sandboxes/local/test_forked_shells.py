"""Shells that are forks of the anchor: they answer as executed ones do, and no command changes their bash.

What a shell shows of itself is compared with an executed one in `tests/sandboxes/guest/test_anchor.py` too.
"""

import tarfile
from collections.abc import Awaitable, Callable
from io import BytesIO
from pathlib import Path

import pytest

from sandboxes.driver import Driver, Sandbox
from sandboxes.effects import Effect
from sandboxes.linux import spawn
from sandboxes.local.driver import LocalDriver
from sandboxes.spec import EnvironmentSpec
from tests.machine import require_sandboxes
from tests.sandboxes.box import driven, file, in_sandbox, kept_driver, needs_forks, needs_root, ran, run
from tests.sandboxes.conftest import execute_shells
from tests.sandboxes.guest.forking_anchor import EXECUTABLE, FORK, PROGRAM, SHOWN_SORTED
from tests.sandboxes.image_archives import root_tar

SPEC = EnvironmentSpec()


@pytest.fixture(autouse=True)
def _sandboxes() -> None:
    require_sandboxes()


def with_forks(data_dir: Path, test: Callable[[Driver], Awaitable[None]]) -> None:
    driven(kept_driver.offer("", LocalDriver, data_dir), test)


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
    calls = [
        SHOWN_SORTED,
        "true",
        "x=1; export y=2; cd /tmp; f() { :; }; set -u; umask 077; ulimit -n 500",
        SHOWN_SORTED,
    ]
    calls += [
        "echo $x $y; f",
        "exec 9</etc/passwd",
        SHOWN_SORTED,
        "exec 9<&-",
        "exit 3",
        SHOWN_SORTED,
        "kill -9 $$",
        SHOWN_SORTED,
    ]
    answers: list[list[tuple[object, ...]]] = []

    async def test(driver: Driver) -> None:
        sandbox = await driver.start(SPEC)
        answered = [await run(sandbox, call) for call in calls]
        answers.append([(*answer.outcome, answer.state and answer.state.content) for answer in answered])
        programs.append((await run(sandbox, PROGRAM)).out)

    programs: list[str] = []
    with_forks(data_dir, test)
    execute_shells(monkeypatch)
    with_forks(data_dir, test)
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

    with_forks(data_dir, test)


CHANGES = {
    "another bash": "sed 's/command not found/kommand not found/' {bash} >/tmp/b; chmod 755 /tmp/b; mv /tmp/b {bash}",
    "a script for bash": "rm {bash}; printf '#!/bin/sh\\necho script\\n' >{bash}; chmod 755 {bash}",
    "no bash": "rm {bash}",
    "a bash that cannot be executed": "chmod 0 {bash}",
    "another libc": "(f=$(ldd {bash} | grep -o '/.*libc.so.6'); rm $f; echo text >$f)",
    "no loader": "rm -f /lib64/ld-linux* /lib/ld-linux*",
    "no cache of libraries": "rm /etc/ld.so.cache",
    "libraries that are loaded before": "echo /nowhere/lib.so >/etc/ld.so.preload",
}
"""Commands that concern each bash which is executed later."""


@needs_root
@needs_forks
@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_system_changes_no_session(data_dir: Path, name: str) -> None:
    """Neither in the live sandbox, nor in one that is restored from a snapshot."""
    # Built-ins alone, in a new session too: nothing else may run any more.
    look = "nope_() { echo on $x $BASH_VERSION; }; nope_; type -t cd; read -r line </etc/hostname; echo $line; nope"

    async def test(driver: Driver) -> None:
        sandbox = await driver.start(SPEC)
        await run(sandbox, "x=5")
        before = await run(sandbox, look)
        changed = await run(sandbox, CHANGES[name].format(bash=EXECUTABLE))
        assert (changed.code, changed.effect) == (0, Effect.FILES)
        restored = await driver.restore(SPEC, await sandbox.freeze())
        for each in (sandbox, restored):
            for _ in range(2):
                assert (await run(each, look)).printed == before.printed
            await run(each, "kill -9 -1")
            assert (await run(each, look)).printed == before.printed, "below another anchor"
            assert (await run(each, "echo $x; x=1", session="other")).printed == ("\n", "", 0)

    with_forks(data_dir, test)


@needs_forks
def test_sessions_run_this_machine_s_bash_in_every_base(data_dir: Path, tmp_path: Path) -> None:
    """What a command executes is the base's own. Here that is a program which says so and ends."""
    marker = b"#!/bin/dash\necho own bash\n"
    with (
        tarfile.open(tmp_path / "base.tar", "w") as tar,
        tarfile.open(fileobj=BytesIO(root_tar("dash", ["env"]))) as base,
    ):
        for entry in base:
            tar.addfile(entry, base.extractfile(entry) if entry.isreg() else None)
        member = tarfile.TarInfo("usr/bin/bash")
        member.size, member.mode = len(marker), 0o755
        tar.addfile(member, BytesIO(marker))
        tar.add("/bin/dash", "usr/bin/dash")
    spec = EnvironmentSpec(base=str(tmp_path / "base.tar"))
    look = "echo $BASH_VERSION; [[ -n $x ]]; echo $?; bash -c true; bash; /bin/bash -c 'echo no'"

    async def test(driver: Driver) -> None:
        version = (await run(await driver.start(SPEC), "echo $BASH_VERSION")).out
        sandbox = await driver.start(spec)
        assert (await run(sandbox, look)).printed == (f"{version}1\n" + 3 * "own bash\n", "", 0)
        await run(sandbox, "x=5; declare -A map=([a]=b); cd /tmp")
        restored = await driver.restore(spec, await sandbox.freeze())
        for each in (sandbox, restored):
            assert (await run(each, "echo $x ${map[a]} $PWD")).out == "5 b /tmp\n"
            assert (await run(each, "bash")).out == "own bash\n"
            assert (await ran(each, "bash")).out == b"own bash\n"

    with_forks(data_dir, test)


@needs_forks
def test_variables_for_the_loader_concern_children_alone(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a spec and those of a session. They are shown as executed shells show them."""
    spec = EnvironmentSpec(env={"LD_LIBRARY_PATH": "/tmp/x", "GLIBC_TUNABLES": "glibc.malloc.check=0"})
    programs, answers = list[str](), list[tuple[object, ...]]()

    async def test(driver: Driver) -> None:
        sandbox = await driver.start(spec)
        programs.append((await run(sandbox, PROGRAM)).out)
        shown = await run(sandbox, "export LD_PRELOAD=/nowhere.so; echo $LD_LIBRARY_PATH; env | grep -a LD_ | sort")
        again = await run(sandbox, "echo $LD_LIBRARY_PATH $LD_PRELOAD; (env | grep ^LD_ | sort) 2>/dev/null")
        assert shown.out == "/tmp/x\nLD_LIBRARY_PATH=/tmp/x\nLD_PRELOAD=/nowhere.so\n"
        assert shown.err.count("'/nowhere.so' from LD_PRELOAD cannot be preloaded") == 3, "each child says so"
        answers.append((*shown.outcome, *again.outcome))

    with_forks(data_dir, test)
    execute_shells(monkeypatch)
    with_forks(data_dir, test)
    assert programs == [f"{FORK}\n", f"{EXECUTABLE}\n"]
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
        found = {path.name: (path.read_bytes(), path.stat()) for path in (data_dir / "kept/shells/files").iterdir()}
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

    with_forks(data_dir, test)


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

    with_forks(data_dir, test)
