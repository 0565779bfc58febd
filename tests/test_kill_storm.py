"""SIGKILL of sandboxes, the proxy and dockerd under load: no wrong answer, and nothing left behind. See `storm`."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.dockerd import dockerd
from tests.machine import data_directory, require_sandboxes, served
from tests.sandboxes.docker import make_bash_image, require_docker
from tests.storm import Storm


@pytest.fixture
def folder() -> Iterator[Path]:
    with data_directory() as made:
        yield made


def seed() -> int:
    chosen = int.from_bytes(os.urandom(3), "big")
    print(f"seed {chosen}")
    return chosen


def assert_nothing_wrong_or_left(storm: Storm) -> None:
    storm.run()
    assert storm.wrong == []
    assert storm.given_up == []
    assert storm.kills.total() > 0
    assert storm.leftovers(after_s=60.0) == []


def test_kill_storm_changes_no_answer(folder: Path) -> None:
    require_sandboxes()
    with served(folder) as proxy:
        assert_nothing_wrong_or_left(Storm(proxy, None, {"local": 40}, seed(), every_s=0.5))


def test_kill_storm_of_docker_changes_no_answer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The image is one of Docker's, whose directories sandboxes use; dockerd is killed and restarted too."""
    require_sandboxes()
    require_docker()
    with dockerd() as daemon:
        monkeypatch.setenv("DOCKER_HOST", daemon.host)
        make_bash_image()
        with served(folder, drivers=json.dumps(["local"]), max_sandboxes="16") as proxy:
            storm = Storm(proxy, daemon, {"image": 15}, seed(), every_s=1.0, tasks=2)
            assert_nothing_wrong_or_left(storm)
