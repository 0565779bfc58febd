"""Images are restored as they were sealed, or not at all."""

from pathlib import Path

import pytest

from snapshots.criu import image_digest


def sealed(images: Path) -> None:
    (images / "pages-1.img").write_bytes(b"memory" * 1000)
    (images / "core-1.img").write_bytes(b"registers")
    (images / image_digest.NOTED).write_text("{}")
    image_digest.seal(images)
    assert image_digest.is_whole(images)


def test_a_flipped_bit_is_noticed(tmp_path: Path) -> None:
    sealed(tmp_path)
    content = bytearray((tmp_path / "pages-1.img").read_bytes())
    content[3000] ^= 1
    (tmp_path / "pages-1.img").write_bytes(content)
    assert not image_digest.is_whole(tmp_path)


@pytest.mark.parametrize("name", ["pages-1.img", image_digest.NOTED, "digests.json"])
def test_a_missing_file_is_noticed(tmp_path: Path, name: str) -> None:
    sealed(tmp_path)
    (tmp_path / name).unlink()
    assert not image_digest.is_whole(tmp_path)


def test_files_of_a_restore_do_not_count(tmp_path: Path) -> None:
    sealed(tmp_path)
    (tmp_path / "stats-restore").write_bytes(b"x")
    assert image_digest.is_whole(tmp_path)
