"""Files that are replaced as a whole."""

import stat
from pathlib import Path

import pytest

from sandboxes.linux.files import write_whole


@pytest.mark.parametrize("sync", [False, True])
def test_file_is_replaced_for_its_owner_only(tmp_path: Path, *, sync: bool) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(b"old")
    (tmp_path / "file.json.part").write_bytes(b"left by a kill, and longer")
    write_whole(path, b"new", sync=sync)
    assert path.read_bytes() == b"new"
    write_whole(tmp_path / "first", b"a secret", sync=sync)
    assert stat.S_IMODE((tmp_path / "first").stat().st_mode) == 0o600
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file.json", "first"]
