"""Record locks on mapped files come back with a checkpoint whose processes stand still between calls."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from sandboxes.local.driver import LocalDriver
from sandboxes.spec import EnvironmentSpec
from tests.machine import require_criu
from tests.sandboxes.box import local_driver, opened, run

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


def driven(data_dir: Path, test: Callable[[LocalDriver], Awaitable[None]]) -> None:
    async def go() -> None:
        async with opened(local_driver(data_dir)) as driver:
            assert isinstance(driver, LocalDriver)
            await test(driver)

    asyncio.run(go())


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

    driven(data_dir, test)
