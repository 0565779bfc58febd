"""`forkpoint up` and `forkpoint down`; tests/forkpoint/test_ray.py starts what they start."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import NoReturn

import pytest
from typer.testing import CliRunner

import forkpoint
from proxy.cli.main import app

COMMANDS = (["up", "--ray"], ["down", "--ray"])


@pytest.mark.parametrize("command", ["up", "down"])
def test_what_runs_the_proxies_must_be_named(command: str) -> None:
    result = CliRunner().invoke(app, [command])
    assert (result.exit_code, result.output.count("\n")) == (1, 1)
    assert "--ray" in result.output


@pytest.mark.parametrize("command", COMMANDS)
def test_missing_ray_is_one_sentence(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("forkpoint.ray")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(forkpoint, "ray", raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 1
    assert result.output == "forkpoint.ray needs Ray. Install it: pip install 'forkpoint[ray]'\n"


def test_up_lists_nodes_and_down_ends_them(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = import_module("forkpoint.ray")
    called = []

    @contextmanager
    def connected(address: str) -> Iterator[None]:
        called.append(address)
        yield

    url = "http://127.0.0.1:8700"
    proxy = cluster.NodeProxy(
        url, 7, ready=True, starts=1, failures=0, problem="", log=None, node="a1", address="10.0.0.1"
    )
    monkeypatch.setattr(cluster, "connected", connected)
    monkeypatch.setattr(cluster, "up", lambda: [proxy])
    monkeypatch.setattr(cluster, "down", lambda: called.append("down"))
    shown = CliRunner().invoke(app, ["up", "--ray"]).output.splitlines()
    assert shown[1].split() == ["10.0.0.1", url, "ready", "1"]
    assert CliRunner().invoke(app, ["down", "--ray", "--address", "10.0.0.1:6379"]).exit_code == 0
    assert called == ["auto", "10.0.0.1:6379", "down"]


def test_errors_of_ray_end_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = import_module("forkpoint.ray")

    def connected(address: str) -> NoReturn:
        raise cluster.RayError(f"no Ray cluster can be reached: {address}")

    monkeypatch.setattr(cluster, "connected", connected)
    result = CliRunner().invoke(app, ["up", "--ray"])
    assert (result.exit_code, result.output) == (1, "no Ray cluster can be reached: auto\n")
