"""Removal of directory trees."""

import contextlib
import shutil
from pathlib import Path


def remove_tree(path: Path) -> None:
    """Delete a directory and everything in it, even if modes forbid it. A missing directory is no error."""

    def retry(_function: object, name: str, _error: object) -> None:
        for folder in (Path(name).parent, Path(name)):
            with contextlib.suppress(OSError):
                # The directory that contains the tree belongs to somebody else.
                if not folder.is_symlink() and folder.is_relative_to(path):
                    folder.chmod(0o700)
        with contextlib.suppress(OSError):
            if Path(name).is_dir() and not Path(name).is_symlink():
                shutil.rmtree(name, onerror=lambda *_: None)
            else:
                Path(name).unlink()

    for _ in range(5):
        # Another thread may be removing a part of the tree, which looks like an error here: try again.
        if path.is_dir():
            shutil.rmtree(path, onerror=retry)
