from collections.abc import Iterator
from pathlib import Path
from tempfile import mkdtemp

import pytest

from sandboxes.linux.files import remove_tree
from tests.machine import wait_until
from tests.sandboxes import postgres_cluster as postgres
from tests.sandboxes.docker import containers, remove_images, require_docker


@pytest.fixture(scope="session")
def data_dir() -> Iterator[Path]:
    """One data directory for all: bases are built once. Not below pytest's, which is removed with less care."""
    folder = Path(mkdtemp(prefix="forkpoint-test-", dir="/var/tmp"))
    folder.chmod(0o755)
    yield folder
    remove_tree(folder)


@pytest.fixture
def container_dir(data_dir: Path) -> Iterator[Path]:
    """A data directory of the container driver; at the end no container of it may be left."""
    require_docker()
    folder = data_dir / "container"
    yield folder
    # Docker lists one for a moment longer than it has it.
    wait_until(lambda: containers(folder) == [], "a container of it is left", within_s=10)
    remove_images(folder)


@pytest.fixture(scope="session")
def cluster() -> Iterator[postgres.Cluster]:
    """A PostgreSQL server of the tests' own, for all of them."""
    postgres.require_postgres()
    with postgres.cluster() as running:
        yield running
