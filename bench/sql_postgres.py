"""PostgreSQL behind the proxy: reads that cost no clone, hits, and the first write of a rollout.

    python -m bench.sql_postgres

Starts a separate PostgreSQL server (fsync off) with a database of 10 MB, and a proxy. Prints medians of a run.
"""

import json
import os
import statistics
import time
from collections.abc import Callable

import httpx

from forkpoint.ephemeral_proxy import ephemeral_proxy
from tests.sandboxes.postgres_cluster import Cluster, cluster

ROLLOUTS = 12
TEN_MB = """
CREATE TABLE account (id int PRIMARY KEY, owner text, balance numeric(12, 2), note text);
INSERT INTO account SELECT n, 'owner ' || n % 500, n * 1.5, repeat('x', 60) FROM generate_series(1, 20000) n;
CREATE TABLE entry (id serial PRIMARY KEY, account int REFERENCES account, amount numeric(12, 2));
INSERT INTO entry (account, amount) SELECT 1 + n % 20000, n FROM generate_series(1, 60000) n;
CREATE TABLE kind (id int PRIMARY KEY, name text);
INSERT INTO kind SELECT n, 'kind ' || n FROM generate_series(1, 40) n;
"""
JOIN = (
    "SELECT owner, sum(amount) FROM account a JOIN entry e ON e.account = a.id GROUP BY owner ORDER BY 2 DESC LIMIT 5"
)
WRITES = {
    "small table": "UPDATE kind SET name = 'new' WHERE id = {n}",
    "large table": "UPDATE account SET balance = 0 WHERE id = {n}",
    "large insert": "INSERT INTO entry (account, amount) SELECT {n}, n FROM generate_series(1, 1000) n",
}


def query(client: httpx.Client, task: str, rollout: str, sql: str) -> tuple[float, str]:
    """Return the duration of a call in seconds, and its cache status."""
    body = json.dumps({"sql": sql}).encode()
    began = time.perf_counter()
    answer = client.post(f"/t/{task}/r/{rollout}/sql/query", content=body)
    seconds = time.perf_counter() - began
    answer.raise_for_status()
    assert answer.json()["error"] is None, answer.text
    return seconds, answer.headers["cache-status"]


def median_ms(samples: list[float]) -> str:
    ordered = sorted(samples)
    return f"median {statistics.median(ordered) * 1e3:7.2f} ms   p95 {ordered[int(len(ordered) * 0.95)] * 1e3:7.2f} ms"


def timed(times: int, once: Callable[[int], float]) -> list[float]:
    return [once(number) for number in range(times)]


def measure(running: Cluster, client: httpx.Client) -> None:
    def clones() -> int:
        return sum("_fork_" in name or "_spare_" in name for name in running.ours())

    def settle() -> None:
        # Spare clones are made while the model thinks.
        time.sleep(1.5)

    databases = {"main": {"dsn": running.dsn, "source": "bank"}}
    client.put("/api/v1/tasks/bank", json={"driver": "postgres", "databases": databases}).raise_for_status()
    client.put("/api/v1/tasks/shell", json={"driver": "local"}).raise_for_status()
    query(client, "bank", "warm-up", "SELECT 1")
    settle()
    before = clones()
    misses = timed(30, lambda n: query(client, "bank", f"read-{n}", f"{JOIN.replace('LIMIT 5', f'LIMIT {n + 10}')}")[0])
    settle()
    print(f"read, miss (join over 60,000 rows)   {median_ms(misses)}   clones made: {clones() - before}")
    hits = timed(2000, lambda n: query(client, "bank", f"hit-{n % 50}", JOIN)[0])[100:]
    print(f"read, hit                            {median_ms(hits)}")

    def shell_hit(number: int) -> float:
        began = time.perf_counter()
        client.post(f"/t/shell/r/r{number % 50}/shell/exec", content=b'{"command": "echo hi"}').raise_for_status()
        return time.perf_counter() - began

    shell = timed(2000, shell_hit)[100:]
    print(f"shell, hit (local driver)            {median_ms(shell)}")
    ratio = statistics.median(hits) / statistics.median(shell)
    print(f"sql hit / shell hit                  {ratio:.2f}")
    for name, sql in WRITES.items():
        samples = []
        for number in range(ROLLOUTS):
            settle()
            # Every rollout writes different rows, so that none of them hits.
            statement = sql.format(n=number + 1)
            samples.append(query(client, "bank", f"{name}-{number}".replace(" ", "-"), statement)[0])
        print(f"first write, warm clone, {name:12}{median_ms(samples)}")
    query(client, "bank", "second", WRITES["small table"].format(n=39))
    again = timed(20, lambda n: query(client, "bank", "second", f"UPDATE kind SET name = 'n{n}' WHERE id = 8")[0])
    print(f"later writes of a rollout            {median_ms(again)}")


def main() -> None:
    """Run the benchmark."""
    os.environ["FORKPOINT_DRIVERS"] = '["postgres", "local"]'
    with cluster() as running:
        running.create("bank", TEN_MB)
        with running.connect() as connection:
            row = connection.execute("SELECT pg_database_size('bank'), version()").fetchone()
        assert row is not None
        print(f"database of {row[0] / 1e6:.1f} MB, {row[1].split(' on ')[0]}, {os.cpu_count()} cores")
        with ephemeral_proxy() as proxy, httpx.Client(base_url=proxy.url, timeout=60) as client:
            measure(running, client)


if __name__ == "__main__":
    main()
