from collections.abc import Iterator
from pathlib import Path
from tempfile import mkdtemp

import pytest

from sandboxes.localbox.layers import remove_tree


@pytest.fixture(scope="session")
def data_dir() -> Iterator[Path]:
    """One data directory for all: bases are built once. Not below pytest's, which is removed with less care."""
    folder = Path(mkdtemp(prefix="forkpoint-test-", dir="/var/tmp"))
    folder.chmod(0o755)
    yield folder
    remove_tree(folder)
