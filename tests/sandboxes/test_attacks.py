"""The attacks of `python -m bench.attacks` on local sandboxes, SQLite and PostgreSQL: nothing gets out."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from bench import attacks, attacks_on_data
from sandboxes.driver import Driver
from tests.machine import require_sandboxes
from tests.sandboxes.box import local_driver
from tests.sandboxes.docker import OnImage
from tests.sandboxes.postgres_cluster import require_postgres

KNOWN = {"queued signals"} if os.geteuid() == 0 else {"queued signals", "processes", *attacks.UNPRIVILEGED}
"""What a sandbox can take from others, as docs/security.md says."""


def through(outcomes: list[attacks_on_data.Outcome]) -> list[attacks_on_data.Outcome]:
    assert outcomes
    return [outcome for outcome in outcomes if not outcome.contained and outcome.name not in KNOWN]


@pytest.mark.parametrize("driver", [local_driver, OnImage])
def test_nothing_gets_out(driver: Callable[[Path], Driver], data_dir: Path) -> None:
    require_sandboxes()
    folder = data_dir / f"attacked-{driver.__name__}"
    folder.mkdir()
    ground = attacks.Ground("", driver, {})
    assert through(asyncio.run(attacks.attack_machine(ground, folder, holders=False))) == []


def test_statements_reach_nothing_of_others(tmp_path: Path) -> None:
    assert through(asyncio.run(attacks_on_data.attack_sqlite(tmp_path))) == []


def test_statements_on_a_server_reach_nothing_of_others(tmp_path: Path) -> None:
    require_postgres()
    assert through(asyncio.run(attacks_on_data.attack_postgres(tmp_path))) == []
