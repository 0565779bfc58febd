"""Looks a second time, aloud, at tests that failed in a whole run: `python -m tests.second_look EXIT_CODE`.

Thousands of tests start proxies, databases and browsers on a busy machine, and now and then one of them waits too
short. Such a test has to pass three times in a row, alone, and the run then says which one it was. A product with a
rare defect fails in the same way, so the second look has bounds: it is for two tests at most, and for none that keeps
one of the promises about hostile commands, false answers and lost answers. Those must never fail.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

MOST_TESTS = 2
"""Bounds how many tests may be looked at again; more than these failed for a cause."""
PASSES = 3
"""How often each of them must pass, one after another."""
PROMISES = re.compile(
    "attack|secur|confin|escape|token|access|secret|transparen|differential|kill|power_cut|damage|fault|soak|never|wrong"
)
"""Matches tests of the promises, by file or name: they are not looked at again."""

_TESTS_FAILED = 1
"""Exit code of pytest after tests that failed; others mean that it could not run them."""


def main(arguments: list[str]) -> int:
    """Run the failed tests of the last run again. Returns 0 if each passed every time, else the exit code given."""
    status = int(arguments[0])
    if status != _TESTS_FAILED:
        return status
    failed = _failed(Path(".pytest_cache/v/cache/lastfailed"))
    if refusal := why_not(failed):
        print(f"No second look: {refusal}", flush=True)
        return status
    for _ in range(PASSES):
        if subprocess.call([sys.executable, "-m", "pytest", "-q", "-n0", "--all", *failed]):
            print("Failed again, alone: this is no matter of chance.", flush=True)
            return status
    print(
        f"UNSTEADY, to be mended: failed in the whole run, passed {PASSES} times alone: {', '.join(failed)}", flush=True
    )
    return 0


def why_not(failed: list[str]) -> str:
    """Say why these tests are not looked at again; nothing if they may be."""
    if not failed:
        return "no test failed, but the run did."
    if len(failed) > MOST_TESTS:
        return f"{len(failed)} tests failed, and {MOST_TESTS} at most may fail by chance."
    if promises := [test for test in failed if PROMISES.search(test)]:
        return f"{promises[0]} keeps a promise, which must hold each time."
    return ""


def _failed(noted: Path) -> list[str]:
    return sorted(json.loads(noted.read_text())) if noted.is_file() else []


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
