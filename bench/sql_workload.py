"""Recorded agents' SQL through a temporary proxy: `python -m bench.sql_workload WORKLOAD.jsonl`.

Compares each answer with the recorded rollout's, which was run again on a separate database, and prints the hit rate:
all tasks on a database share their records. Exits with 1 if an answer differs, or if the databases differ afterwards.
"""

import asyncio
import base64
import hashlib
import math
import sys
import time
from argparse import ArgumentParser
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import orjson
from rich.text import Text

from bench.machine import console, machine, median, table
from forkpoint.ephemeral_proxy import ephemeral_proxy

ROWS = 5000
"""Rows that the recorded runs fetched of each result."""
SHOWN = 5
NO_KEEP = httpx.Limits(max_connections=None)


def read(workload: Path) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in workload.read_bytes().splitlines() if line.strip()]


def expected(call: dict[str, Any]) -> str:
    """Return the recorded output, or its digest if the recording cut it."""
    cut = call.get("executed_output_truncated")
    return f"sha256:{cut['sha256']}" if cut else str(call["executed_output"])


def rendered(answer: dict[str, Any], call: dict[str, Any]) -> str:
    """Return an answer in the format of the recorded runs: rows as Python prints them."""
    if answer["error"] is not None:
        return f"Error executing query: {answer['error']['message']}"
    text = str([tuple(map(python_value, row)) for row in answer["rows"]])
    cut = call.get("executed_output_truncated")
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}" if cut else text


def python_value(value: Any) -> Any:
    match value:
        case {"base64": text}:
            return base64.b64decode(text)
        case {"float": text}:
            return math.inf if text == "inf" else -math.inf
    return value


class Run:
    """Replays all rollouts, some concurrently, and counts the results."""

    def __init__(self, client: httpx.AsyncClient, folder: Path) -> None:
        self._client, self._folder = client, folder
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[tuple[str, str, str]] = []
        self.seconds: dict[str, list[float]] = {"hit": [], "miss": []}

    async def task(self, name: str, database: str) -> None:
        source = str((self._folder / database).resolve())
        spec = {"driver": "sqlite", "databases": {"main": {"source": source}}}
        (await self._client.put(f"/api/v1/tasks/{safe(name)}", json=spec)).raise_for_status()

    async def rollout(self, recorded: dict[str, Any]) -> None:
        base = f"/t/{safe(recorded['task'])}/r/{safe(recorded['rollout'])}/sql/query"
        for call in recorded["calls"]:
            sql = call.get("sqlite_query") or call["args"]["query"]
            began = time.perf_counter()
            answer = await self._client.post(base, json={"sql": sql, "max_rows": ROWS, "timeout_s": 30})
            took = time.perf_counter() - began
            answer.raise_for_status()
            kind = "hit" if "; hit" in answer.headers["cache-status"] else "miss"
            self.outcomes[kind] += 1
            self.seconds[kind].append(took)
            got, wanted = rendered(answer.json(), call), expected(call)
            if got != wanted:
                self.wrong.append((sql, wanted, got))


def safe(name: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in name)


async def walk(url: str, recorded: list[dict[str, Any]], folder: Path, at_once: int) -> tuple[Run, dict[str, Any]]:
    async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False, limits=NO_KEEP) as client:
        run = Run(client, folder)
        for name, database in {rollout["task"]: rollout["db"] for rollout in recorded}.items():
            await run.task(name, database)
        left = iter(recorded)

        async def worker() -> None:
            for rollout in left:
                await run.rollout(rollout)

        await asyncio.gather(*(worker() for _ in range(at_once)))
        stats: dict[str, Any] = (await client.get("/api/v1/stats")).json()
        return run, stats


def digests(folder: Path) -> dict[str, str]:
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.rglob("*.sqlite*"))}


def show(run: Run, stats: dict[str, Any], recorded: list[dict[str, Any]], *, same: bool) -> None:
    calls = sum(run.outcomes.values())
    rows = table("Recorded SQL through the proxy", "", "value")
    for name, value in (
        ("tasks / rollouts / calls", f"{len({r['task'] for r in recorded})} / {len(recorded)} / {calls}"),
        ("answers equal to the recorded ones", f"{calls - len(run.wrong)} of {calls}"),
        ("hit rate", f"{run.outcomes['hit'] / calls:.1%}"),
        ("median of a hit / of a miss", " / ".join(f"{median(s) * 1e3:.2f} ms" for s in run.seconds.values())),
        ("replayed calls / divergences", f"{stats['replayed_calls']} / {stats['divergences']}"),
        ("source databases unchanged", "yes" if same else "NO"),
    ):
        rows.add_row(name, value)
    console.print(rows)
    for sql, wanted, got in run.wrong[:SHOWN]:
        console.print(Text(f"{sql}\n  recorded {wanted[:200]}\n  answered {got[:200]}", style="red"))


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workload", type=Path, help="JSONL file next to its databases")
    parser.add_argument("--rollouts", type=int, default=8, help="concurrent rollouts")
    parser.add_argument("--limit", type=int, help="maximum number of rollouts")
    options = parser.parse_args()
    recorded, folder = read(options.workload)[: options.limit], options.workload.parent
    before = digests(folder)
    console.print(machine())
    with ephemeral_proxy() as proxy:
        run, stats = asyncio.run(walk(proxy.url, recorded, folder, options.rollouts))
    same = digests(folder) == before
    show(run, stats, recorded, same=same)
    sys.exit(1 if run.wrong or not same else 0)


if __name__ == "__main__":
    main()
