"""Docker: requests are parsed, and what they run has keys."""

from typing import Any

import pytest

from proxy.compat.docker import requests as docker
from proxy.refusals import RefusalError
from proxy.tree.keys import call_key


def test_api_version_is_optional_and_bounded() -> None:
    """The path may begin with a version of the API; versions out of range are refused."""
    assert docker.read("GET", "/containers/json", "all=1", b"").segments == ("containers", "json")
    assert docker.read("GET", "/v1.41/containers/json", "", b"").segments == ("containers", "json")
    for path in ("/v1.99/info", "/v1.2/info"):
        with pytest.raises(RefusalError) as refused:
            docker.read("GET", path, "", b"")
        assert refused.value.status == 400


def test_encoded_slash_does_not_separate_segments() -> None:
    """Image names contain slashes, which clients encode."""
    assert docker.read("GET", "/images/a%2Fb:1/json", "", b"").segments == ("images", "a/b:1", "json")


def test_image_defaults_complete_a_create_request() -> None:
    """Entrypoint, command and directory come from the image, by Docker's rules."""
    config = {"Id": "sha256:abc", "Entrypoint": ["/entry"], "Cmd": ["serve"], "WorkingDir": "/srv"}
    plain = docker.container_spec({"Image": "x"}, config)
    assert (plain.main, plain.image_id) == (("/entry", "serve"), "sha256:abc")
    assert docker.container_spec({"Image": "x", "Cmd": ["other"]}, config).main == ("/entry", "other")
    assert docker.container_spec({"Image": "x", "Entrypoint": ["/mine"]}, config).main == ("/mine",)
    assert docker.container_spec({"Image": "x", "Entrypoint": [""], "Cmd": ["sleep", "1d"]}, config).main == ()
    environment = docker.environment({"Image": "x", "Env": ["A=1=2", "B"], "HostConfig": {"Memory": 64 << 20}}, config)
    assert (environment.workdir, dict(environment.env), environment.memory_mb) == ("/srv", {"A": "1=2"}, 64)


def test_entrypoint_before_waiting_command_runs_in_background() -> None:
    """An entrypoint that ends in a command that only waits is started, and its end is not awaited."""
    config = {"Entrypoint": ["/entry"], "Cmd": ["serve"]}
    spec = docker.container_spec({"Image": "x", "Cmd": ["sleep", "infinity"]}, config)
    assert (spec.main, spec.background) == (("/entry", "sleep", "infinity"), True)
    assert not docker.container_spec({"Image": "x"}, config).background
    assert not docker.container_spec({"Image": "x", "Cmd": ["sleep", "infinity"]}, {}).background


@pytest.mark.parametrize(
    "host",
    [
        {"Binds": ["/etc:/b"]},
        {"Binds": ["v:/b"]},
        {"Mounts": [{}]},
        {"DeviceRequests": [{"Count": 1}]},
        {"NetworkMode": "container:x"},
    ],
)
def test_unsupported_host_config_is_refused(host: dict[str, Any]) -> None:
    """A request for a missing feature fails at once instead of behaving differently later."""
    with pytest.raises(RefusalError) as refused:
        docker.container_spec({"Image": "x", "HostConfig": host}, {})
    assert refused.value.status == 400


def execution(**more: Any) -> docker.ExecSpec:
    return docker.exec_spec({"Cmd": ["ls", "-l"], "AttachStdout": True, "AttachStderr": True, **more}, "")


def test_exec_key_consists_of_what_runs() -> None:
    """The client's own settings are not in the key of an exec. Everything that changes what runs is."""
    same = call_key(execution().call())
    for more in ({"DetachKeys": "ctrl-p"}, {"ConsoleSize": [1, 2]}, {"AttachStdin": True}, {"Privileged": True}):
        assert call_key(execution(**more).call()) == same
    others = [
        execution(Cmd=["ls"]).call(), execution(Env=["A=1"]).call(), execution(WorkingDir="/tmp").call(),
        execution(User="daemon").call(), execution(Tty=True).call(), execution().call(b"stdin"),
        execution().call(detach=True),
    ]  # fmt: skip
    assert len({same, *map(call_key, others)}) == 1 + len(others)
