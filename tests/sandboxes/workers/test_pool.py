"""Worker processes are confined, replaced after a loss, and end with their driver."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from sandboxes.linux import syscalls as kernel
from sandboxes.sqlite.messages import ReadPages, RunTool, SharedState
from sandboxes.workers.messages import SetLimits
from sandboxes.workers.pool import MAX_READERS, WorkerLostError, WorkerPool, WorkerStuckError
from tests.machine import data_directory, wait_until
from tests.rights import BARE_POD, POD, Rights
from tests.sandboxes.box import needs_root
from tests.sandboxes.workers.probe import rights_of

Test = Callable[[WorkerPool], Awaitable[None]]
ENDLESS = "WITH RECURSIVE n(k) AS (SELECT 1 UNION ALL SELECT k + 1 FROM n) SELECT count(*) FROM n"


def with_pool(tmp_path: Path, test: Test) -> None:
    async def go() -> None:
        (tmp_path / "tmp").mkdir()
        pool = WorkerPool("sqlite", tmp_path)
        await pool.open()
        try:
            await test(pool)
        finally:
            await pool.aclose()

    asyncio.run(go())


def query(sql: str, path: str) -> RunTool:
    """Return a request for the SQLite engine, to read a database file."""
    arguments = {"sql": sql, "params": None, "max_rows": 10, "timeout_s": 30.0, "format": "json"}
    state = SharedState(path, path, 0, {}, counted=False)
    return RunTool("query", arguments, 1 << 20, None, b"", state)


def empty(tmp_path: Path) -> str:
    path = tmp_path / "empty.db"
    path.touch()
    return str(path)


def test_worker_answers_several_requests(tmp_path: Path) -> None:
    """A worker serves requests until it is closed."""

    async def test(pool: WorkerPool) -> None:
        worker = await pool.dedicated()
        for number in range(3):
            answer = await worker.ask(query(f"SELECT {number}", empty(tmp_path)), timeout_s=30)
            assert f"[[{number}]]".encode() in answer.body
        assert worker.alive
        await worker.close()
        assert not worker.alive

    with_pool(tmp_path, test)


def test_loss_reports_its_cause(tmp_path: Path) -> None:
    """Kills, crashes and exceptions of the engine are distinguished."""

    async def test(pool: WorkerPool) -> None:
        for number, cause in ((signal.SIGKILL, "killed"), (signal.SIGSEGV, "crashed"), (signal.SIGTERM, "crashed")):
            worker = await pool.dedicated()
            asking = asyncio.ensure_future(worker.ask(query(ENDLESS, empty(tmp_path)), timeout_s=30))
            await asyncio.sleep(0.05)
            os.kill(worker.pid, number)
            with pytest.raises(WorkerLostError) as lost:
                await asking
            assert lost.value.cause == cause
        worker = await pool.dedicated()
        with pytest.raises(WorkerLostError) as lost:
            await worker.ask(ReadPages(), timeout_s=30)
        assert lost.value.cause == "defect"

    with_pool(tmp_path, test)


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_loss_of_zygote_is_no_crash_of_worker(tmp_path: Path) -> None:
    """The kernel kills the workers of a dead zygote; no request is to blame."""

    async def test(pool: WorkerPool) -> None:
        worker = await pool.dedicated()
        asking = asyncio.ensure_future(worker.ask(query(ENDLESS, empty(tmp_path)), timeout_s=30))
        os.kill(parent(worker.pid), signal.SIGKILL)
        with pytest.raises(WorkerLostError) as lost:
            await asking
        assert lost.value.cause == "killed"

    with_pool(tmp_path, test)


def test_memory_limit_ends_the_worker(tmp_path: Path) -> None:
    """A request that exceeds its memory limit is a loss of its own kind."""

    async def test(pool: WorkerPool) -> None:
        worker = await pool.dedicated()
        greedy = "WITH RECURSIVE n(k) AS (SELECT 1 UNION ALL SELECT k + 1 FROM n LIMIT 100) "
        greedy += "SELECT group_concat(hex(zeroblob(4000000))) FROM n"
        with pytest.raises(WorkerLostError) as lost:
            await worker.ask(query(greedy, empty(tmp_path)), limits=SetLimits(16, 64), timeout_s=30)
        assert lost.value.cause == "memory"

    with_pool(tmp_path, test)


def test_silent_worker_is_killed(tmp_path: Path) -> None:
    """A stopped process is killed after the time limit."""

    async def test(pool: WorkerPool) -> None:
        worker = await pool.dedicated()
        began = time.monotonic()
        os.kill(worker.pid, signal.SIGSTOP)
        with pytest.raises(WorkerStuckError):
            await worker.ask(query("SELECT 1", empty(tmp_path)), timeout_s=0.1)
        assert time.monotonic() - began < 20
        assert not Path(f"/proc/{worker.pid}").exists()  # noqa: ASYNC240 - one look

    with_pool(tmp_path, test)


def test_cancelled_request_kills_its_worker_only(tmp_path: Path) -> None:
    """The next caller gets another worker."""

    async def test(pool: WorkerPool) -> None:
        async with pool.reader() as worker:
            asking = asyncio.ensure_future(worker.ask(query(ENDLESS, empty(tmp_path)), timeout_s=30))
            await asyncio.sleep(0.05)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            assert not worker.alive
        async with pool.reader() as other:
            assert b"[[7]]" in (await other.ask(query("SELECT 7", empty(tmp_path)), timeout_s=30)).body

    with_pool(tmp_path, test)


def test_readers_are_limited(tmp_path: Path) -> None:
    """Many calls share few workers, and idle ones beyond the number of cores end."""

    async def test(pool: WorkerPool) -> None:
        async def read() -> int:
            async with pool.reader() as worker:
                await worker.ask(query("SELECT 1", empty(tmp_path)), timeout_s=30)
                return len(pool.workers)

        assert max(await asyncio.gather(*(read() for _ in range(50)))) <= MAX_READERS
        assert len(pool.workers) <= max(2, os.cpu_count() or 2)
        await pool.renew()
        assert not pool.workers

    with_pool(tmp_path, test)


@needs_root
def test_workers_are_confined(tmp_path: Path) -> None:
    """A worker has no capabilities but one, and no files outside its directory."""

    async def test(pool: WorkerPool) -> None:
        assert pool.confined
        worker = await pool.dedicated()
        rights = rights_of(worker.pid)
        assert (rights["NoNewPrivs"], rights["Seccomp"], int(rights["CapEff"], 16)) == ("1", "2", 2)
        assert len(rights["environ"].strip("\0").split("\0")) <= 4
        with pytest.raises(WorkerLostError, match=r"denied|unable to open"):
            await worker.ask(query("SELECT 1", "/etc/hostname"), timeout_s=30)

    with_pool(tmp_path, test)


@needs_root
@pytest.mark.parametrize("rights", [Rights(), POD, BARE_POD, Rights(uid=1000)], ids=["all", "pod", "bare", "user"])
def test_workers_need_no_rights_and_have_no_network(rights: Rights) -> None:
    """With any rights of the proxy they start, are confined to their directory, and can make no socket."""
    with data_directory() as folder:
        (folder / "tmp").mkdir()
        os.chown(folder, rights.uid, rights.uid)
        probe = [sys.executable, "-m", "tests.sandboxes.workers.probe", str(folder)]
        done = subprocess.run([*rights.wrapper, *probe], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    capabilities = hex(rights.keeps("DAC_OVERRIDE") << kernel.CAP_DAC_OVERRIDE)
    assert done.stdout.split() == ["confined", "1", *["EAFNOSUPPORT"] * 4, "EPERM", "EACCES", capabilities]


def test_killed_zygote_is_replaced(tmp_path: Path) -> None:
    """Its workers die with it, and the next request starts another zygote."""

    async def test(pool: WorkerPool) -> None:
        worker = await pool.dedicated()
        parent = int(Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()[1])  # noqa: ASYNC240
        os.kill(parent, signal.SIGKILL)
        await asyncio.to_thread(
            wait_until, lambda: not worker.alive or not Path(f"/proc/{worker.pid}").exists(), "dies"
        )
        other = await pool.dedicated()
        assert b"[[1]]" in (await other.ask(query("SELECT 1", empty(tmp_path)), timeout_s=30)).body

    with_pool(tmp_path, test)


def test_workers_die_with_the_driver(tmp_path: Path) -> None:
    """SIGKILL of the driver ends the zygote and every worker."""
    (tmp_path / "tmp").mkdir()
    program = f"""
import asyncio
from pathlib import Path
from sandboxes.linux import syscalls as kernel
from sandboxes.sqlite.messages import ReadPages, RunTool, SharedState
from sandboxes.workers.messages import SetLimits
from sandboxes.workers.pool import WorkerPool
async def main():
    pool = WorkerPool("sqlite", Path({str(tmp_path)!r}))
    await pool.open()
    print(*[(await pool.dedicated()).pid for _ in range(3)], flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
    driver = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=Path.cwd())
    assert driver.stdout is not None
    pids = [int(pid) for pid in driver.stdout.readline().split()]
    assert len(pids) == 3
    driver.kill()
    driver.wait()
    driver.stdout.close()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "a worker runs on")
