"""Small files of a base, which is a stranger's, are read without being led elsewhere or held up."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from sandboxes.local.lower_view import lines_of


@pytest.mark.parametrize(
    "make",
    [lambda path: path.symlink_to("/etc/hostname"), os.mkfifo, Path.mkdir, lambda path: path.symlink_to("gone")],
    ids=["a link", "a FIFO", "a directory", "a broken link"],
)
def test_what_is_no_file_has_no_lines(tmp_path: Path, make: Callable[[Path], object]) -> None:
    """Such an image starts, and the sandbox itself says who its root is."""
    (tmp_path / "upper" / "etc").mkdir(parents=True)
    make(tmp_path / "upper" / "etc" / "passwd")
    assert lines_of([str(tmp_path / "upper")], "etc/passwd") == []


def test_topmost_file_counts(tmp_path: Path) -> None:
    for name in ("upper", "lower"):
        (tmp_path / name / "etc").mkdir(parents=True)
        (tmp_path / name / "etc" / "passwd").write_text(f"{name}:x:0:0\n")
    assert lines_of([str(tmp_path / name) for name in ("upper", "lower")], "etc/passwd") == ["upper:x:0:0", ""]
