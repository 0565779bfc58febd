"""Which tests run, in which order, and with which Hypothesis profile.

Without `--all`, and without a path on the command line, the tests that take minutes or need other software are left
out, so that the default run takes less than two minutes. The summary names what was left out. Hypothesis has no
deadline, because machines are noisy; in CI it draws the same examples every time.
"""

import contextlib
import importlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests import known_machine, launchers
from tests.turns import turn

# Failed assertions in modules that tests share are explained like those in tests.
pytest.register_assert_rewrite("tests.sandboxes", "tests.proxy", "tests.agents", "tests.machine", "tests.storm")

# Audits in the background would execute calls that tests count. Tests of them set a share of their own.
os.environ.setdefault("FORKPOINT_AUDIT_SHARE", "0")

known_machine.remember()
launchers.preload()

settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("default"), derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")

LEFT_OUT = {
    "tests/sandboxes/images/": "Docker",
    "tests/test_compose_run.py": "Docker",
    "tests/proxy/cluster/": "PostgreSQL",
    "tests/sandboxes/postgres/": "PostgreSQL",
    "tests/guest/": "QEMU",
    "tests/forkpoint/test_ray.py": "Ray and PostgreSQL",
    "tests/manual/test_s": "a browser",
    "tests/ui/": "a browser",
    "tests/agents/": "real clients of other products",
    "tests/test_power_cuts.py": "strace",
    "tests/test_run.py": "the package index",
    "tests/test_wheel.py": "the package index",
    "tests/bench/": "minutes",
    "tests/deploy/": "minutes",
    "tests/examples/": "minutes",
    "tests/forkpoint/test_client.py": "minutes",
    "tests/forkpoint/test_local.py": "minutes",
    "tests/forkpoint/test_trackers.py": "minutes",
    "tests/manual/test_troubleshooting.py": "minutes",
    "tests/proxy/audit/test_confidence.py": "minutes",
    "tests/proxy/cli/": "minutes",
    "tests/proxy/compat/": "minutes",
    "tests/proxy/control/test_advice.py": "minutes",
    "tests/proxy/control/test_dataplane_openapi.py": "minutes",
    "tests/proxy/control/test_node": "minutes",
    "tests/proxy/control/test_scratch_forks.py": "minutes",
    "tests/proxy/control/test_tree_listing.py": "minutes",
    "tests/proxy/dataplane/test_connection_limits.py": "minutes",
    "tests/proxy/dataplane/test_large_bodies.py": "minutes",
    "tests/proxy/dialects/test_body_forms.py": "minutes",
    "tests/proxy/execution/test_collector.py": "minutes",
    "tests/proxy/execution/test_divergence.py": "minutes",
    "tests/proxy/execution/test_ended_rollouts.py": "minutes",
    "tests/proxy/execution/test_eviction.py": "minutes",
    "tests/proxy/execution/test_forgetting.py": "minutes",
    "tests/proxy/execution/test_replay.py": "minutes",
    "tests/proxy/http/test_rollout_token.py": "minutes",
    "tests/proxy/test_branches.py": "minutes",
    "tests/proxy/test_damage.py": "minutes",
    "tests/proxy/test_labels.py": "minutes",
    "tests/proxy/test_resources.py": "minutes",
    "tests/proxy/test_restart.py": "minutes",
    "tests/proxy/test_transparency": "minutes",
    "tests/proxy/transfer/": "minutes",
    "tests/proxy/workers/test_workers.py": "minutes",
    "tests/sandboxes/egress/": "minutes",
    "tests/sandboxes/guest/": "minutes",
    "tests/sandboxes/host/": "minutes",
    "tests/sandboxes/ipc/": "minutes",
    "tests/sandboxes/linux/": "minutes",
    "tests/sandboxes/local/": "minutes",
    "tests/sandboxes/shell_files/": "minutes",
    "tests/sandboxes/sqlite/": "minutes",
    "tests/sandboxes/test_attacks": "minutes",
    "tests/sandboxes/test_file_attributes.py": "minutes",
    "tests/sandboxes/tool_clients/": "minutes",
    "tests/sandboxes/video/": "minutes",
    "tests/sandboxes/workers/test_pool.py": "minutes",
    "tests/snapshots/test_cache.py": "minutes",
    "tests/test_beside_launcher.py": "minutes",
    "tests/test_differential.py": "minutes",
    "tests/test_examples.py": "minutes",
    "tests/test_extending.py": "minutes",
    "tests/test_images_through_proxy.py": "minutes",
    "tests/test_kill": "minutes",
    "tests/test_machine_faults.py": "minutes",
    "tests/test_misspath.py": "minutes",
    "tests/test_readme.py::test_first_calls": "minutes",
    "tests/test_readme.py::test_quickstart": "minutes",
    "tests/test_rights.py": "minutes",
    "tests/test_second_look.py": "minutes",
    "tests/test_shell_blocks.py": "minutes",
    "tests/test_soak.py": "minutes",
    "tests/test_training.py": "minutes",
    "tests/test_tutorial.py": "minutes",
}
"""Prefixes of the tests that only `--all` runs, with what they need. The rest takes 160 s of one core in CI."""

LONGEST = (
    "tests/test_kill_storm.py", "tests/agents/test_e2b.py", "tests/agents/test_swe_rex.py", "tests/test_rights.py",
    "tests/test_wheel.py", "tests/test_run.py", "tests/sandboxes/postgres/", "tests/proxy/cluster/", "tests/agents/",
    "tests/proxy/test_transparency", "tests/test_differential.py", "tests/proxy/compat/harness/",
    "tests/forkpoint/test_ray.py", "tests/test_beside_launcher.py", "tests/sandboxes/test_attacks.py", "tests/test_",
    "tests/ui/test_large.py", "tests/sandboxes/local/", "tests/proxy/control/test_dataplane_openapi.py",
    "tests/proxy/dataplane/test_large_bodies.py", "tests/proxy/transfer/", "tests/ui/",
)  # fmt: skip
"""Tests that begin first, in this order, so that no worker process works alone at the end."""


@pytest.fixture(autouse=True)
def _turn(request: pytest.FixtureRequest) -> Iterator[None]:
    with turn(alone=request.node.get_closest_marker("alone") is not None):
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--all`."""
    parser.addoption("--all", action="store_true", help="run every test, the slow ones too")


def pytest_collection(session: pytest.Session) -> None:
    """Import a share of the test modules first, in each of several processes: else each compiles all on a new clone."""
    worker = getattr(session.config, "workerinput", None)
    if worker is None or session.config.args_source is pytest.Config.ArgsSource.ARGS:
        return
    root, first = session.config.rootpath, int(worker["workerid"].removeprefix("gw"))
    paths = sorted(root.glob("tests/**/test_*.py"))
    for path in paths[first :: worker["workercount"]]:
        if not pytest_ignore_collect(path, session.config):
            # A module that cannot be imported is reported when it is collected.
            with contextlib.suppress(Exception, pytest.skip.Exception):
                importlib.import_module(".".join(path.relative_to(root).with_suffix("").parts))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out what the default run leaves out, without importing it where that is a whole file or folder."""
    if config.getoption("all") or config.args_source is pytest.Config.ArgsSource.ARGS:
        return None
    return f"{collection_path.relative_to(config.rootpath)}/".startswith(tuple(LEFT_OUT)) or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what the default run leaves out, and sort the longest tests to the front."""
    if not config.getoption("all") and config.args_source is not pytest.Config.ArgsSource.ARGS:
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid.startswith(tuple(LEFT_OUT))])
        items[:] = [item for item in items if not item.nodeid.startswith(tuple(LEFT_OUT))]
    places = range(len(LONGEST))
    items.sort(
        key=lambda item: (
            # Last: all other processes wait for a test that runs alone, and it for the longest of theirs.
            item.get_closest_marker("alone") is not None,
            next((at for at in places if item.nodeid.startswith(LONGEST[at])), len(LONGEST)),
        )
    )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say what was left out, and how to run it."""
    if config.getoption("all") or config.args_source is pytest.Config.ArgsSource.ARGS:
        return
    names = ", ".join(sorted(set(LEFT_OUT.values())))
    terminalreporter.write_line(f"Left out: tests that need {names}. Run them with: ./run test --all")
