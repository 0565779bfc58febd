"""Bases: what is built once is complete, also after a loss of power, and what was changed since is built again."""

import tarfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import pytest

from sandboxes.images import built_trees as module
from sandboxes.images.store import Images
from sandboxes.local.bases import Bases
from sandboxes.spec import EnvironmentSpec
from tests.sandboxes.damaged_files import flip


def bases_of(data_dir: Path) -> Bases:
    return Bases(data_dir, Images(data_dir / "images"), privileged=False)


def test_a_base_is_on_the_disk_before_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A base that exists is used without another look, so its files must be on the disk before its name is."""
    names: list[list[str]] = []
    monkeypatch.setattr(
        module, "sync_file_system", lambda folder: names.append(sorted(path.name for path in Path(folder).iterdir()))
    )
    bases_of(tmp_path).open()
    assert names == [["skeleton-2.part"]]
    bases_of(tmp_path).open()
    assert len(names) == 1, "it was built once"


def packed(path: Path) -> Path:
    """Write a tarball with a shell, and a file that is as good as one."""
    with tarfile.open(path, "w") as tar:
        for name in ("bin/bash", "etc/answer"):
            member = tarfile.TarInfo(name)
            member.size = 5
            tar.addfile(member, BytesIO(b"alpha"))
    return path


@pytest.mark.parametrize(
    "damage",
    [lambda base: flip(base / "etc/answer"), lambda base: (base / "etc/answer").unlink(),
     lambda base: (base.parent / f"{base.name}.digest").unlink()],
    ids=["a byte", "a file", "its digest"],
)  # fmt: skip
def test_a_damaged_base_is_unpacked_again(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    """A new process reads a base once, and trusts it from then on."""
    tarball = packed(tmp_path / "root.tar")

    def opened() -> tuple[Bases, Path]:
        bases = bases_of(tmp_path / "data")
        bases.open()
        return bases, Path(bases.refresh(EnvironmentSpec(base=str(tarball))).lowers[0])

    _, folder = opened()
    inode = folder.stat().st_ino
    assert opened()[1].stat().st_ino == inode, "an intact base stays"
    damage(folder)
    _, again = opened()
    assert again == folder
    assert (folder / "etc/answer").read_bytes() == b"alpha"
