"""One PostgreSQL server for the tests of a process, and an empty database for each test."""

import itertools
from collections.abc import Iterator

import pytest

from tests.sandboxes.postgres_cluster import Cluster, cluster, require_postgres

_numbers = itertools.count()


@pytest.fixture(scope="session")
def server() -> Iterator[Cluster]:
    require_postgres()
    with cluster() as running:
        yield running


@pytest.fixture
def dsn(server: Cluster) -> str:
    """Return the connection string of a new, empty database."""
    name = f"cluster{next(_numbers)}"
    server.create(name, "SELECT 1")
    return f"{server.dsn} dbname={name}"
