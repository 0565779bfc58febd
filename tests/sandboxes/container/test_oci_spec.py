"""Which containers of Docker's can be followed without it. No container is started here."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sandboxes.container import oci_spec
from sandboxes.container.boot_scripts import BOX
from sandboxes.container.daemon import RunningContainer
from sandboxes.container.oci_spec import Pattern, UnfitError, group_of, read_pattern, runtime_of

INFO = {
    "DefaultRuntime": "runc", "Runtimes": {"runc": {"path": "sh"}}, "CgroupDriver": "cgroupfs",
    "SecurityOptions": ["name=seccomp,profile=default", "name=apparmor"],
}  # fmt: skip
SPECIFICATION: dict[str, Any] = {
    "process": {"args": ["/bin/sh"], "apparmorProfile": "docker-default"},
    "root": {"path": "/var/lib/docker/overlay2/1/merged"},
    "mounts": [
        {"destination": "/proc", "type": "proc", "source": "proc"},
        {"destination": BOX, "type": "bind", "source": "/boxes/1/box", "options": ["ro"]},
        {"destination": "/etc/hostname", "type": "bind", "source": "/var/lib/docker/containers/1/hostname"},
        {"destination": "/data", "type": "bind", "source": "/var/lib/docker/volumes/1/_data"},
    ],
    "hooks": {},
    "linux": {
        "seccomp": {"defaultAction": "SCMP_ACT_ERRNO"},
        "cgroupsPath": "/docker/123",
        "namespaces": [{"type": kind} for kind in ("mount", "network", "uts", "pid", "ipc", "cgroup")],
    },
}


def test_runtime_is_the_one_that_docker_has(tmp_path: Path) -> None:
    info = {**INFO, "DockerRootDir": str(tmp_path)}
    path = runtime_of(info, tmp_path)[0]
    assert path.endswith("/sh")
    assert runtime_of(info, tmp_path) == (path,)
    assert runtime_of({**info, "CgroupDriver": "systemd"}, tmp_path) == (path, "--systemd-cgroup")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"DefaultRuntime": "runsc"}, "runtime is 'runsc'"),
        ({"DefaultRuntime": None}, "runtime is None"),
        ({"SecurityOptions": ["name=seccomp", "name=userns"]}, "userns"),
        ({"SecurityOptions": ["name=rootless"]}, "rootless"),
        ({"SecurityOptions": ["name=selinux"]}, "selinux"),
        ({"Runtimes": {"runc": {"path": "no-such-runtime"}}}, "there is no 'runc' here"),
        # Files of the image and of the container would be on different devices, which programs can see.
        ({"DockerRootDir": "/proc"}, "another file system"),
        ({"DockerRootDir": "/no/such/directory"}, "another file system"),
    ],
)
def test_a_daemon_that_does_more_starts_its_containers(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    """An operator who chose gVisor must not get runc."""
    with pytest.raises(UnfitError, match=says):
        runtime_of({**INFO, "DockerRootDir": str(tmp_path), **change}, tmp_path)


@pytest.mark.parametrize("name", ["a,b", "a:b", "a\\b"])
def test_options_of_an_overlay_cannot_hold_each_path(tmp_path: Path, name: str) -> None:
    """A comma would begin another option."""
    (tmp_path / name).mkdir()
    with pytest.raises(UnfitError, match="has a comma"):
        runtime_of({**INFO, "DockerRootDir": str(tmp_path)}, tmp_path / name)


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, Any]], Pattern]:
    """Reads a specification as the one of this process, as if it were a container."""
    monkeypatch.setattr(oci_spec, "_bundle", lambda _pid: tmp_path)
    monkeypatch.setattr(oci_spec, "_overlay", lambda *_: ("lowerdir=l/A:l/B", "index=off"))
    upper = tmp_path / "overlay2" / "1" / "diff"
    upper.mkdir(parents=True)
    container = RunningContainer("123", os.getpid(), str(upper), ("/image",))

    def read(specification: dict[str, Any]) -> Pattern:
        (tmp_path / "config.json").write_text(json.dumps(specification))
        return read_pattern(container, ("/usr/bin/runc",))

    return read


def _with(part: str, **changes: Any) -> dict[str, Any]:
    return {**SPECIFICATION, part: {**SPECIFICATION[part], **changes}}


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        (_with("linux", namespaces=[{"type": "user"}]), "shares a namespace"),
        (_with("linux", namespaces=[{"type": "network", "path": "/proc/1/ns/net"}]), "shares a namespace"),
        (_with("hooks", prestart=[{"path": "/usr/bin/nvidia-container-runtime-hook"}]), "programs run at the start"),
        (_with("process", selinuxLabel="container_t"), "SELinux"),
        (_with("linux", seccomp=None), "not one that is known"),
        ({**SPECIFICATION, "mounts": SPECIFICATION["mounts"][:1]}, "no box"),
        ({**SPECIFICATION, "mounts": [*SPECIFICATION["mounts"], SPECIFICATION["mounts"][1]]}, "no box"),
    ],
)
def test_what_is_not_known_is_left_to_docker(
    read: Callable[[dict[str, Any]], Pattern], changed: dict[str, Any], says: str
) -> None:
    with pytest.raises(UnfitError, match=says):
        read(changed)


def test_unreadable_is_unfit(read: Callable[[dict[str, Any]], Pattern], monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(_pid: int) -> Path:
        raise FileNotFoundError

    monkeypatch.setattr(oci_spec, "_bundle", gone)
    with pytest.raises(UnfitError, match="cannot be read"):
        read(SPECIFICATION)


@pytest.mark.parametrize(
    ("group", "own", "removed"),
    [
        ("/docker/123", "/docker/forkpoint-a", "/docker/forkpoint-a"),
        ("system.slice:docker:123", "system.slice:docker:forkpoint-a", ""),
    ],
)
def test_only_paths_and_names_change(
    read: Callable[[dict[str, Any]], Pattern], tmp_path: Path, group: str, own: str, removed: str
) -> None:
    """The rest is Docker's, and nothing of the pattern's own files is mounted. Systemd removes its groups itself."""
    pattern, folder = read(_with("linux", cgroupsPath=group)), tmp_path / "container"
    order = pattern.prepare(tmp_path / "box", folder, "forkpoint-a")
    config = json.loads((folder / "config.json").read_bytes())
    assert config["root"] == {"path": f"{folder}/root"}
    assert [mount["destination"] for mount in config["mounts"]] == ["/proc", BOX]
    assert config["mounts"][1]["source"] == f"{tmp_path}/box"
    assert config["linux"] == {**SPECIFICATION["linux"], "cgroupsPath": own}
    assert config["process"].pop("rlimits")
    assert config["process"] == SPECIFICATION["process"]
    assert order.options == f"lowerdir=l/A:l/B,index=off,upperdir={folder}/upper,workdir={folder}/work,volatile"
    assert (order.group, order.pattern, order.pattern_container) == (removed, os.getpid(), "123")
    assert group_of(folder) == removed
    assert folder.stat().st_mode & 0o777 == 0o700
    # The pattern serves again.
    assert pattern.prepare(tmp_path / "box2", tmp_path / "other", "forkpoint-b").folder == f"{tmp_path}/other"


def test_limits_of_a_specification_stay(read: Callable[[dict[str, Any]], Pattern]) -> None:
    limits = [{"type": "RLIMIT_NOFILE", "soft": 5, "hard": 6}]
    assert read(_with("process", rlimits=limits)).specification["process"]["rlimits"] == limits


def test_a_half_made_container_has_no_groups(tmp_path: Path) -> None:
    assert group_of(tmp_path) == ""
    (tmp_path / "config.json").write_text("{")
    assert group_of(tmp_path) == ""
