"""Checkpoints of live processes by CRIU: what comes back, what does not and why, and what is left on disk."""

import asyncio
import contextlib
import errno
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest

from sandboxes.effects import Effect
from sandboxes.errors import NotFreezableError, NotFreezableNowError, SandboxError, StateGoneError
from sandboxes.ipc.launch_messages import RunCriu
from sandboxes.linux import syscalls as kernel
from sandboxes.linux.files import remove_tree
from sandboxes.local.driver import LocalDriver
from sandboxes.spec import EnvironmentSpec
from snapshots.criu import binary, checkpoints, image_digest
from snapshots.criu.binary import CriuUntriedError
from snapshots.criu.rpc import STOPPED, CriuConversation
from tests.machine import descendants, require_criu
from tests.sandboxes.box import local_driver, opened, ran, run
from tests.sandboxes.guest.forking_anchor import EXECUTABLE, FORK, PROGRAM

if TYPE_CHECKING:
    from sandboxes.driver import FrozenState, Sandbox

SPEC = EnvironmentSpec()
Test = Callable[[LocalDriver], Awaitable[None]]

pytestmark = pytest.mark.usefixtures("_criu")


@pytest.fixture(scope="module")
def _criu() -> None:
    require_criu()


def driven(data_dir: Path, test: Test) -> None:
    async def go() -> None:
        async with opened(local_driver(data_dir)) as driver:
            assert isinstance(driver, LocalDriver)
            await test(driver)

    asyncio.run(go())


SERVER = "mkdir -p site; echo one > site/page; (cd site; exec python3 -m http.server -b 127.0.0.1 8000) >log 2>&1 &"
ASK = "until curl -s http://127.0.0.1:8000/page; do sleep .05; done"
REPL = r"""
mkfifo in out; cat > repl.py <<'E'
import sys
while True:
    with open('in') as asked:
        text = asked.read()
    with open('out', 'w') as output:
        try:
            print(eval(text), file=output)
        except SyntaxError:
            exec(text)
            print('ok', file=output)
E
python3 repl.py &
"""
PTY = r"""
cat > term.py <<'E'
import os, pty
pid, fd = pty.fork()
if pid == 0:
    os.execvp('bash', ['bash', '--norc', '-i'])
os.write(fd, b'y=inside; stty -echo; PS1=\n')
open('up', 'w')
while True:
    with open('in') as asked:
        os.write(fd, asked.read().encode())
    shown = b''
    while b'/dev/pts\r\n' not in shown:
        shown += os.read(fd, 65536)
    with open('out', 'wb') as output:
        output.write(shown.partition(b'/dev/pts\r\n')[0] + b'/dev/pts\n')
E
mkfifo in out; python3 term.py & until [ -e up ]; do sleep .02; done
"""
HELD = r"""
echo deleted text > gone; exec 7<gone; rm gone; echo named > linked; exec 8<>linked; read -u 8 -N 2
sleep 1000 | cat > piped & disown
"""

LIVES = {
    "a web server": (SERVER, f"{ASK}; echo two > site/page; {ASK}", "one\ntwo\n"),
    "a Python REPL with variables": (
        REPL + "echo 'x = [n * n for n in range(4)]' > in; cat out",
        "echo 'x.append(5) or x' > in; cat out; echo 'sum(x)' > in; cat out",
        "[0, 1, 4, 9, 5]\n19\n",
    ),
    "tail -f": (
        "echo a > f; tail -f f > seen 2>&1 & until grep -q a seen; do sleep .05; done",
        "echo b >> f; until grep -q b seen; do sleep .05; done; cat seen",
        "a\nb\n",
    ),
    "a shell in a pty": (PTY, "echo 'echo $y; tty | cut -c1-8' > in; cat out | tr -d '\\r' | tail -2",
                         "inside\n/dev/pts\n"),
    "open, deleted and half-read files": (HELD, "cat <&7; cat <&8; pgrep -c sleep", "deleted text\nmed\n1\n"),
    "an orphan": (
        "(setsid sleep 1000 >/dev/null 2>&1 &)",
        "pgrep -c sleep; pkill sleep; while pgrep -x sleep >&2; do :; done; pgrep -c sleep", "1\n0\n",
    ),
    "a server on a Unix socket": (
        ("cat > s.py <<'E'\nimport socket\ns = socket.socket(socket.AF_UNIX); s.bind('sock'); s.listen()\n"
        "open('up', 'w')\nn = 0\nwhile True:\n    c, _ = s.accept(); n += 1; c.sendall(b'%d\\n' % n); c.close()\nE\n"
        "python3 s.py & until test -e up; do sleep .02; done"),
        "python3 -c \"import socket; s = socket.socket(socket.AF_UNIX); s.connect('sock'); print(s.recv(9).decode())\"",
        "1\n\n",
    ),
    "a connection to itself": (
        ("cat > c.py <<'E'\nimport socket, time\nl = socket.create_server(('127.0.0.1', 9000))\n"
        "a = socket.create_connection(('127.0.0.1', 9000)); b, _ = l.accept()\nn = 0\n"
        "while True:\n    open('in').read(); a.sendall(b'x'); n += len(b.recv(9)); print(n, file=open('out', 'w'))\nE\n"
        "mkfifo in out; python3 c.py & echo > in; cat out"),
        "echo > in; cat out",
        "2\n",
    ),
    "a child that was replaced by exec": ("bash -c 'exec -a named sleep 1000' &", "ps -o args= -p $!", "named 1000\n"),
}  # fmt: skip


DAEMONS = {
    "a new session": "setsid -f sleep 1000",
    "two forks of a shell": "(setsid sleep 1000 >/dev/null 2>&1 &)",
    "an orphan of a shell": "(sleep 1000 >/dev/null 2>&1 &)",
    "a job": "nohup sleep 1000 >/dev/null 2>&1 &",
    # The leader of its session has ended, so its parent is pid 1 after a restore.
    "two forks of a program": (
        'python3 -c "import os; os.fork() and os._exit(0); os.setsid(); os.fork() and os._exit(0); '
        "os.execvp('sleep', ['sleep', '1000'])\" >/dev/null 2>&1"
    ),
}
STOP = "PID=$(pgrep -x sleep); kill $PID; while kill -0 $PID 2>/dev/null; do sleep .01; done; echo gone"


@pytest.mark.parametrize("way", DAEMONS)
def test_a_stopped_daemon_is_gone_within_its_call(data_dir: Path, way: str) -> None:
    """A call that stops a restored daemon and waits until its pid is gone ends, as it does beside the first daemon."""

    async def test(driver: LocalDriver) -> None:
        sandbox = await driver.start(SPEC)
        await run(sandbox, DAEMONS[way])
        frozen = await sandbox.freeze()
        for box in (sandbox, await driver.restore(SPEC, frozen)):
            stopped = await run(box, STOP)
            assert (stopped.out, stopped.timed_out) == ("gone\n", False)
        if way != "a job":
            # A job's parent is its shell, which collects it during its own calls.
            process = await ran(await driver.restore(SPEC, frozen), "bash", "-c", STOP, cwd="/")
            assert process.out == b"gone\n"

    driven(data_dir, test)


@pytest.mark.parametrize("name", LIVES)
def test_what_lives_comes_back_any_number_of_times(data_dir: Path, name: str) -> None:
    begin, look, expected = LIVES[name]

    async def test(driver: LocalDriver) -> None:
        sandbox = await driver.start(SPEC)
        assert Effect.PROCESSES in (await run(sandbox, begin)).effect
        frozen = await sandbox.freeze()
        assert frozen.kind == "processes"
        clones = await asyncio.gather(*(driver.restore(SPEC, frozen) for _ in range(3)))
        for box in (*clones, sandbox):
            answer = await run(box, look)
            assert answer.out == expected, answer.err

    driven(data_dir, test)


OTHER_USER = "setpriv --reuid 1234 --regid 4321 --groups 4321,99 python3 repl.py &"
WHO = "(x, os.getresuid(), os.getresgid(), sorted(os.getgroups()), os.access('/etc/hostname', os.W_OK))"


@pytest.mark.skipif(
    not kernel.holds(kernel.CAP_SYS_RESOURCE),
    reason="CRIU needs SYS_RESOURCE for processes of other users",
)
def test_processes_of_another_user_come_back(data_dir: Path) -> None:
    """With their user, groups and memory, and with no more rights than before."""

    async def test(driver: LocalDriver) -> None:
        sandbox = await driver.start(SPEC)
        begin = REPL.replace("mkfifo in out", "mkdir -m 777 /tmp/u; cd /tmp/u; mkfifo -m 666 in out")
        await run(sandbox, begin.replace("python3 repl.py &", OTHER_USER) + "echo 'import os; x = 42' > in; cat out")
        before = (await run(sandbox, f'echo "{WHO}" > in; cat out')).out
        assert before == "(42, (1234, 1234, 1234), (4321, 4321, 4321), [99, 4321], False)\n"
        frozen = await sandbox.freeze()
        assert frozen.kind == "processes"
        rights = "grep -E '^(Uid|Gid|Cap|NoNewPrivs|Seccomp)' /proc/$(pgrep -f repl.py)/status"
        shown = (await run(sandbox, rights)).out
        for clone in await asyncio.gather(*(driver.restore(SPEC, frozen) for _ in range(2))):
            assert (await run(clone, f'echo "{WHO}" > in; cat out')).out == before
            assert (await run(clone, rights)).out == shown

    driven(data_dir, test)


def test_sixteen_clones_of_one_checkpoint_answer_at_once(data_dir: Path) -> None:
    async def test(driver: LocalDriver) -> None:
        sandbox = await driver.start(SPEC)
        await run(sandbox, SERVER)
        await run(sandbox, ASK)
        frozen = await sandbox.freeze()
        clones = await asyncio.gather(*(driver.restore(SPEC, frozen) for _ in range(16)))
        answers = await asyncio.gather(*(run(box, f"echo {n} > site/page; {ASK}") for n, box in enumerate(clones)))
        assert [answer.out for answer in answers] == [f"{n}\n" for n in range(16)]

    driven(data_dir, test)


def test_named_sessions_come_back_each_with_its_own(data_dir: Path) -> None:
    async def test(driver: LocalDriver) -> None:
        sandbox = await driver.start(SPEC)
        await run(sandbox, "a=main; cd /tmp")
        await run(sandbox, "a=other; sleep 1000 &", session="other")
        back = await driver.restore(SPEC, await sandbox.freeze())
        assert (await run(back, "echo $a $PWD; jobs")).out == "main /tmp\n"
        assert (await run(back, "echo $a $PWD; kill %1 && echo killed", session="other")).out == "other /root\nkilled\n"
        assert (await run(back, "echo $a", session="new")).out == "\n"

    driven(data_dir, test)


def test_restored_sandbox_is_confined_and_limited(data_dir: Path) -> None:
    look = "grep -e Seccomp: -e NoNewPrivs -e CapBnd -e CapEff /proc/$!/status /proc/$$/status; ulimit -a; "
    look += "cut -d: -f3 /proc/self/cgroup; ip -br link 2>/dev/null | cut -c1-4; kill -9 -1"

    async def test(driver: LocalDriver) -> None:
        sandbox = await driver.start(SPEC)
        await run(sandbox, "sleep 1000 &")
        frozen = await sandbox.freeze()
        back = await driver.restore(SPEC, frozen)
        there, here = (await run(back, look)).out, (await run(sandbox, look)).out
        assert there == here
        assert "Seccomp:\t2" in there
        bomb = "python3 -c 'x = bytearray(3 << 30); print(len(x))'"
        other = await driver.restore(SPEC, frozen)
        assert (await run(other, bomb, timeout_s=60)).code == 137
        assert (await run(other, "pgrep -c sleep")).out == "1\n"

    driven(data_dir, test)


@pytest.mark.parametrize(
    ("held", "reason"),
    [("ipcmk -S 1; sleep 1000 &", "System V"), ("kill -9 $PPID; sleep 1000 &", "anchor")],
)
def test_failed_dump_names_its_reason_and_harms_nothing(data_dir: Path, held: str, reason: str) -> None:
    async def test(driver: LocalDriver) -> None:
        sandbox = await driver.start(EnvironmentSpec(files={"/root/a": "a"}))
        await run(sandbox, held)
        with pytest.raises(NotFreezableError, match=reason):
            await sandbox.freeze()
        assert (await run(sandbox, "pgrep -c sleep")).out == "1\n"

    driven(data_dir, test)


def test_criu_s_own_reason_is_told(data_dir: Path) -> None:
    """A process that another one traces cannot be dumped."""
    trace = "import ctypes, os, time; os.fork() or (ctypes.CDLL(None).ptrace(0, 0, 0, 0), open('traced', 'w')); "
    trace += "time.sleep(1000)"

    async def test(driver: LocalDriver) -> None:
        sandbox = await driver.start(SPEC)
        await run(sandbox, f'python3 -c "{trace}" & until [ -e traced ]; do sleep .02; done')
        before = driver.machine.checkpointer.names()
        with pytest.raises(NotFreezableError, match=r"CRIU: ."):
            await sandbox.freeze()
        assert (await run(sandbox, "pgrep -c python3")).out == "2\n"
        assert driver.machine.checkpointer.names() == before

    driven(data_dir, test)


def test_process_without_main_thread_still_lives(data_dir: Path) -> None:
    """It looks like a zombie, but its other threads run on; its state must not be taken for one of files alone."""
    exit_thread = "ctypes.CDLL(None).syscall({'x86_64': 60}.get(os.uname().machine, 93), 0)"
    program = (
        f"import ctypes, os, threading, time; threading.Thread(target=time.sleep, args=(1000,)).start(); {exit_thread}"
    )

    async def test(driver: LocalDriver) -> None:
        sandbox = await driver.start(SPEC)
        begin = f'python3 -c "{program}" & until grep -q "State:.Z" /proc/$!/status; do sleep .02; done'
        assert Effect.PROCESSES in (await run(sandbox, begin)).effect
        with pytest.raises(NotFreezableError):
            await sandbox.freeze()

    driven(data_dir, test)


def test_process_that_keeps_forking_is_dumped(data_dir: Path) -> None:
    """Each dump meets mapped files that did not exist before; they are listed while the processes stand still."""

    async def test(driver: LocalDriver) -> None:
        sandbox = await driver.start(SPEC)
        await run(sandbox, "while :; do date +%N > tick; head -c 1 /dev/zero; env true; done > /dev/null 2>&1 &")
        for _ in range(4):
            frozen = await sandbox.freeze()
            await run(sandbox, "true")
        copy = await driver.restore(SPEC, frozen)
        waits = 'a=$(cat tick); for i in {1..90}; do [ "$(cat tick)" = "$a" ] || break; sleep .1; done; echo $i'
        assert int((await run(copy, waits)).out) < 90

    driven(data_dir, test)


def test_state_with_writers_is_restless_after_restore(data_dir: Path) -> None:
    async def test(driver: LocalDriver) -> None:
        sandbox = await driver.start(SPEC)
        assert not (await run(sandbox, "echo one > file")).restless
        await run(sandbox, "(while :; do date +%N >tick; sleep .02; done) & until [ -s tick ]; do sleep .02; done")
        assert (await run(sandbox, "true")).restless
        copy = await driver.restore(SPEC, await sandbox.freeze())
        assert (await run(copy, "true")).restless
        # What the loop has just started may outlive it for a moment.
        ends = "kill %1; wait; while pgrep -x 'date|sleep' > /dev/null; do :; done"
        assert not (await run(copy, ends)).restless

    driven(data_dir, test)


def test_replaced_running_program_prevents_a_freeze(data_dir: Path) -> None:
    async def test(driver: LocalDriver) -> None:
        sandbox = await driver.start(SPEC)
        await run(sandbox, "sleep 1000 &")
        await run(sandbox, "cp /bin/true /usr/bin/sleep.new; mv /usr/bin/sleep.new /usr/bin/sleep")
        with pytest.raises(NotFreezableError):
            await sandbox.freeze()

    driven(data_dir, test)


def test_missing_or_damaged_images_are_an_error(data_dir: Path) -> None:
    async def test(driver: LocalDriver) -> None:
        sandbox = await driver.start(SPEC)
        await run(sandbox, "sleep 1000 &")
        frozen = await sandbox.freeze()
        images = data_dir / "checkpoints" / frozen.payload["images"]
        (images / "pstree.img").write_bytes(b"no")
        with pytest.raises(SandboxError, match="damaged or missing"):
            await driver.restore(SPEC, frozen)
        remove_tree(images)
        with pytest.raises(StateGoneError):
            await driver.restore(SPEC, frozen)
        assert (await run(sandbox, "pgrep -c sleep")).out == "1\n"

    driven(data_dir, test)


def test_processes_below_another_anchor_are_not_restored(
    data_dir: Path, shells: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory of an anchor that forks is that of another build, or of another bash. Below the same one, forks go on.

    An anchor that executes shells is the sandbox's own bash, so the checkpoint has its program.
    """

    async def test(driver: LocalDriver) -> None:
        sandbox = await driver.start(SPEC)
        await run(sandbox, "sleep 1000 &")
        frozen = await sandbox.freeze()
        made = driver.machine.shell
        assert (made is None) == (shells == "executed")
        assert frozen.payload["checkpoint"]["anchor"].get("program") == (made and made.digest)
        restored = await driver.restore(SPEC, frozen)
        assert (await run(restored, "pkill sleep; echo $?")).out == "0\n"
        assert (await run(restored, PROGRAM)).out == f"{FORK if shells == 'forked' else EXECUTABLE}\n"
        for other in (None, made and replace(made, digest="of another build")):
            with monkeypatch.context() as patched:
                patched.setattr(driver.machine, "shell", other)
                if shells == "executed":
                    await driver.restore(SPEC, frozen)
                    continue
                with pytest.raises(StateGoneError, match="another build"):
                    await driver.restore(SPEC, frozen)
        await driver.restore(SPEC, frozen)

    driven(data_dir, test)


def test_collecting_deletes_unneeded_images(data_dir: Path) -> None:
    """A collection deletes the images of states that are not kept."""

    async def test(driver: LocalDriver) -> None:
        sandbox = await driver.start(SPEC)
        await run(sandbox, "echo a > a; sleep 1000 &")
        one, two = await sandbox.freeze(), await sandbox.freeze()
        await sandbox.close()
        assert await driver.collect(one.parts) > 100_000
        assert driver.machine.checkpointer.names() == {one.payload["images"]}
        assert (await run(await driver.restore(SPEC, one), "cat a; pgrep -c sleep")).out == "a\n1\n"
        with pytest.raises(StateGoneError):
            await driver.restore(SPEC, two)

    driven(data_dir, test)


def test_images_may_lie_elsewhere_and_go_from_there(data_dir: Path, tmp_path: Path) -> None:
    def there() -> list[str]:
        return [path.name for path in tmp_path.glob("*/*")]

    async def go() -> None:
        async with opened(local_driver(data_dir, images_dir=tmp_path)) as driver:
            sandbox = await driver.start(SPEC)
            await run(sandbox, "sleep 1000 &")
            frozen = await sandbox.freeze()
            assert there() == [frozen.payload["images"]]
            assert (await run(await driver.restore(SPEC, frozen), "pgrep -c sleep")).out == "1\n"
            await sandbox.close()
            await driver.collect([])
            assert there() == []

    asyncio.run(go())


def test_a_sandbox_is_closed_before_its_dump_begins(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The descriptor that names its namespaces stays its own, while the order for the launcher waits for its turn."""

    async def test(driver: LocalDriver) -> None:
        sandbox = await driver.start(SPEC)
        await run(sandbox, "sleep 1000 &")
        ask, named = driver.machine.launcher.ask, list[int]()

        async def close_first(request: RunCriu, fds: list[int]) -> object:
            await sandbox.close()
            named.append(os.fstat(fds[0]).st_ino)
            return await ask(request, fds)

        monkeypatch.setattr(driver.machine.launcher, "ask", close_first)
        with pytest.raises((NotFreezableError, SandboxError)):
            await sandbox.freeze()
        assert named

    driven(data_dir, test)


def test_criu_leaves_nothing_behind(data_dir: Path) -> None:
    async def test(driver: LocalDriver) -> None:
        sandbox = await driver.start(SPEC)
        await run(sandbox, "sleep 1000 &")
        before = (await run(sandbox, "ls /; ls -a /run /tmp; cat /proc/mounts | wc -l; ps -e | wc -l")).printed
        frozen = await sandbox.freeze()
        back = await driver.restore(SPEC, frozen)
        for box in (sandbox, back):
            assert (await run(box, "ls /; ls -a /run /tmp; cat /proc/mounts | wc -l; ps -e | wc -l")).printed == before
        assert (await run(back, "exec 9>&1; sleep .01 & echo $!")).out.strip().isdigit()

    driven(data_dir, test)
    assert not _running_below(data_dir)


def test_an_agent_s_files_never_reach_criu(data_dir: Path) -> None:
    """What CRIU would load from a root file system: settings, plug-ins, its cache, a loader's list."""
    bait = "mkdir -p /etc/criu /var/lib/criu /usr/lib/criu /run; echo 'action-script /x' > /etc/criu/default.conf; "
    bait += (
        "printf '#!/bin/sh\\ntouch /caught' > /x; chmod +x /x; cp /x /usr/local/bin/iptables; cp /x /usr/bin/iptables; "
    )
    bait += (
        "echo /x.so > /etc/ld.so.preload; cp /x /var/lib/criu/x.so; cp /x /usr/lib/criu/x.so; echo bad > /run/criu.kdat"
    )

    async def test(driver: LocalDriver) -> None:
        sandbox = await driver.start(SPEC)
        await run(sandbox, bait)
        await run(sandbox, "sleep 1000 & cd /")
        back = await driver.restore(SPEC, await sandbox.freeze())
        for box in (sandbox, back):
            assert (await run(box, "ls /caught; cat /run/criu.kdat; pgrep -c sleep")).out == "bad\n1\n"

    driven(data_dir, test)


def test_kept_state_survives_a_killed_driver(data_dir: Path) -> None:
    """The next driver checks the layers. That of the live state hides a file of the one below."""
    kept: list[FrozenState] = []

    async def begin(driver: LocalDriver) -> None:
        sandbox = await driver.start(SPEC)
        await run(sandbox, "echo f > f")
        await run(sandbox, "x=1; rm f; sleep 1000 &")
        kept.append(await sandbox.freeze())

    async def go_on(driver: LocalDriver) -> None:
        (data_dir / "checkpoints" / "images-half").mkdir()
        await driver.collect(kept[0].parts)
        assert driver.machine.checkpointer.names() == {kept[0].payload["images"]}
        back: Sandbox = await driver.restore(SPEC, kept[0])
        assert (await run(back, "echo $x; pgrep -c sleep; ls")).out == "1\n1\n"

    driven(data_dir, begin)
    driven(data_dir, go_on)


def held_back(driver: LocalDriver, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Let checkpoints be completed only when the returned event is set."""
    checkpointer, go_on = driver.machine.checkpointer, asyncio.Event()
    finish = checkpointer.finish

    async def finish_then(name: str, base: str | None) -> int:
        await go_on.wait()
        return await finish(name, base)

    monkeypatch.setattr(checkpointer, "finish", finish_then)
    return go_on


COUNT = "echo 'x.append(len(x)) or x' > in; cat out; "
WRITE = "echo {0} >> kept; echo {0} > changed; rm -f gone{0}; ls; cat kept changed"


def test_a_call_changes_nothing_in_a_state_that_is_being_completed(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files and memory are those of the freeze, also if the sandbox ends and unneeded parts are collected meanwhile."""

    async def test(driver: LocalDriver) -> None:
        go_on, sandbox = held_back(driver, monkeypatch), await driver.start(SPEC)
        await run(sandbox, REPL + "touch gone1 gone2; echo 'x = [7]' > in; cat out")
        arriving = await sandbox.begin_freeze()
        one = await run(sandbox, COUNT + WRITE.format(1))
        assert one.out.startswith("[7, 1]\n")
        go_on.set()
        first = await arriving
        go_on.clear()
        arriving = await sandbox.begin_freeze()
        two = await run(sandbox, COUNT + WRITE.format(2))
        assert two.out.startswith("[7, 1, 2]\n")
        waiting = asyncio.ensure_future(arriving)
        await sandbox.close()
        await driver.collect(first.parts)
        go_on.set()
        second = await waiting
        for frozen, call, answer in ((first, 1, one), (second, 2, two)):
            back = await driver.restore(SPEC, frozen)
            assert (await run(back, COUNT + WRITE.format(call))).out == answer.out

    driven(data_dir, test)


def test_a_checkpoint_that_cannot_be_completed_costs_only_itself(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sandbox runs on, and its next checkpoint is whole without the one that it would have shared pages with."""

    def full(_images: Path) -> None:
        raise OSError("no space left on device")

    async def test(driver: LocalDriver) -> None:
        sandbox = await driver.start(SPEC)
        await run(sandbox, REPL + "echo 'x = [7]' > in; cat out")
        before = set((data_dir / "checkpoints").glob("*"))
        with monkeypatch.context() as patch:
            patch.setattr(image_digest, "seal", full)
            arriving = await sandbox.begin_freeze()
            assert (await run(sandbox, COUNT)).out == "[7, 1]\n"
            with pytest.raises(NotFreezableNowError, match="no space left"):
                await arriving
        assert set((data_dir / "checkpoints").iterdir()) == before
        frozen = await sandbox.freeze()
        answer = await run(sandbox, COUNT)
        assert answer.out == "[7, 1, 2]\n"
        assert (await run(await driver.restore(SPEC, frozen), COUNT)).out == answer.out

    driven(data_dir, test)


def test_a_checkpoint_without_room_harms_nothing(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full before the dump, or when the files are copied. The sandbox goes on, and is frozen later."""

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async def test(driver: LocalDriver) -> None:
        sandbox = await driver.start(SPEC)
        await run(sandbox, REPL + "echo 'x = [7]' > in; cat out")
        before = driver.machine.checkpointer.names()
        assert await driver.machine.checkpointer.is_available()
        for place in ("pathlib.Path.mkdir", "sandboxes.local.sandbox_layers.copy_upper"):
            with monkeypatch.context() as patch:
                patch.setattr(place, full)
                with pytest.raises(NotFreezableNowError):
                    await sandbox.freeze()
            assert driver.machine.checkpointer.names() == before
        frozen = await sandbox.freeze()
        answer = await run(sandbox, COUNT)
        assert answer.out == "[7, 1]\n"
        assert (await run(await driver.restore(SPEC, frozen), COUNT)).out == answer.out

    driven(data_dir, test)


def test_a_checkpoint_that_cannot_begin_harms_nothing(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CRIU ends while it starts, as it does on a machine without memory. The sandbox goes on, and is frozen later."""

    async def test(driver: LocalDriver) -> None:
        assert await driver.machine.checkpointer.is_available()
        sandbox = await driver.start(SPEC)
        tag = (await run(sandbox, "sleep 1000 & head -c 9 /dev/urandom | base64 > tag; cat tag")).out
        with monkeypatch.context() as patch:
            patch.setattr(checkpoints, "ARGUMENTS", ("criu", "--no-such-option"))
            # Each finds the sandbox without the CRIU of the one before it.
            for _ in range(10):
                with pytest.raises(NotFreezableNowError, match="could not be started"):
                    await sandbox.freeze()
        frozen = await sandbox.freeze()
        assert (await run(sandbox, "cat tag")).out == tag
        assert (await run(await driver.restore(SPEC, frozen), "cat tag")).out == tag

    driven(data_dir, test)


def kill_criu() -> None:
    for pid, _ in descendants(os.getpid()):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text() == "criu\n":
                os.kill(pid, signal.SIGKILL)


def test_a_sandbox_does_not_outlive_a_criu_killed_amid_its_dump(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CRIU's code may be left in the processes: a server would end at its next step, and a call would be told so."""
    send = CriuConversation._send

    async def send_and_kill(conversation: CriuConversation, request: Any) -> None:
        await send(conversation, request)
        if STOPPED in conversation._stages:
            kill_criu()

    async def test(driver: LocalDriver) -> None:
        sandbox = await driver.start(SPEC)
        await run(sandbox, SERVER + ASK)
        before = driver.machine.checkpointer.names()
        with monkeypatch.context() as patch:
            patch.setattr(CriuConversation, "_send", send_and_kill)
            with pytest.raises(SandboxError, match="may be damaged"):
                await sandbox.freeze()
        assert driver.machine.checkpointer.names() == before

    driven(data_dir, test)


def _running_below(data_dir: Path) -> list[str]:
    results = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and str(data_dir) in os.readlink(entry / "exe"):  # noqa: PTH115
                results.append(entry.name)
        except OSError:
            continue
    return results


SCORES = "cat /proc/self/oom_score_adj /proc/1/oom_score_adj; echo 0 >/proc/self/oom_score_adj && echo lowered"


def test_oom_scores_are_equal_in_all_sandboxes(data_dir: Path) -> None:
    """Agents' processes are ended first, and can be on a level with pid 1 at most, however their sandbox began."""

    async def test(driver: LocalDriver) -> None:
        sandbox = await driver.start(SPEC)
        await run(sandbox, "x=1; echo x > x")
        files = await sandbox.freeze()
        await run(sandbox, "sleep 1000 &")
        live = await sandbox.freeze()
        for box in (
            await driver.start(SPEC),
            await driver.restore(SPEC, files),
            await driver.restore(SPEC, live),
            sandbox,
        ):
            assert (await run(box, SCORES)).out == "500\n0\nlowered\n"
            assert (await run(box, SCORES, session="other")).out == "500\n0\nlowered\n"
            assert (await ran(box, "bash", "-c", SCORES, cwd="/")).out == b"500\n0\nlowered\n"

    driven(data_dir, test)


def _locker(lock: str, mapped: str) -> str:
    """Return a command that leaves a program which locks a file and maps one, and waits for that."""
    program = (
        "import fcntl, mmap, os, time\n"
        "for name in ('a', 'b'): open(name, 'w').write('x' * 4096)\n"
        "os.link('a', 'c')\n"
        f"l = open('a', 'r+'); {lock}\n"
        f"m = open('{mapped}', 'r+'); p = mmap.mmap(m.fileno(), 4096)\n"
        "open('ready', 'w'); time.sleep(1000)"
    )
    return f'python3 -c "{program}" & until [ -e ready ]; do sleep .01; done'


POSIX, FLOCK = "fcntl.lockf(l, fcntl.LOCK_EX)", "fcntl.flock(l, fcntl.LOCK_EX)"
TRY = "python3 -c \"import fcntl; fcntl.{}(open('a', 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB)\" 2>/dev/null; echo $?"


@pytest.mark.parametrize(("lock", "mapped"), [(POSIX, "a"), (POSIX, "c")])
def test_record_locks_on_mapped_files_are_not_frozen(data_dir: Path, lock: str, mapped: str) -> None:
    """A restored process would not hold them any more. Under another name the file is the same."""

    async def test(driver: LocalDriver) -> None:
        sandbox = await driver.start(SPEC)
        await run(sandbox, _locker(lock, mapped))
        with pytest.raises(NotFreezableError, match="record lock"):
            await sandbox.freeze()

    driven(data_dir, test)


@pytest.mark.parametrize(("lock", "mapped"), [(POSIX, "b"), (FLOCK, "a")])
def test_other_locks_come_back(data_dir: Path, lock: str, mapped: str) -> None:
    async def test(driver: LocalDriver) -> None:
        sandbox = await driver.start(SPEC)
        await run(sandbox, _locker(lock, mapped).replace("os.link", "print"))
        restored = await driver.restore(SPEC, await sandbox.freeze())
        for box in (sandbox, restored):
            assert (await run(box, TRY.format("lockf" if lock == POSIX else "flock"))).out == "1\n"

    driven(data_dir, test)


def test_a_transaction_on_a_write_ahead_log_is_not_frozen(data_dir: Path) -> None:
    """A second writer is refused beside the first, wherever the rollout goes on; after its end the state is kept."""
    writer = (
        "import os, sqlite3, time\nd = sqlite3.connect('t.db', isolation_level=None)\n"
        "d.execute('pragma journal_mode=wal'); d.execute('create table t(x)'); d.execute('begin immediate')\n"
        "open('ready', 'w')\nwhile os.path.exists('ready'): time.sleep(.01)\nd.execute('commit'); time.sleep(1000)"
    )
    program = "import sqlite3; sqlite3.connect('t.db', timeout=0).execute('insert into t values(1)')"
    insert = f'python3 -c "{program}" 2>&1 | tail -1'

    async def test(driver: LocalDriver) -> None:
        sandbox = await driver.start(SPEC)
        await run(sandbox, f'python3 -c "{writer}" & until [ -e ready ]; do sleep .01; done')
        with pytest.raises(NotFreezableError, match="record lock"):
            await sandbox.freeze()
        assert "database is locked" in (await run(sandbox, insert)).out

    driven(data_dir, test)


def test_a_machine_that_fails_for_now_does_not_turn_checkpoints_off(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full, or the probe is killed, when CRIU is first needed. Later it is tried again."""
    monkeypatch.setattr(checkpoints, "AGAIN_S", 0.0)

    async def test(driver: LocalDriver) -> None:
        checkpointer = driver.machine.checkpointer
        for place, error in (
            ("_copy_libraries", OSError("no space left")),
            ("_probe_kernel", CriuUntriedError("killed")),
        ):
            with monkeypatch.context() as patch:
                patch.setattr(binary, place, mock.Mock(side_effect=error))
                assert not await checkpointer.is_available()
                assert checkpointer.unavailable_reason == str(error)
        assert await checkpointer.is_available()
        assert checkpointer.unavailable_reason == ""

    driven(data_dir, test)
