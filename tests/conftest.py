"""Which tests run, in which order, and with which Hypothesis profile.

Without `--all`, and without a path on the command line, the tests that take minutes or need other software are left
out, so that the default run takes less than two minutes. The summary names what was left out. Hypothesis has no
deadline, because machines are noisy; in CI it draws the same examples every time.
"""

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.turns import turn

# Failed assertions in modules that tests share are explained like those in tests.
pytest.register_assert_rewrite("tests.sandboxes", "tests.proxy", "tests.agents", "tests.machine", "tests.storm")

# Audits in the background would execute calls that tests count. Tests of them set a share of their own.
os.environ.setdefault("FORKPOINT_AUDIT_SHARE", "0")

settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("default"), derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")

LEFT_OUT = {
    "tests/agents/": "real clients of other products",
    "tests/ui/": "a browser",
    "tests/guest/": "QEMU",
    "tests/manual/test_s": "a browser",
    "tests/sandboxes/images/test_daemon.py": "Docker",
    "tests/test_images_through_proxy.py": "minutes",
    "tests/test_compose_run.py": "Docker",
    "tests/sandboxes/postgres/": "PostgreSQL",
    "tests/proxy/test_transparency_postgres.py": "PostgreSQL",
    "tests/forkpoint/test_ray.py": "Ray and PostgreSQL",
    "tests/proxy/cluster/postgres/": "PostgreSQL",
    "tests/proxy/cluster/states/": "PostgreSQL",
    "tests/proxy/cluster/test_answering.py": "PostgreSQL",
    "tests/proxy/cluster/test_compaction.py": "PostgreSQL",
    "tests/proxy/cluster/test_machines.py": "PostgreSQL",
    "tests/proxy/cluster/test_nodes.py": "PostgreSQL",
    "tests/proxy/cluster/test_start.py": "PostgreSQL",
    "tests/proxy/cluster/test_streams.py": "PostgreSQL",
    "tests/proxy/test_transparency_local.py": "minutes",
    "tests/proxy/test_transparency_sqlite.py": "minutes",
    "tests/proxy/test_transparency_video.py": "minutes",
    "tests/proxy/transfer/test_service.py": "minutes",
    "tests/proxy/transfer/test_import_states.py": "minutes",
    "tests/proxy/transfer/test_trajectories.py": "minutes",
    "tests/proxy/execution/test_replay.py": "minutes",
    "tests/proxy/dataplane/test_connection_limits.py": "minutes",
    "tests/proxy/control/test_dataplane_openapi.py": "minutes",
    "tests/proxy/cli/test_start_errors.py": "minutes",
    "tests/proxy/workers/test_workers.py": "minutes",
    "tests/sandboxes/guest/": "minutes",
    "tests/sandboxes/local/": "minutes",
    "tests/sandboxes/egress/": "minutes",
    "tests/sandboxes/linux/test_trees.py": "minutes",
    "tests/sandboxes/sqlite/test_driver.py": "minutes",
    "tests/sandboxes/sqlite/test_file_clone.py": "minutes",
    "tests/sandboxes/sqlite/test_portable_states.py": "minutes",
    "tests/sandboxes/video/": "minutes",
    "tests/sandboxes/workers/test_pool.py": "minutes",
    "tests/forkpoint/test_local.py": "minutes",
    "tests/forkpoint/test_trackers.py": "minutes",
    "tests/deploy/test_monitoring.py": "minutes",
    "tests/examples/": "minutes",
    "tests/test_kill": "minutes",
    "tests/test_machine_faults.py": "minutes",
    "tests/test_differential.py": "minutes",
    "tests/test_examples.py": "minutes",
    "tests/test_extending.py": "minutes",
    "tests/test_misspath.py": "minutes",
    "tests/test_readme.py::test_first_calls": "minutes",
    "tests/test_readme.py::test_quickstart": "minutes",
    "tests/test_shell_blocks.py": "minutes",
    "tests/test_soak.py": "minutes",
    "tests/test_training.py": "minutes",
    "tests/sandboxes/test_attacks.py": "minutes",
    "tests/test_power_cuts.py": "strace",
    "tests/test_run.py": "the package index",
    "tests/test_wheel.py": "the package index",
}
"""Prefixes of the tests that only `--all` runs, with what they need. On two idle cores the rest takes 110 s."""

LONGEST = (
    "tests/test_kill_storm.py", "tests/test_kill.py", "tests/test_differential.py", "tests/agents/",
    "tests/proxy/test_transparency", "tests/test_run.py",
)  # fmt: skip
"""Tests that begin first, so that no worker process waits for them at the end."""


@pytest.fixture(autouse=True)
def _turn(request: pytest.FixtureRequest) -> Iterator[None]:
    with turn(alone=request.node.get_closest_marker("alone") is not None):
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--all`."""
    parser.addoption("--all", action="store_true", help="run every test, the slow ones too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what the default run leaves out, and sort the longest tests to the front."""
    if not config.getoption("all") and config.args_source is not pytest.Config.ArgsSource.ARGS:
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid.startswith(tuple(LEFT_OUT))])
        items[:] = [item for item in items if not item.nodeid.startswith(tuple(LEFT_OUT))]
    items.sort(key=lambda item: not item.nodeid.startswith(LONGEST))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say what was left out, and how to run it."""
    if config.getoption("all") or config.args_source is pytest.Config.ArgsSource.ARGS:
        return
    names = ", ".join(sorted(set(LEFT_OUT.values())))
    terminalreporter.write_line(f"Left out: tests that need {names}. Run them with: ./run test --all")
