"""The file of positions is complete after a kill, and refused when it is not complete."""

from pathlib import Path

import pytest

from proxy.cluster import positions as module
from proxy.cluster.positions import PositionFile, PositionsLostError
from proxy.cluster.protocol import Position


def test_latest_position_survives(tmp_path: Path) -> None:
    """A file that was not closed, as after a kill, has each rollout's latest position."""
    file = PositionFile(tmp_path / "positions")
    for turn in range(1, 4):
        file.put(7, Position(turn, 100 + turn))
        file.put(8, Position(turn, 200 + turn))
    file.put(7, Position(2, 102))
    file.forget(8)
    # The mapping is not closed: what was copied belongs to the kernel.
    with PositionFile(tmp_path / "positions") as after:
        assert after.get(7) == Position(3, 103)
        assert after.get(8) is None
    file.close()


def test_full_file_is_rewritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full file goes on in a new one, which has what matters."""
    monkeypatch.setattr(module, "_MIN_ENTRIES", 8)
    with PositionFile(tmp_path / "positions") as file:
        for turn in range(1, 100):
            for rollout in range(20):
                file.put(rollout, Position(turn, turn * 1000 + rollout))
    with PositionFile(tmp_path / "positions") as after:
        assert [after.get(rollout) for rollout in range(20)] == [Position(99, 99_000 + n) for n in range(20)]
    assert (tmp_path / "positions").stat().st_size < 3000


def test_half_written_position_is_dropped(tmp_path: Path) -> None:
    """An entry without its checksum was never passed on."""
    path = tmp_path / "positions"
    with PositionFile(path) as file:
        file.put(7, Position(1, 101))
        file.put(7, Position(2, 102))
    data = bytearray(path.read_bytes())
    at = module._START + module._ENTRY_BYTES + module._ENTRY.size
    data[at : at + 4] = bytes(4)
    path.write_bytes(data)
    with PositionFile(path) as after:
        assert after.get(7) == Position(1, 101)


@pytest.mark.parametrize("damage", ["cut", "changed", "restarted"])
def test_incomplete_file_is_refused(tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of a file is used that may lack a position."""
    path = tmp_path / "positions"
    with PositionFile(path) as file:
        file.put(7, Position(1, 101))
        file.put(7, Position(2, 102))
    data = bytearray(path.read_bytes())
    if damage == "cut":
        data = data[:10]
    elif damage == "changed":
        data[module._START] ^= 1
    else:
        monkeypatch.setattr(module, "boot_id", lambda: "another start of the machine")
    path.write_bytes(data)
    with pytest.raises(PositionsLostError):
        PositionFile(path)


def test_synced_file_survives_power_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file whose positions waited for the disk may be used on the next start of the machine."""
    with PositionFile(tmp_path / "positions", sync=True) as file:
        file.put(7, Position(1, 101))
    monkeypatch.setattr(module, "boot_id", lambda: "another start of the machine")
    with PositionFile(tmp_path / "positions", sync=True) as after:
        assert after.get(7) == Position(1, 101)
