"""A reader of a command's output may end early, as `head -1` does: then the command ends too, without a word."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.proxy.serving import Running, serving

EACH = """
import json, os, sys
from proxy.cli.main import main
reading, writing = os.pipe()
os.close(reading)
for words in json.loads(sys.argv[1]):
    sys.stdout.flush()
    if (child := os.fork()) == 0:
        os.dup2(writing, 1)
        sys.argv = ["forkpoint", *words]
        main()
        raise AssertionError("main returns by SystemExit")
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(status, *words, flush=True)
"""
"""Runs each command in a fork of one interpreter, with an output that nobody reads."""


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(tmp_path_factory.mktemp("data")) as running:
        for number in range(3):
            running.exec("first", f"echo {number} > f", task="demo")
        yield running


def test_commands_end_silently_without_a_reader(proxy: Running, tmp_path: Path) -> None:
    """Whichever command, as text and as JSON: no traceback and no error text."""
    commands = [
        ["tree", "demo"], ["tree", "demo", "--json"], ["diff", "demo", "n1", "n2"], ["top", "--json"], ["--help"],
        ["export", "demo", "-"], ["export", "demo", str(tmp_path / "demo.tar"), "--json"],
    ]  # fmt: skip
    ended = subprocess.run(
        [sys.executable, "-c", EACH, json.dumps(commands)], capture_output=True, text=True, check=True, timeout=300,
        env={**os.environ, "FORKPOINT_URL": str(proxy.client.base_url)},
    )  # fmt: skip
    # Bars of progress go to stderr.
    assert [line for line in ended.stderr.splitlines() if line.strip() and "━" not in line] == []
    assert ended.stdout.splitlines() == [" ".join(["1", *words]) for words in commands]
