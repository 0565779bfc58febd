"""What CI does about tests that failed in a whole run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.second_look import why_not

REPOSITORY = Path(__file__).parents[1]

SUITE = """
from pathlib import Path
import pytest

@pytest.fixture(scope="session", params={cases})
def case(request): return request.param

def test_{name}(case):
    tries = Path(f"tries-{{case}}")
    number = int(tries.read_text()) if tries.exists() else 0
    tries.write_text(str(number + 1))
    assert number not in {failing}
"""
"""A suite whose tests fail at some of their runs."""

OPTIONS = "def pytest_addoption(parser):\n    parser.addoption('--all', action='store_true')\n"


@pytest.mark.parametrize(
    ("name", "cases", "failing", "status", "shown"),
    [
        ("waits", [1], [0], 0, "UNSTEADY, to be mended"),
        ("waits", [1, 2], [0], 0, "UNSTEADY, to be mended"),
        ("waits", [1], [0, 1], 1, "Failed again, alone"),
        ("waits", [1], [0, 3], 1, "Failed again, alone"),
        ("waits", [1, 2, 3], [0], 1, "3 tests failed"),
        ("attacks_fail", [1], [0], 1, "keeps a promise"),
    ],
)
def test_failures_are_looked_at_again(
    tmp_path: Path, name: str, cases: list[int], failing: list[int], status: int, shown: str
) -> None:
    """A test of no promise that then passes three times in a row, alone, fails the run no more."""
    (tmp_path / "conftest.py").write_text(OPTIONS)
    (tmp_path / "test_suite.py").write_text(SUITE.format(name=name, cases=cases, failing=failing))
    first = _python(tmp_path, "pytest", "-q", "-n0", "--all")
    assert first.returncode == 1, first.stdout
    second = _python(tmp_path, "tests.second_look", str(first.returncode))
    assert (second.returncode, shown in second.stdout) == (status, True), second.stdout


@pytest.mark.parametrize("status", [2, 3, 4, 5])
def test_a_broken_run_stays_broken(tmp_path: Path, status: int) -> None:
    assert _python(tmp_path, "tests.second_look", str(status)).returncode == status


def test_a_run_without_failed_tests_fails(tmp_path: Path) -> None:
    """A run may fail although no test did: a check at its end, for instance."""
    ran = _python(tmp_path, "tests.second_look", "1")
    assert (ran.returncode, ran.stdout) == (1, "No second look: no test failed, but the run did.\n")


@pytest.mark.parametrize(
    "test",
    [
        "tests/sandboxes/test_attacks.py::test_nothing_gets_out",
        "tests/test_differential.py::test_programs_have_the_answers_of_private_shells[kills]",
        "tests/proxy/test_transparency_local.py::test_walks",
        "tests/test_kill_storm.py::test_kill_storm_changes_no_answer",
        "tests/proxy/test_damage.py::test_no_rollout_goes_back_silently",
    ],
)
def test_promises_get_no_second_look(test: str) -> None:
    assert "keeps a promise" in why_not([test])


def _python(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "PYTHONPATH": str(REPOSITORY),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTEST_ADDOPTS": "-p xdist",
    }
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
