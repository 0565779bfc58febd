"""Removal of directory trees."""

import contextlib
import shutil
from pathlib import Path


def remove_tree(path: Path) -> None:
    """Delete a directory and all in it, also where modes are in the way; nothing happens where there is none."""

    def retry(_function: object, name: str, _error: object) -> None:
        for folder in (Path(name).parent, Path(name)):
            with contextlib.suppress(OSError):
                # What the tree lies in is not ours.
                if not folder.is_symlink() and folder.is_relative_to(path):
                    folder.chmod(0o700)
        with contextlib.suppress(OSError):
            if Path(name).is_dir() and not Path(name).is_symlink():
                shutil.rmtree(name, onerror=lambda *_: None)
            else:
                Path(name).unlink()

    for _ in range(5):
        # Again where another thread was removing a part of it: that looks like an error here.
        if path.is_dir():
            shutil.rmtree(path, onerror=retry)
