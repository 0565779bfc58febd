"""Fixtures of the tests with other products' clients: a proxy for each module, and a task for each test."""

from collections.abc import Iterator

import pytest

from tests.agents.serving import Proxy, real_proxy
from tests.machine import require_sandboxes


@pytest.fixture(scope="module")
def proxy() -> Iterator[Proxy]:
    require_sandboxes()
    with real_proxy() as running:
        yield running


@pytest.fixture
def task(proxy: Proxy, request: pytest.FixtureRequest) -> str:
    """Create a task for the test."""
    name = str(request.node.name.split("[")[0][-80:])
    proxy.put(name, workdir="/root")
    return name
