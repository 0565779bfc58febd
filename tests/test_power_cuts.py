"""Power is cut at every write: what opens afterwards is consistent, and no rollout receives a wrong answer."""

import asyncio
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests import cut_scenario, layer_cuts
from tests.power_cuts import VARIANTS, Disk, Operation, record

CUTS = 40
"""Cuts of the default run, each with three disks: some 10 s. `python -m bench.power_cuts` makes all of them."""

pytestmark = pytest.mark.skipif(shutil.which("strace") is None, reason="records system calls, which needs strace")


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Return a directory in memory where there is one: each disk is written and synced many times."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as name:
        yield Path(name)


@pytest.fixture(scope="module", params=["process", "power"])
def recorded(request: pytest.FixtureRequest, folder: Path) -> tuple[str, list[Operation]]:
    """Return a durability, and the operations of the scenario with it."""
    data = folder / request.param
    arguments = ["-m", "tests.cut_scenario", str(data), request.param]
    return request.param, record(arguments, data, folder / "trace")


def outcomes(
    operations: Sequence[Operation], durability: str, folder: Path, cuts: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> Counter[str]:
    """Cut the power after so many operations each time, and verify every disk that may be left."""
    cut_scenario.after_reboot(monkeypatch.setattr)
    seen: Counter[str] = Counter()
    for cut in cuts:
        disk = Disk(operations[:cut])
        for variant in VARIANTS:
            with tempfile.TemporaryDirectory(dir=folder) as name:
                disk.build(Path(name) / "data", variant, random.Random(cut))  # noqa: S311 - the same disk each time
                seen += asyncio.run(cut_scenario.verify(Path(name) / "data", durability, disk.answered))
    return seen


def sample(operations: Sequence[Operation]) -> list[int]:
    """Return cuts at equal distances, the last one after all operations."""
    return [round(len(operations) * number / (CUTS - 1)) for number in range(CUTS)]


def test_no_cut_tells_anything_false(
    recorded: tuple[str, list[Operation]], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `power` every rollout continues where its agent saw it; with `process` it does so, or is refused."""
    durability, operations = recorded
    seen = outcomes(operations, durability, folder, sample(operations), monkeypatch)
    assert seen["continued"] > 0
    assert (seen["refused"] > 0) is (durability == "process")


@pytest.mark.parametrize("recorded", ["power"], indirect=True)
@pytest.mark.parametrize("lazy", ["journal", "forkpoint.sqlite-wal"])
def test_a_missing_sync_is_noticed(
    recorded: tuple[str, list[Operation]], folder: Path, monkeypatch: pytest.MonkeyPatch, lazy: str
) -> None:
    """The test can fail: without the syncs of one file, a cut with `power` loses answers that a rollout received."""
    durability, operations = recorded
    kept = [operation for operation in operations if operation.kind != "sync" or not operation.path.startswith(lazy)]
    with pytest.raises(AssertionError, match=r"went back|is unknown|is refused"):
        outcomes(kept, durability, folder, sample(kept), monkeypatch)


def test_no_cut_of_a_layers_commit_gives_other_files(folder: Path) -> None:
    """A layer that passes its check has the files that were committed, and a root state in use is never built again."""
    data, seen = folder / "layers", Counter[str]()
    operations = record(["-m", "tests.layer_cuts", str(data)], data, folder / "trace")
    for cut in range(len(operations) + 1):
        disk = Disk(operations[:cut])
        for variant in VARIANTS:
            with tempfile.TemporaryDirectory(dir=folder) as name:
                disk.build(Path(name) / "data", variant, random.Random(cut))  # noqa: S311 - the same disk each time
                seen += layer_cuts.verify(Path(name) / "data", disk.answered)
    assert min(seen[outcome] for outcome in ("intact", "damaged", "built", "continued")) > 0
