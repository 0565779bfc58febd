"""A data directory that may hold sandboxes."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.machine import data_directory


@pytest.fixture
def data_dir() -> Iterator[Path]:
    with data_directory() as folder:
        yield folder
