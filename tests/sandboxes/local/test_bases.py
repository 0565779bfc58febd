"""Bases: what is built once is complete, also after a loss of power."""

from pathlib import Path

import pytest

from sandboxes.local import bases as module
from sandboxes.local.bases import Bases


def test_a_base_is_on_the_disk_before_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A base that exists is used without another look, so its files must be on the disk before its name is."""
    names: list[list[str]] = []
    monkeypatch.setattr(
        module, "sync_file_system", lambda folder: names.append(sorted(path.name for path in Path(folder).iterdir()))
    )
    Bases(tmp_path, privileged=False).open()
    assert names == [["skeleton-1.part"]]
    Bases(tmp_path, privileged=False).open()
    assert len(names) == 1, "it was built once"
