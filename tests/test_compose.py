"""What can be said of compose.yaml and docker/ without a registry: their form, and that they fit together."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from proxy.settings import Settings

ROOT = Path(__file__).parents[1]


@pytest.fixture
def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
    return loaded


def test_compose_s_settings_are_settings_of_the_proxy(compose: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    proxy = compose["services"]["proxy"]
    for name, value in proxy["environment"].items():
        monkeypatch.setenv(name, value)
    settings = Settings.load()
    assert settings.drivers == ("container",)
    assert settings.default_spec.image == compose["services"]["sandbox"]["image"]
    # The daemon is told of directories below `data` by their names here: they must be its own too.
    volumes = [volume.split(":") for volume in proxy["volumes"]]
    assert [str(settings.data)] * 2 in volumes
    assert all(ours == its for ours, its in volumes)


def test_the_port_is_published_on_loopback_only(compose: dict[str, Any]) -> None:
    assert all(port.startswith("127.0.0.1:") for port in compose["services"]["proxy"]["ports"])


def test_each_image_is_built_of_a_dockerfile_that_is_there_and_debian_s_packages(compose: dict[str, Any]) -> None:
    for service in compose["services"].values():
        build = service["build"]
        file = (ROOT / build["context"] / build["dockerfile"]).read_text()
        assert "\nFROM debian:" in file
        assert "apt-get install" in file
        if service["image"] != "forkpoint":
            assert "pip install" not in file


def test_docker_is_no_package_that_would_hide_the_sdk() -> None:
    import docker  # noqa: PLC0415

    assert not list((ROOT / "docker").glob("*.py"))
    assert "site-packages" in (docker.__file__ or "")
