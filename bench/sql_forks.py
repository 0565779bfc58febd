"""The cost of SQLite rollouts: `python -m bench.sql_forks [--gb 1] [--dir DIR]`.

Measures 64 rollouts that read a large database, compared with one: disk and memory of the whole proxy. Then the first
write of a rollout on 100 MB, and a hit compared with a hit of a shell call.
"""

import asyncio
import os
import shutil
import sqlite3
import tempfile
import time
from argparse import ArgumentParser
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from bench.machine import console, median, table
from forkpoint.ephemeral_proxy import EphemeralProxy, ephemeral_proxy
from sandboxes.calls import ToolCall
from sandboxes.spec import Database, EnvironmentSpec
from sandboxes.sqlite.driver import SqliteDriver
from sandboxes.sqlite.file_clone import clone, hold

ROLLOUTS = 64
ROW_BYTES = 1000
WRITES = 30
HITS = 500
QUERY: dict[str, Any] = {"params": None, "max_rows": 100, "timeout_s": 60.0, "format": "json", "database": "main"}


def make_database(path: Path, size_bytes: int) -> Path:
    """Make a database of about this size: a table of incompressible rows."""
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA journal_mode = OFF").fetchall()
    connection.execute("PRAGMA synchronous = OFF")
    connection.execute("CREATE TABLE item (id INTEGER PRIMARY KEY, text TEXT)")
    numbers = "WITH RECURSIVE n(k) AS (SELECT 1 UNION ALL SELECT k + 1 FROM n WHERE k < ?) "
    fill = f"INSERT INTO item {numbers} SELECT k, hex(randomblob({ROW_BYTES // 2})) FROM n"
    connection.execute(fill, (size_bytes // (ROW_BYTES + 50),))
    connection.commit()
    connection.close()
    return path


# -- 64 readers beside one --------------------------------------------------------------------------------------------


def memory_bytes(pid: int) -> int:
    """Return the memory of a process and its descendants; shared memory counts once."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    own = next(int(line.split()[1]) << 10 for line in rollup.splitlines() if line.startswith("Pss:"))
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return own + sum(memory_bytes(int(child)) for child in children)


def disk_bytes(folder: Path) -> int:
    files = {(status.st_dev, status.st_ino): status.st_blocks * 512 for status in map(Path.stat, folder.rglob("*"))}
    return sum(files.values())


@dataclass(frozen=True, slots=True)
class Readers:
    """Disk and memory of a proxy with a number of readers, and the duration of each read."""

    memory_bytes: int
    disk_bytes: int
    seconds: list[float]


def read_alike(database: Path, rollouts: int) -> Readers:
    """Let each rollout read different rows."""

    async def go(proxy: EphemeralProxy) -> list[float]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=proxy.url, timeout=600, trust_env=False, limits=limits) as client:
            spec = {"driver": "sqlite", "databases": {"main": {"source": str(database)}}}
            (await client.put("/api/v1/tasks/reads", json=spec)).raise_for_status()

            async def read(number: int) -> list[float]:
                took = []
                for turn in range(4):
                    sql = f"SELECT count(*), max(text) FROM item WHERE id BETWEEN {turn * 1000 + number} AND 60000"
                    began = time.perf_counter()
                    answer = await client.post(f"/t/reads/r/r{number}/sql/query", json={"sql": sql, "timeout_s": 60})
                    took.append(time.perf_counter() - began)
                    assert answer.json()["error"] is None, answer.text
                return took

            return [seconds for each in await asyncio.gather(*map(read, range(rollouts))) for seconds in each]

    with ephemeral_proxy() as proxy:
        took = asyncio.run(go(proxy))
        data = Path(os.readlink(f"/proc/{proxy.pid}/fd/1")).parent / "data"  # noqa: PTH115 - not a path of ours
        return Readers(memory_bytes(proxy.pid), disk_bytes(data), took)


def show_readers(folder: Path, gigabytes: float) -> None:
    database = make_database(folder / "large.db", int(gigabytes * (1 << 30)))
    one, many = read_alike(database, 1), read_alike(database, ROLLOUTS)
    size = database.stat().st_size >> 20
    rows = table(f"Reading one database of {size} MB", "", "1 rollout", f"{ROLLOUTS} rollouts", "ratio")
    for name, alone, together in (
        ("memory of the proxy and all its processes", one.memory_bytes, many.memory_bytes),
        ("disk of its data directory", one.disk_bytes, many.disk_bytes),
    ):
        rows.add_row(name, f"{alone >> 20} MB", f"{together >> 20} MB", f"{together / alone:.2f}")
    rows.add_row("median of a read", *(f"{median(run.seconds) * 1e3:.0f} ms" for run in (one, many)), "")
    console.print(rows)
    database.unlink()


# -- the first write --------------------------------------------------------------------------------------------------


async def first_writes(folder: Path, database: Path) -> list[float]:
    """Return the seconds of the first write of many rollouts, including fork and worker."""
    driver = SqliteDriver(folder / "data")
    await driver.open()
    try:
        spec = EnvironmentSpec(driver="sqlite", databases={"main": Database(source=str(database))})
        await driver.identity(spec)
        took = []
        for number in range(WRITES):
            # Spare workers start while the model thinks.
            await asyncio.sleep(0.1)
            sandbox = await driver.start(spec)
            call = ToolCall("sql", "query", QUERY | {"sql": f"INSERT INTO item (text) VALUES ('{number}')"})
            began = time.perf_counter()
            execution = await sandbox.execute(call)
            took.append(time.perf_counter() - began)
            assert execution.effect
            await sandbox.close()
        return took[2:]
    finally:
        await driver.aclose()


def bare_writes(folder: Path, database: Path) -> list[float]:
    """Return the seconds of the same steps with SQLite alone in this process: link, open, write."""
    base = folder / "base.db"
    shutil.copyfile(database, base)
    with sqlite3.connect(base) as connection:
        connection.execute("PRAGMA journal_mode = WAL").fetchall()
    connection.close()
    took = []
    for number in range(WRITES):
        time.sleep(0.1)
        began = time.perf_counter()
        fork = folder / f"fork-{number}.db"
        clone(base, fork)
        lock = hold(fork)
        connection = sqlite3.connect(fork, isolation_level=None)
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute("INSERT INTO item (text) VALUES ('x')")
        took.append(time.perf_counter() - began)
        connection.close()
        os.close(lock)
    return took[2:]


def show_writes(folder: Path, size_mb: int) -> None:
    database = make_database(folder / "small.db", size_mb << 20)
    rows = table(f"First write of a rollout on {size_mb} MB", "way", "median", "slowest of 28")
    ways = {
        "SQLite alone: link, open, write": bare_writes(folder, database),
        "a rollout": asyncio.run(first_writes(folder, database)),
    }
    for way, took in ways.items():
        rows.add_row(way, f"{median(took) * 1e3:.1f} ms", f"{max(took) * 1e3:.1f} ms")
    shutil.rmtree(folder / "data")
    console.print(rows)


# -- a hit ------------------------------------------------------------------------------------------------------------


def show_hits(folder: Path) -> None:
    database = make_database(folder / "tiny.db", 1 << 20)
    spec = {"driver": "sqlite", "databases": {"main": {"source": str(database)}}}
    calls = {
        "sql": ("/t/s/r/{}/sql/query", {"sql": "SELECT count(*) FROM item"}),
        "shell": ("/t/l/r/{}/shell/exec", {"command": "echo 949"}),
    }
    took: dict[str, list[float]] = {"sql": [], "shell": []}
    with ephemeral_proxy() as proxy, httpx.Client(base_url=proxy.url, timeout=60, trust_env=False) as client:
        client.put("/api/v1/tasks/s", json=spec).raise_for_status()
        client.put("/api/v1/tasks/l", json={"driver": "local"}).raise_for_status()
        for path, body in calls.values():
            client.post(path.format("first"), json=body).raise_for_status()
        for _ in range(HITS):
            for kind, (path, body) in calls.items():
                began = time.perf_counter()
                answer = client.post(path.format("second"), json=body)
                took[kind].append(time.perf_counter() - began)
                assert "hit" in answer.headers["cache-status"]
    rows = table("A hit, one client, request to answer", "endpoint", "median")
    for kind, seconds in took.items():
        rows.add_row(kind, f"{median(seconds) * 1e6:.0f} us")
    console.print(rows)


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gb", type=float, default=1.0, help="size of the shared database in GB")
    parser.add_argument("--dir", type=Path, help="directory of databases and data; default: TMPDIR")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="forkpoint-bench-", dir=options.dir) as folder:
        show_hits(Path(folder))
        show_writes(Path(folder), 100)
        show_readers(Path(folder), options.gb)


if __name__ == "__main__":
    main()
