"""Settings and data directories of workers."""

from pathlib import Path

import pytest
from pydantic import SecretStr

from proxy.settings import Settings
from proxy.storage.data_dir import STORE, WORKERS, require_undivided
from proxy.storage.errors import StoreError
from proxy.workers.division import claim, settings_of
from sandboxes.errors import ForbiddenSourceError


def test_workers_share_the_limits_of_the_machine(tmp_path: Path) -> None:
    settings = Settings(
        data=tmp_path, workers=4, max_sandboxes=64, snapshot_bytes=1000, postgres_spares=2,
        checkpoint_dir=tmp_path / "images", max_requests=2, warm_sandboxes=0,
    )  # fmt: skip
    own = settings_of(settings, 3)
    assert (own.data, own.checkpoint_dir) == (tmp_path / "worker-3", tmp_path / "images" / "worker-3")
    assert (own.max_sandboxes, own.snapshot_bytes) == (16, 250)
    assert (own.postgres_spares, own.max_requests, own.warm_sandboxes) == (1, 1, 0)
    assert own.memory_reserve_bytes == settings.memory_reserve_bytes


def test_no_spec_reaches_another_worker(tmp_path: Path) -> None:
    """It would read the tasks of others there."""
    settings = Settings(data=tmp_path / "data", checkpoint_dir=tmp_path / "images", workers=2)
    rules = settings_of(settings, 0).source_rules
    for path in ("data/worker-0/local", "data/worker-1/forkpoint.sqlite", "data/workers.json", "images/worker-1"):
        with pytest.raises(ForbiddenSourceError):
            rules.real(tmp_path / path, confined=False)
    assert rules.real(tmp_path / "other", confined=False) == str(tmp_path / "other")


def test_workers_are_members_of_their_own(tmp_path: Path) -> None:
    """Each has a name and an address for links, so that the cluster sees as many members."""
    settings = Settings(
        data=tmp_path, workers=2, cluster=SecretStr("postgresql:///x"), cluster_secret=SecretStr("s" * 16), store="/s",
        link="10.0.0.1:7000",
    )  # fmt: skip
    members = [settings_of(settings, number) for number in range(2)]
    assert [member.link for member in members] == ["10.0.0.1:7000", "10.0.0.1:7001"]
    assert len({member.node for member in members}) == 2
    assert settings_of(settings.model_copy(update={"node": "a"}), 1).node == "a-1"


def test_directory_keeps_its_number_of_workers(tmp_path: Path) -> None:
    claim(tmp_path, 3)
    claim(tmp_path, 3)
    with pytest.raises(
        StoreError, match=r"divided between 3 workers, .* Start with --workers 3, or use another --data"
    ):
        claim(tmp_path, 2)
    with pytest.raises(StoreError, match="Start with --workers 3"):
        claim(tmp_path, 1)
    with pytest.raises(StoreError, match=r"worker-0 to .*worker-2"):
        require_undivided(tmp_path)


def test_directory_of_one_store_is_not_divided(tmp_path: Path) -> None:
    """Its tasks would be found by one worker alone, and by none that has them by the rule."""
    claim(tmp_path, 1)
    require_undivided(tmp_path)
    (tmp_path / STORE).touch()
    with pytest.raises(StoreError, match="belongs to a proxy without workers"):
        claim(tmp_path, 2)
    assert not (tmp_path / WORKERS).exists()


@pytest.mark.parametrize("content", [b"", b"[]", b'{"workers": 2}', b'{"workers": 2, "format": 9}'])
def test_unreadable_number_of_workers_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / WORKERS).write_bytes(content)
    with pytest.raises(StoreError, match=WORKERS):
        claim(tmp_path, 2)
