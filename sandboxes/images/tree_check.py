"""Digests of unpacked trees: one that was changed on disk is unpacked again, and never served.

A tree is read when it has been unpacked, and once in the life of each process that uses it: in a process of its own,
because thousands of files would keep the proxy's interpreter busy while hits wait.
"""

import os
import subprocess
import sys
from pathlib import Path

from sandboxes.guest.files import manifest
from sandboxes.rights import held


def digest_of(tree: Path) -> str:
    """Return a digest of all that a tree holds, computed by a process of its own. Blocking."""
    program = [sys.executable, "-m", "sandboxes.images.tree_check", str(tree)]
    done = subprocess.run(program, stdin=subprocess.DEVNULL, capture_output=True, check=False)  # noqa: S603 - our own program
    if done.returncode:
        raise OSError(f"{tree} cannot be read: {done.stderr.decode(errors='replace')[-200:]}")
    return done.stdout.decode().strip()


def _read(tree: Path) -> str:
    top = os.open(tree, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        content = manifest.of_tree(top, contents=True)
        return f"{content.stats.hex()} {content.contents.hex()}"
    except PermissionError:
        if held.over_files():
            raise
        # An ordinary user cannot read what the tarball forbids to everybody.
        return manifest.of_tree(top, contents=False).stats.hex()
    finally:
        os.close(top)


if __name__ == "__main__":
    print(_read(Path(sys.argv[1])))
