"""What images say about their processes, as strangers may write it."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandboxes.images.config import ImageConfig, ImageError


def test_config_is_read_as_docker_writes_it() -> None:
    config = ImageConfig.parse({
        "Env": ["PATH=/bin", "A=1=2", "A=3", "NAME"], "User": "app:app", "WorkingDir": "srv/../app",
        "Entrypoint": ["/init", "--"], "Cmd": None, "Healthcheck": {"Test": ["CMD-SHELL", "true"], "Interval": 3},
        "ExposedPorts": {"80/tcp": {}}, "Volumes": {"/data": {}}, "Labels": {"a": "b"}, "Tty": False,
    })  # fmt: skip
    assert config == ImageConfig(
        environment={"PATH": "/bin", "A": "3"}, user="app:app", workdir="/app", entrypoint=("/init", "--"),
        healthcheck=("CMD-SHELL", "true"), ports=("80/tcp",), volumes=("/data",), labels={"a": "b"},
    )  # fmt: skip
    assert ImageConfig.parse(config.members()) == config
    assert ImageConfig.parse(None) == ImageConfig()
    assert ImageConfig.parse({"Healthcheck": {"Test": ["NONE"]}, "Cmd": "sh"}) == ImageConfig(command=("sh",))


@pytest.mark.parametrize(
    "config",
    [[], {"Env": {"A": "1"}}, {"Env": [1]}, {"User": 0}, {"WorkingDir": "/a\0b"}, {"Cmd": ["\ud800"]},
     {"Healthcheck": "true"}, {"Volumes": {"data": {}}}, {"Labels": {"a": None}}, {"ExposedPorts": ["80/tcp"]}],
)  # fmt: skip
def test_wrong_member_is_named(config: Any) -> None:
    with pytest.raises(ImageError, match=r"its configuration has a|is no text"):
        ImageConfig.parse(config)


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["/..", "a/../../b", "//"]),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)
_NAMES = st.sampled_from(
    ["Env", "User", "WorkingDir", "Entrypoint", "Cmd", "Healthcheck", "ExposedPorts", "Volumes", "Labels", "Test"]
)


@given(_VALUES | st.dictionaries(_NAMES, _VALUES))
def test_any_config_is_read_or_refused(value: Any) -> None:
    """What is accepted can be given to a program, and can be written again."""
    try:
        config = ImageConfig.parse(value)
    except ImageError:
        return
    assert config.workdir.startswith("/")
    assert ".." not in config.workdir.split("/")
    assert ImageConfig.parse(config.members()) == config
    for text in (config.user, config.workdir, *config.entrypoint, *config.command, *config.environment.values()):
        assert b"\0" not in text.encode()
