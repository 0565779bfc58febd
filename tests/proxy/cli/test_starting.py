"""Which drivers `serve` starts where some of them cannot run."""

from pathlib import Path

import pytest

from proxy.cli.doctor import Requirement
from proxy.cli.starting import plan
from proxy.settings import Settings
from sandboxes.spec import EnvironmentSpec

MISSING = Requirement("namespaces", False, "refused", "Run as root.", driver="local")
CAUSE = "The driver local cannot run here: namespaces: refused. Run as root."


def test_driver_that_nothing_asks_for_is_left_out(tmp_path: Path) -> None:
    start = plan(Settings(data=tmp_path), [MISSING])
    assert start.settings.drivers == ("sqlite", "http")
    assert start.left_out == (f"{CAUSE} It is left out.",)
    assert start.refusal == ""


@pytest.mark.parametrize(
    "settings",
    [
        {"drivers": ("local", "sqlite")}, {"drivers": ("container",)},
        {"default_spec": EnvironmentSpec(image="debian:12")},
        {"cluster": "postgresql://db/x", "cluster_secret": "0123456789abcdef", "store": "/srv/states"},
    ],
)  # fmt: skip
def test_driver_that_a_setting_names_is_needed(settings: dict[str, object], tmp_path: Path) -> None:
    start = plan(Settings(data=tmp_path, **settings), [MISSING])  # type: ignore[arg-type]
    assert start.refusal.startswith(CAUSE)
    assert start.left_out == ()


@pytest.mark.parametrize("folder", ["local", "worker-1/local"])
def test_driver_with_states_is_needed(folder: str, tmp_path: Path) -> None:
    """A proxy that starts without it would refuse all calls of its tasks, although it may be a passing shortage."""
    (tmp_path / folder).mkdir(parents=True)
    assert plan(Settings(data=tmp_path), [MISSING]).refusal.startswith(CAUSE)


def test_proxy_needs_what_belongs_to_no_driver(tmp_path: Path) -> None:
    unmet = Requirement("data directory", False, "no room", "Make room.")
    assert (
        plan(Settings(data=tmp_path), [MISSING, unmet]).refusal
        == "The proxy cannot start: data directory: no room. Make room."
    )


def test_features_that_are_missing_change_nothing(tmp_path: Path) -> None:
    settings = Settings(data=tmp_path)
    unmet = Requirement("images", False, "no daemon", "", required=False, driver="local")
    assert plan(settings, [unmet]) == (settings, (), "")
