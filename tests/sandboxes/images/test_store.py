"""Images of one folder: each is unpacked once, for all tasks, and completely or not at all."""

import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sandboxes.errors import SpecError
from sandboxes.images import store as module
from sandboxes.images.archives import ImageArchive
from sandboxes.images.store import Image, ImageStore
from tests.sandboxes.damaged_files import flip
from tests.sandboxes.images.image_files import Member, docker_files, folder, laid_out, layer, oci_files, packed

LAYERS = [layer(folder("etc"), Member("etc/answer", "alpha"))]


@pytest.fixture
def images(tmp_path: Path) -> Iterator[ImageStore]:
    yield from opened(tmp_path)


def opened(tmp_path: Path) -> Iterator[ImageStore]:
    images = ImageStore(tmp_path / "images")
    images.open()
    yield images
    images.close()


def test_image_is_unpacked_once_for_all_names(tmp_path: Path, images: ImageStore) -> None:
    """Two files have one image, which is then known by its id too."""
    first = images.resolve(str(packed(tmp_path / "docker.tar", docker_files(LAYERS))))
    inode = Path(first.lowers[0]).stat().st_ino
    assert images.resolve(str(packed(tmp_path / "oci.tar", oci_files(LAYERS)))) == first
    assert images.resolve(str(laid_out(tmp_path / "oci", oci_files(LAYERS)))) == first
    shutil.rmtree(tmp_path / "oci")
    assert images.resolve(first.id) == first
    assert Path(first.lowers[0]).stat().st_ino == inode
    assert Path(first.lowers[0], "etc/answer").read_text() == "alpha"
    assert first.config.environment == {"A": "1"}


def test_one_thread_unpacks_an_image(tmp_path: Path, images: ImageStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one waits in the middle until the others have asked."""
    path = str(packed(tmp_path / "image.tar", docker_files(LAYERS)))
    count, unpack, here, asked = [0], ImageArchive.unpack, threading.Event(), threading.Event()

    def slow(archive: ImageArchive, target: Path) -> None:
        count[0] += 1
        here.set()
        asked.wait(30)
        unpack(archive, target)

    monkeypatch.setattr(ImageArchive, "unpack", slow)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(images.resolve, path)
        here.wait(30)
        monkeypatch.setattr(module, "ImageArchive", lambda opened: asked.set() or ImageArchive(opened))  # type: ignore[func-returns-value]
        second = pool.submit(images.resolve, path)
        assert first.result() == second.result()
    assert count == [1]


def test_failed_image_leaves_nothing(tmp_path: Path, images: ImageStore) -> None:
    files = docker_files([*LAYERS, layer(Member("f"))])
    path = packed(tmp_path / "image.tar", files | {"1/layer.tar": layer(Member("evil"))})
    before = sorted(path.name for path in (tmp_path / "images").iterdir())
    for _ in range(2):
        with pytest.raises(SpecError, match=r"image '/.*image.tar' cannot be used: its layer '1/layer.tar' is not"):
            images.resolve(str(path))
        assert sorted(path.name for path in (tmp_path / "images").iterdir()) == before


def test_damaged_image_is_unpacked_again(tmp_path: Path) -> None:
    """A new process reads an image once. By its id alone, a damaged one is not there."""
    path = str(packed(tmp_path / "image.tar", docker_files(LAYERS)))
    [first] = [images.resolve(path) for images in opened(tmp_path)]
    answer = Path(first.lowers[0], "etc/answer")
    flip(answer)
    [again] = [images.resolve(path) for images in opened(tmp_path)]
    assert again == first
    assert answer.read_text() == "alpha"
    flip(answer)
    images = ImageStore(tmp_path / "images")
    images.open()
    images.daemon.where = f"unix://{tmp_path}/none"
    assert images._unpacked(first.id, "") is None


def test_killed_process_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "images/sha256-0.part/etc").mkdir(parents=True)
    (tmp_path / "images/sha256-0.json.part").touch()
    [_] = opened(tmp_path)
    assert [path.name for path in (tmp_path / "images").iterdir()] == ["root"]


def test_unused_images_are_collected(tmp_path: Path, images: ImageStore) -> None:
    """One that was returned since the last collection may have a user that its caller does not know yet."""
    made = [images.resolve(str(packed(tmp_path / f"{name}.tar", docker_files([layer(Member(name))])))) for name in "ab"]
    images.collect(set())
    assert [Path(image.lowers[0]).is_dir() for image in made] == [True, True]
    images.collect({made[0].id})
    assert [Path(image.lowers[0]).is_dir() for image in made] == [True, False]
    name = made[0].id.replace(":", "-")
    assert sorted(path.name for path in (tmp_path / "images").iterdir()) == [
        "root", name, f"{name}.digest", f"{name}.json",
    ]  # fmt: skip
    assert images.resolve(str(tmp_path / "b.tar")) == made[1], "it is unpacked again"


def test_nothing_is_collected_while_an_image_is_made(
    tmp_path: Path, images: ImageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The image of a task that is being created is in no list of its caller's."""
    path = str(packed(tmp_path / "image.tar", docker_files(LAYERS)))
    made = images.resolve(path)
    images.collect(set())
    unpacked = images._archived

    def collected(name: str, below: str) -> Image:
        image = unpacked(name, below)
        images.collect(set())
        return image

    monkeypatch.setattr(images, "_archived", collected)
    assert Path(images.resolve(path).lowers[0]).is_dir()
    assert images.resolve(made.id) == made


@pytest.mark.parametrize("name", ["/nowhere/image.tar", "/etc/passwd", "/etc/mtab", "/dev/null"])
def test_unusable_path_is_the_specs_error(images: ImageStore, name: str) -> None:
    with pytest.raises(SpecError, match=f"image '{name}' cannot be used: .*Name an image"):
        images.resolve(name)


def test_full_disk_is_no_specs_error(tmp_path: Path, images: ImageStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sandboxes.images.root_tar.RESERVE_BYTES", 1 << 62)
    with pytest.raises(OSError, match="nearly full"):
        images.resolve(str(packed(tmp_path / "image.tar", docker_files(LAYERS))))
    assert [path.name for path in (tmp_path / "images").iterdir()] == ["root"]
