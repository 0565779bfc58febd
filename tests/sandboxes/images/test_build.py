"""A tree becomes an image, and the image the same tree."""

import json
import os
import tarfile
from pathlib import Path

import pytest

from sandboxes.images import build
from sandboxes.images.archives import ImageArchive
from sandboxes.images.config import ImageConfig, ImageError
from tests.sandboxes.images.image_files import tree
from tests.sandboxes.images.test_archives import unpacked

CAPABILITY = b"\x01\x00\x00\x02\x00\x20" + bytes(14)
CONFIG = ImageConfig(
    environment={"A": '$1 "\n'}, user="1000:1000", workdir="/srv", entrypoint=("/init",), command=("a b",)
)
TIME = 1_700_000_000


def grown(root: Path) -> Path:
    """Make a tree with one of everything that an image can hold."""
    for name in ("etc", "srv/deep/er", "tmp"):
        (root / name).mkdir(parents=True)
    (root / "etc/file").write_bytes(os.urandom(70_000))
    (root / "etc/empty").touch()
    (root / "etc/n\udce4me").write_text("no UTF-8")
    (root / ("srv/" + "n" * 200)).write_text("a long name")
    (root / "srv/link").symlink_to("../etc/./file")
    (root / "srv/twin").hardlink_to(root / "etc/file")
    os.mkfifo(root / "tmp/pipe")
    (root / "tmp").chmod(0o1777)
    (root / "etc/file").chmod(0o4755)
    os.setxattr(root / "etc/empty", "user.note", b"\xff\0x\n")
    os.setxattr(root / "srv", "user.note", b"folder")
    if os.geteuid() == 0:
        os.chown(root / "etc/empty", 3_000_000, 65_534)
        os.chown(root / "srv/link", 5, 6, follow_symlinks=False)
        os.setxattr(root / "etc/empty", "security.capability", CAPABILITY)
    for path in sorted([root, *root.rglob("*")], reverse=True):
        os.utime(path, (TIME, TIME + len(path.name)), follow_symlinks=False)
    root.chmod(0o755)
    return root


def test_archive_unpacks_to_the_same_tree(tmp_path: Path) -> None:
    """Modes, owners, times, links, hard links, attributes and names that are no UTF-8 come back."""
    root = grown(tmp_path / "tree")
    made = build.write(tmp_path / "image.tar", root, CONFIG, "repository:tag")
    with ImageArchive(tmp_path / "image.tar") as archive:
        assert (archive.id, archive.config) == (made, CONFIG)
    assert tree(unpacked(tmp_path / "image.tar", tmp_path / "again")) == tree(root)
    assert build.write(tmp_path / "second.tar", tmp_path / "again", CONFIG) == made, "equal trees give equal images"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "image.tar", "second.tar", "tree"]


def test_archive_can_be_read_without_dockers_manifest(tmp_path: Path) -> None:
    """Readers of OCI archives know the index only."""
    root = grown(tmp_path / "tree")
    made = build.write(tmp_path / "image.tar", root, CONFIG, "host:5000/repository:tag")
    with tarfile.open(tmp_path / "image.tar") as archive:
        archive.extractall(tmp_path / "layout", filter="data")
    (tmp_path / "layout/manifest.json").unlink()
    with ImageArchive(tmp_path / "layout") as layout:
        assert (layout.id, layout.config) == (made, CONFIG)
    [entry] = json.loads((tmp_path / "layout/index.json").read_text())["manifests"]
    assert entry["annotations"] == {
        "org.opencontainers.image.ref.name": "tag", "io.containerd.image.name": "host:5000/repository:tag",
    }  # fmt: skip
    assert tree(unpacked(tmp_path / "layout", tmp_path / "again")) == tree(root)


@pytest.mark.parametrize(
    ("name", "full"),
    [("a:1", "docker.io/library/a:1"), ("a/b:1", "docker.io/a/b:1"), ("localhost/b:1", "localhost/b:1")],
)
def test_name_has_its_registry(name: str, full: str) -> None:
    assert build._annotations(name)["io.containerd.image.name"] == full


@pytest.mark.parametrize(
    ("name", "says"), [("a/.wh.b", "name of a whiteout"), ("a/holes", "holes"), ("/".join("d" * 300), "nested more")]
)
def test_tree_that_is_no_image_is_refused(tmp_path: Path, name: str, says: str) -> None:
    """An agent may have made it; the file is not written then."""
    path = tmp_path / "tree" / name
    path.parent.mkdir(parents=True)
    path.touch()
    if name == "a/holes":
        os.truncate(path, 2 << 30)
    with pytest.raises(ImageError, match=says):
        build.write(tmp_path / "image.tar", tmp_path / "tree", CONFIG)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tree"]
