"""Hypothesis profiles: no deadline on noisy machines; in CI the same examples every time. The longest tests begin."""

import os

import pytest
from hypothesis import HealthCheck, settings

# What fails in a part that several test modules share tells what it saw, too.
pytest.register_assert_rewrite("tests.sandboxes", "tests.proxy", "tests.agents", "tests.machine", "tests.storm")

settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("default"), derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--all`: without it, the tests that take minutes or need other software are left out."""
    parser.addoption("--all", action="store_true", help="run every test, also the slow ones")


_LONGEST = ("tests/test_kill_storm.py", "tests/test_kill.py", "tests/agents/", "tests/proxy/test_transparency")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let what takes minutes begin first, so that no process waits for it at the end."""
    items.sort(key=lambda item: not item.nodeid.startswith(_LONGEST))
