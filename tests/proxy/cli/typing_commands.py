"""A proxy for the tests of the commands, and the commands as a user types them."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

from proxy.cli.main import app
from tests.proxy.serving import Running, serving


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A proxy whose task `demo` has two rollouts with the same three calls."""
    with serving(tmp_path_factory.mktemp("data")) as running:
        for rollout in ("first", "second"):
            for command in ("echo one > f", "cat f", "echo '\x1b[31mtwo' >> f; X=1"):
                running.exec(rollout, command, task="demo")
        yield running


def typed(proxy: Running, *words: str, code: int = 0, **environment: str) -> str:
    """Run a command against a proxy and return what it prints."""
    environment = {"FORKPOINT_URL": str(proxy.client.base_url), "COLUMNS": "160", **environment}
    result = CliRunner().invoke(app, list(words), env=environment)
    assert result.exit_code == code, result.output
    assert "\x1b[31m" not in result.output
    return result.stdout


def as_json(proxy: Running, *words: str, code: int = 0) -> Any:
    """Run a command with --json and return what it prints."""
    return json.loads(typed(proxy, *words, "--json", code=code))
