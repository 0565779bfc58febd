"""compose.yaml and docker/ are well-formed and fit together. Their images are not built: that needs a registry."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from proxy.settings import Settings
from tests.rights import least_rights

ROOT = Path(__file__).parents[1]


@pytest.fixture
def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
    return loaded


def test_compose_sets_known_settings(compose: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    proxy = compose["services"]["proxy"]
    for name, value in proxy["environment"].items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("FORKPOINT_DATA", proxy["command"][proxy["command"].index("--data") + 1])
    settings = Settings.load()
    assert settings.default_spec.image == compose["services"]["sandbox"]["image"]
    volumes = [volume.split(":") for volume in proxy["volumes"]]
    assert [str(settings.data)] * 2 in volumes
    # Docker names the directories of images by the machine's paths.
    assert all(inside == outside for outside, inside, *_ in volumes)


def test_users_of_older_compose_get_the_same_proxy(compose: dict[str, Any]) -> None:
    """Debian's compose is version 1, which refuses the file. The page has a `docker run` with the same flags."""
    page = (ROOT / "docs" / "deploying.md").read_text().replace("\\\n", " ")
    assert "This needs version 2 of compose" in page
    (command,) = re.findall(r"^docker run .*--hostname .*$", page, re.MULTILINE)
    proxy = compose["services"]["proxy"]
    assert re.findall(r"-v (\S+)", command) == proxy["volumes"]
    assert {name.partition("=")[0] for name in re.findall(r"-e (\w+)", command)} == set(proxy["environment"])
    assert re.findall(r"--cap-add (\S+)", command) == proxy["cap_add"]
    assert re.findall(r"--cap-drop (\S+)", command) == proxy["cap_drop"]
    assert re.findall(r"--security-opt (\S+)", command) == proxy["security_opt"]
    assert re.findall(r"--cgroupns (\S+)", command) == [proxy["cgroup"]]
    assert re.findall(r"--tmpfs (\S+)", command) == proxy["tmpfs"]
    assert ("--read-only" in command) is proxy["read_only"] is True
    assert command.split()[-1 - len(proxy["command"]) :] == [proxy["image"], *proxy["command"]]
    assert "--privileged" not in command


def test_rights_are_those_of_the_table(compose: dict[str, Any]) -> None:
    """The page has a table of what each driver needs; the files give the sum of it for `local`, and nothing else."""
    named = sorted(least_rights())
    pod = yaml.safe_load_all((ROOT / "docker" / "deploy" / "kubernetes" / "forkpoint.yaml").read_text())
    (workload,) = [each for each in pod if each["kind"] == "StatefulSet"]
    (container,) = workload["spec"]["template"]["spec"]["containers"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": named}
    # What a proxy that is root does more: it restores checkpoints, and schedules itself.
    assert compose["services"]["proxy"]["cap_add"] == [name for name in named if name not in {"SYS_NICE", "SYS_TIME"}]
    assert compose["services"]["proxy"]["cap_drop"] == ["ALL"]


def test_port_is_published_on_loopback_only(compose: dict[str, Any]) -> None:
    assert all(port.startswith("127.0.0.1:") for port in compose["services"]["proxy"]["ports"])


def test_images_are_built_from_debian_packages(compose: dict[str, Any]) -> None:
    for service in compose["services"].values():
        build = service["build"]
        file = (ROOT / build["context"] / build["dockerfile"]).read_text()
        assert re.search(r"^ARG BASE=debian:\S+\nFROM \$BASE( AS build)?$", file, re.MULTILINE)
        assert "apt-get install" in file
        if service["image"] != "forkpoint":
            assert "pip install" not in file


def test_docker_folder_does_not_hide_the_sdk() -> None:
    """With a Python module in it, the folder would be imported as `docker`."""
    import docker  # noqa: PLC0415

    assert not list((ROOT / "docker").glob("*.py"))
    assert "site-packages" in (docker.__file__ or "")
