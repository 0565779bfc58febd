"""Record locks on mapped files come back with a checkpoint whose processes stand still between calls."""

import asyncio
from pathlib import Path

import pytest

from sandboxes.driver import Sandbox
from sandboxes.local.driver import LocalDriver
from sandboxes.local.sandbox import LocalSandbox
from sandboxes.spec import EnvironmentSpec
from tests.machine import require_criu
from tests.sandboxes.box import run, with_local

READER = """
import os, sqlite3, sys, threading, time
d = sqlite3.connect('t.db', isolation_level=None)
d.execute('pragma journal_mode=wal'); d.execute('create table t(x)'); d.execute('insert into t values(1)')
d.execute('begin'); d.execute('select * from t').fetchall()
open('ready', 'w')
for n in range(1, 100):
    while not os.path.exists('ask.%d' % n): time.sleep(.01)
    if n == 2: d.execute('commit')
    with open('said', 'w') as f: f.write(repr(d.execute('select count(*) from t').fetchall()))
    os.rename('said', 'answer.%d' % n)
"""
PROBE = """
import fcntl, os, sqlite3, struct
def holders(name):
    out = []
    with open(name, 'r+b') as f:
        at = 0
        while at < 1 << 31:
            lock = fcntl.fcntl(f, fcntl.F_GETLK, struct.pack('hhqqi4x', fcntl.F_WRLCK, 0, at, 0, 0))
            kind, _, begin, length, pid = struct.unpack('hhqqi4x', lock)
            if kind == fcntl.F_UNLCK: break
            out.append((kind, begin, length, pid))
            if not length: break
            at = begin + length
    return out
print(holders('t.db'), holders('t.db-shm'))
d = sqlite3.connect('t.db', timeout=0, isolation_level=None)
d.execute('insert into t values(2)')
print(d.execute('pragma wal_checkpoint(truncate)').fetchall())
"""
SPEC = EnvironmentSpec(live="frozen_between_calls", files={"/root/reader.py": READER, "/root/probe.py": PROBE})

pytestmark = pytest.mark.usefixtures("_criu")


@pytest.fixture(scope="module")
def _criu() -> None:
    require_criu()


def asked(number: int) -> str:
    return f"touch ask.{number}; until [ -e answer.{number} ]; do sleep .01; done; cat answer.{number}"


def test_an_open_database_keeps_its_locks(data_dir: Path) -> None:
    """A reader of a write-ahead log goes on in restored sandboxes, and others there meet its locks as they did."""

    async def test(driver: LocalDriver) -> None:
        live = await driver.start(SPEC)
        assert (await run(live, "python3 reader.py & until [ -e ready ]; do sleep .01; done")).err == ""
        frozen = await live.freeze()
        assert frozen.kind == "processes"
        first = await driver.restore(SPEC, frozen)
        again = await driver.restore(SPEC, await first.freeze())
        boxes = (live, first, again)
        met = [(await run(box, "python3 probe.py")).printed for box in boxes]
        assert met[0][0].count("(0, ") >= 3, met[0]
        assert met == [met[0]] * 3
        for number, count in ((1, 1), (2, 2)):
            assert [(await run(box, asked(number))).out for box in boxes] == [f"[({count},)]"] * 3

    with_local(data_dir, test)


BLOCKED = """
import fcntl, mmap, os, queue, sys, threading, time
file = open('locked', 'w+b'); file.write(b'x' * 4096); file.flush()
memory = mmap.mmap(file.fileno(), 4096)
fcntl.lockf(file, fcntl.LOCK_EX, 10, 20)
kind, told, waiting = sys.argv[1], [], queue.Queue()
def sleep():
    begun = time.monotonic(); time.sleep(2.5); told.append(2.4 < time.monotonic() - begun)
def wait():
    told.append(waiting.get())
threads = [threading.Thread(target=act) for act in (sleep, wait)]
for thread in threads: thread.start()
open('ready.' + kind, 'w')
if kind == 'pipe':
    told.append(open('fifo').read())
elif kind == 'sleep':
    sleep()
else:
    while not os.path.exists('go'): os.sched_yield()
waiting.put('woken')
for thread in threads: thread.join()
while not os.path.exists('asked'): time.sleep(.01)
open('said', 'w').write(repr(sorted(map(str, told))))
os.rename('said', 'told.' + kind)
"""
LOCK = "python3 -c \"import fcntl; fcntl.lockf(open('locked', 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB, {}, {})\" 2>&1"


@pytest.mark.parametrize(
    ("kind", "go", "told"),
    [
        ("pipe", "echo -n text > fifo", "['True', 'text', 'woken']"),
        ("sleep", ":", "['True', 'True', 'woken']"),
        ("spin", "touch go", "['True', 'woken']"),
        ("stopped", "kill -CONT %1; touch go", "['True', 'woken']"),
    ],
)
def test_what_a_process_waits_for_goes_on(data_dir: Path, kind: str, go: str, told: str) -> None:
    """The process sets its lock again without noticing it, whatever its threads were about, or if it was stopped."""
    spec = SPEC.model_copy(update={"files": {"/root/blocked.py": BLOCKED}})
    stop = "kill -STOP %1;" if kind == "stopped" else ""
    begin = f"mkfifo fifo; python3 blocked.py {kind} > log 2>&1 & until [ -e ready.{kind} ]; do sleep .01; done; {stop}"
    answer = f"touch asked; {go}; until [ -e told.{kind} ]; do sleep .01; done; cat told.{kind} log"

    async def test(driver: LocalDriver) -> None:
        live = await driver.start(spec)
        await run(live, begin)
        first = await driver.restore(spec, await live.freeze())
        for box in (first, await driver.restore(spec, await first.freeze())):
            assert "Resource temporarily unavailable" in (await run(box, LOCK.format(1, 29))).out
            assert (await run(box, LOCK.format(1, 30))).out == ""
            assert (await run(box, answer)).out == told

    with_local(data_dir, test)


COUNTER = """
import fcntl, mmap, os
file = open('locked', 'w+b'); file.write(b'x' * 4096); file.flush()
memory = mmap.mmap(file.fileno(), 4096)
fcntl.lockf(file, fcntl.LOCK_EX)
fd, n = os.open('count', os.O_CREAT | os.O_RDWR), 0
while True:
    n += 1; os.pwrite(fd, b'%20d' % n, 0)
    if n == 3: open('ready', 'w')
"""


def test_no_process_runs_before_its_first_call(data_dir: Path) -> None:
    """A process that counts as fast as it can has counted no further in any sandbox that was restored."""
    spec = SPEC.model_copy(update={"files": {"/root/counter.py": COUNTER}})

    async def counted(box: Sandbox) -> bytes | None:
        assert isinstance(box, LocalSandbox)
        return (await box.entries(["/root/count"], content_bytes=100))["/root/count"].content

    async def test(driver: LocalDriver) -> None:
        live = await driver.start(spec)
        await run(live, "python3 counter.py & until [ -e ready ]; do sleep .01; done")
        frozen = await live.freeze()
        restored = [await driver.restore(spec, frozen) for _ in range(3)]
        counts = [await counted(box) for box in restored]
        await asyncio.sleep(0.1)
        assert [*counts, *[await counted(box) for box in restored]] == [counts[0]] * 6
        await run(restored[0], "sleep .1")
        assert await counted(restored[0]) != counts[0]

    with_local(data_dir, test)


def test_a_session_without_shell_is_restored_beside_frozen_processes(data_dir: Path) -> None:
    """No shell can be started while the anchor stands still; the first call starts it."""

    async def test(driver: LocalDriver) -> None:
        live = await driver.start(SPEC)
        await run(live, "sleep 1000 & exit 3")
        frozen = await live.freeze()
        # Less than the 10 s for which pid 1 waits for a shell.
        async with asyncio.timeout(8):
            restored = await driver.restore(SPEC, frozen)
        assert (await run(restored, "pgrep -c sleep")).out == "1\n"

    with_local(data_dir, test)
