"""Which layers of Docker's can be used in place: those in which a sandbox sees what it sees of the unpacked image."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from sandboxes.images.docker_layers import obstacle
from sandboxes.linux.files import remove_tree

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="marks and whiteouts need root")
TIME = 1_700_000_000


def whiteout(path: Path) -> object:
    os.mknod(path, stat.S_IFCHR, os.makedev(0, 0))
    return path


def opaque(path: Path) -> None:
    os.setxattr(path, "trusted.overlay.opaque", b"y")


def layers(tmp_path: Path, change: Callable[[Path, Path], object]) -> list[str]:
    """Return two layers, topmost first, after a change to them."""
    upper, lower = tmp_path / "upper", tmp_path / "lower"
    for path in (upper / "both", upper / "new", lower / "both", lower / "old"):
        path.mkdir(parents=True)
    (lower / "both/file").write_text("1")
    (lower / "both/twin").hardlink_to(lower / "both/file")
    opaque(upper / "new")
    whiteout(upper / "both/hidden")
    change(upper, lower)
    for path in [*upper.rglob("*"), *lower.rglob("*")]:
        if path.name != "fine":
            os.utime(path, (TIME, TIME), follow_symlinks=False)
    return [str(upper), str(lower)]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda _upper, _lower: None, ""),
        (lambda upper, _: opaque(upper / "both"), "both/ hides a directory"),
        (lambda upper, _: opaque(upper), "hides a directory"),
        (lambda _, lower: opaque(lower / "old"), ""),
        (lambda upper, _: os.setxattr(upper / "both", "trusted.overlay.redirect", b"/old"), "trusted.overlay.redirect"),
        (lambda _, lower: os.setxattr(lower / "old", "user.overlay.opaque", b"y"), "user.overlay.opaque"),
        (lambda _, lower: os.setxattr(lower / "both/file", "trusted.overlay.metacopy", b""), "metacopy"),
        (lambda _, lower: os.setxattr(lower / "both/file", "user.note", b""), ""),
        (lambda _, lower: os.mknod(lower / "null", stat.S_IFCHR, os.makedev(1, 3)), "null is a device"),
        (lambda _, lower: os.mknod(lower / "end", stat.S_IFSOCK), "end is a device or a socket"),
        (lambda _, lower: os.mkfifo(lower / "pipe"), ""),
        (lambda _, lower: (lower / "link").symlink_to("nowhere"), ""),
        (lambda _, lower: (lower / "fine").touch(), "fine has a time of nanoseconds"),
        (lambda upper, _: whiteout(upper / "both/twin"), "further name of a file"),
        (lambda upper, _: (upper / "both/file").touch(), "further name of a file"),
        (lambda upper, _: whiteout(upper / "old"), ""),
        (lambda upper, _: remove_tree(upper / "both") and whiteout(upper / "both"), "further name of a file"),
        (lambda _, lower: (lower / "/".join("d" * 300)).mkdir(parents=True), "nested more than"),
    ],
)  # fmt: skip
def test_layers_that_show_something_else_are_refused(
    tmp_path: Path, change: Callable[[Path, Path], object], says: str
) -> None:
    found = obstacle(layers(tmp_path, change))
    assert says in found
    assert bool(says) == bool(found)


def test_layers_that_are_gone_are_no_layers(tmp_path: Path) -> None:
    assert "No such file" in obstacle([str(tmp_path / "gone")])
