"""The shims in examples/ work in the frameworks that they are for, unmodified, on a real proxy."""

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.agents.clients import packages, run
from tests.agents.serving import Proxy, real_proxy
from tests.machine import require_sandboxes

ROOT = Path(__file__).parents[2]
SKYRL = ("skyrl-gym==0.4.0", "func_timeout==4.3.5", "--no-binary=func_timeout")
"""One of what it needs is on the index as source only."""


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    require_sandboxes()
    with real_proxy() as running:
        yield running


def group(place: Path, which: str, proxy: Proxy, folder: Path) -> tuple[list[Any], list[list[str]]]:
    """Return what the rollouts of a group saw, and how their calls were answered."""
    seen = run(place, "shim_client.py", which, proxy.url, str(folder), PYTHONPATH=f"{place}:{ROOT}")
    [task] = proxy.client.get("/api/v1/tasks").json()["items"]
    rows = proxy.client.get(f"/api/v1/tasks/{task['task']}/rollouts").json()["items"]
    return seen, [proxy.outcomes(task["task"], row["rollout"]) for row in rows]


def test_skyrl_environments_share_queries(proxy: Proxy, tmp_path: Path) -> None:
    """The second environment runs no query, and the third one its last. Statements that write stay in the trainer."""
    folder = tmp_path / "spider" / "database" / "shop"
    folder.mkdir(parents=True)
    with sqlite3.connect(folder / "shop.sqlite") as database:
        database.executescript("CREATE TABLE t (x); INSERT INTO t VALUES (1), (2);")
    database.close()
    seen, outcomes = group(packages("omegaconf", "pandas", "requests", "httpx", bare=SKYRL), "skyrl", proxy, tmp_path)
    (first, error, written, drawn), reward = seen[0]
    reminder = "<reminder>You have 4 turns left to complete the task.</reminder>"
    assert first == f"\n\n<observation> x\n 1\n 2\n{reminder}</observation>\n\n"
    assert "Error executing SQL: no such column: y, db file: " in error
    assert (seen[1], seen[2]) == (seen[0], [[first, error, written, drawn.replace(" 0", " 1")], reward])
    assert reward == 1.0
    assert outcomes == [["miss"] * 3, ["hit"] * 3, ["hit", "hit", "miss"]]


def test_tinker_sandboxes_of_one_folder_share_calls(proxy: Proxy, tmp_path: Path) -> None:
    """Each sandbox is a rollout of one task. The last call runs out of time, which is its
    rollout's alone."""
    place = packages("chz", "aiohttp", "httpx", bare=("tinker-cookbook==0.6.1",))
    seen, outcomes = group(place, "tinker", proxy, tmp_path / "task-1")
    drawn = seen[0][6][0].removesuffix("0\n")
    assert drawn.strip().isdecimal()
    common = [["task-1", 3], ["/tmp\n\n", 0], ["", 0], ["ra", 0], ["#!/bin/ba", 0], ["", 1]]
    assert seen == [[*common, [f"{drawn}{last}\n", 0], ["", 124]] for last in (0, 0, 1)]
    assert [calls[:-1] for calls in outcomes] == [["miss"] * 7, ["hit"] * 7, ["hit"] * 6 + ["miss"]]
