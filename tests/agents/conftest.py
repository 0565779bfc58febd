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


@pytest.fixture(autouse=True)
def _busy_machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let answers beside live processes hold however long a busy machine takes from one call to the next.

    `test_background` is about how far the ages of processes may differ.
    """
    if not request.node.nodeid.startswith("tests/agents/test_background.py"):
        monkeypatch.setattr("proxy.tree.polling.AGE_TOLERANCE_S", 600.0)


@pytest.fixture
def task(proxy: Proxy, request: pytest.FixtureRequest) -> str:
    """Create a task for the test."""
    name = str(request.node.name.split("[")[0][-80:])
    proxy.put(name, workdir="/root")
    return name
