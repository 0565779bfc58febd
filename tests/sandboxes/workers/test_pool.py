"""Worker processes: confined, replaced when they are lost, and gone when their driver is."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from sandboxes.workers.pool import MAX_READERS, WorkerLostError, WorkerPool, WorkerStuckError
from tests.machine import wait_until
from tests.sandboxes.box import needs_root

Test = Callable[[WorkerPool], Awaitable[None]]
ENDLESS = "WITH RECURSIVE n(k) AS (SELECT 1 UNION ALL SELECT k + 1 FROM n) SELECT count(*) FROM n"


def crewed(tmp_path: Path, test: Test) -> None:
    async def go() -> None:
        (tmp_path / "tmp").mkdir()
        worker_pool = WorkerPool("sqlite", tmp_path)
        await worker_pool.open()
        try:
            await test(worker_pool)
        finally:
            await worker_pool.aclose()

    asyncio.run(go())


def query(sql: str, place: str, *, timeout_s: float = 5.0, **limits: int) -> dict[str, Any]:
    """Return a request that an engine answers; place is a database file."""
    arguments = {"sql": sql, "params": None, "max_rows": 10, "timeout_s": timeout_s, "format": "json"}
    at = {"key": place, "path": place, "frames": 0, "settings": {}, "counted": False}
    return {
        "op": "run", "tool": "query", "arguments": arguments, "state": at, "frozen_ms": None, "seed": "",
        "output_bytes": 1 << 20, "limits": {"memory_mb": 256, "disk_mb": 64} | limits,
    }  # fmt: skip


def empty(tmp_path: Path) -> str:
    path = tmp_path / "empty.db"
    path.touch()
    return str(path)


def test_a_worker_answers_one_request_after_another(tmp_path: Path) -> None:
    async def test(worker_pool: WorkerPool) -> None:
        worker = await worker_pool.dedicated()
        for number in range(3):
            answer = await worker.request(query(f"SELECT {number}", empty(tmp_path)), timeout_s=5)
            assert f"[[{number}]]".encode() in answer.body
        assert worker.alive
        await worker.close()
        assert not worker.alive

    crewed(tmp_path, test)


def test_how_a_worker_ended_is_told(tmp_path: Path) -> None:
    async def test(worker_pool: WorkerPool) -> None:
        for number, cause in ((signal.SIGKILL, "killed"), (signal.SIGSEGV, "crashed"), (signal.SIGTERM, "crashed")):
            worker = await worker_pool.dedicated()
            asking = asyncio.ensure_future(worker.request(query(ENDLESS, empty(tmp_path)), timeout_s=5))
            await asyncio.sleep(0.05)
            os.kill(worker.pid, number)
            with pytest.raises(WorkerLostError) as lost:
                await asking
            assert lost.value.cause == cause
        worker = await worker_pool.dedicated()
        with pytest.raises(WorkerLostError) as lost:
            await worker.request({"op": "run", "tool": "query"}, timeout_s=5)
        assert lost.value.cause == "defect"

    crewed(tmp_path, test)


def test_a_query_that_needs_more_memory_than_it_may_have_ends_its_worker(tmp_path: Path) -> None:
    async def test(worker_pool: WorkerPool) -> None:
        worker = await worker_pool.dedicated()
        greedy = "WITH RECURSIVE n(k) AS (SELECT 1 UNION ALL SELECT k + 1 FROM n LIMIT 100) "
        greedy += "SELECT group_concat(hex(zeroblob(4000000))) FROM n"
        with pytest.raises(WorkerLostError) as lost:
            await worker.request(query(greedy, empty(tmp_path), memory_mb=16), timeout_s=10)
        assert lost.value.cause == "memory"

    crewed(tmp_path, test)


def test_a_worker_that_does_not_answer_is_killed(tmp_path: Path) -> None:
    async def test(worker_pool: WorkerPool) -> None:
        worker = await worker_pool.dedicated()
        began = time.monotonic()
        os.kill(worker.pid, signal.SIGSTOP)
        with pytest.raises(WorkerStuckError):
            await worker.request(query("SELECT 1", empty(tmp_path)), timeout_s=0.1)
        assert time.monotonic() - began < 20
        assert not Path(f"/proc/{worker.pid}").exists()  # noqa: ASYNC240 - one look

    crewed(tmp_path, test)


def test_a_caller_that_leaves_takes_its_worker_with_it_and_no_other(tmp_path: Path) -> None:
    async def test(worker_pool: WorkerPool) -> None:
        async with worker_pool.reader() as worker:
            asking = asyncio.ensure_future(worker.request(query(ENDLESS, empty(tmp_path)), timeout_s=5))
            await asyncio.sleep(0.05)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            assert not worker.alive
        async with worker_pool.reader() as other:
            assert b"[[7]]" in (await other.request(query("SELECT 7", empty(tmp_path)), timeout_s=5)).body

    crewed(tmp_path, test)


def test_readers_are_shared_and_few_stay(tmp_path: Path) -> None:
    async def test(worker_pool: WorkerPool) -> None:
        async def read() -> int:
            async with worker_pool.reader() as worker:
                await worker.request(query("SELECT 1", empty(tmp_path)), timeout_s=5)
                return len(worker_pool.workers)

        assert max(await asyncio.gather(*(read() for _ in range(50)))) <= MAX_READERS
        assert len(worker_pool.workers) <= max(2, os.cpu_count() or 2)
        await worker_pool.renew()
        assert not worker_pool.workers

    crewed(tmp_path, test)


def rights_of(pid: int) -> dict[str, str]:
    folder = Path(f"/proc/{pid}")
    lines = (folder / "status").read_text().splitlines()
    told = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    return told | {"net": str((folder / "ns/net").readlink()), "environ": (folder / "environ").read_text()}


@needs_root
def test_a_worker_reaches_no_file_outside_its_room_and_no_network(tmp_path: Path) -> None:
    async def test(worker_pool: WorkerPool) -> None:
        assert worker_pool.confined
        worker = await worker_pool.dedicated()
        rights = rights_of(worker.pid)
        assert (rights["NoNewPrivs"], rights["Seccomp"], int(rights["CapEff"], 16)) == ("1", "2", 2)
        assert len(rights["environ"].strip("\0").split("\0")) <= 4
        assert rights["net"] != rights_of(os.getpid())["net"]
        with pytest.raises(WorkerLostError, match=r"denied|unable to open"):
            await worker.request(query("SELECT 1", "/etc/hostname"), timeout_s=5)

    crewed(tmp_path, test)


def test_a_killed_zygote_is_replaced(tmp_path: Path) -> None:
    async def test(worker_pool: WorkerPool) -> None:
        worker = await worker_pool.dedicated()
        parent = int(Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()[1])  # noqa: ASYNC240
        os.kill(parent, signal.SIGKILL)
        await asyncio.to_thread(
            wait_until, lambda: not worker.alive or not Path(f"/proc/{worker.pid}").exists(), "dies"
        )
        other = await worker_pool.dedicated()
        assert b"[[1]]" in (await other.request(query("SELECT 1", empty(tmp_path)), timeout_s=5)).body

    crewed(tmp_path, test)


def test_nothing_runs_on_when_the_driver_s_process_is_killed(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    program = f"""
import asyncio
from pathlib import Path
from sandboxes.workers.pool import WorkerPool
async def main():
    worker_pool = WorkerPool("sqlite", Path({str(tmp_path)!r}))
    await worker_pool.open()
    print(*[(await worker_pool.dedicated()).pid for _ in range(3)], flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
    driver = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=Path.cwd())
    assert driver.stdout is not None
    pids = [int(word) for word in driver.stdout.readline().split()]
    assert len(pids) == 3
    driver.kill()
    driver.wait()
    driver.stdout.close()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "a worker runs on", within_s=10)
