"""Fixtures for pytest that start a proxy. Name them in a `conftest.py`: `pytest_plugins = ["forkpoint.pytest"]`.

A test that takes `forkpoint_rollout` gets a new rollout of a task of its own:

    def test_build(forkpoint_rollout):
        assert forkpoint_rollout.exec("make").exit_code == 0
"""

from collections.abc import Iterator, Mapping
from hashlib import sha256
from typing import Any

import pytest

from forkpoint.client import Client, Rollout
from forkpoint.ephemeral_proxy import local


@pytest.fixture(scope="session")
def forkpoint_settings() -> Mapping[str, Any]:
    """Give the settings of the proxy. Override this fixture to change them."""
    return {}


@pytest.fixture(scope="session")
def forkpoint_client(forkpoint_settings: Mapping[str, Any]) -> Iterator[Client]:
    """Start a proxy for the whole session, and give a client of it."""
    with local(**forkpoint_settings) as client:
        yield client


@pytest.fixture
def forkpoint_rollout(forkpoint_client: Client, request: pytest.FixtureRequest) -> Iterator[Rollout]:
    """Give a new rollout of a task that belongs to the test, and finish it afterwards."""
    # Names have fewer characters than test ids, so the id becomes a digest.
    task = f"test-{sha256(request.node.nodeid.encode()).hexdigest()[:16]}"
    with forkpoint_client.task(task).rollout() as rollout:
        yield rollout
