"""Side services in a spec: what is allowed, and in which order they start."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from sandboxes.server_spec import start_order, words
from sandboxes.spec import EnvironmentSpec

IMAGE = {"image": "x"}


def spec(**more: Any) -> EnvironmentSpec:
    return EnvironmentSpec(image="m", **more)


def test_services_start_after_those_they_depend_on() -> None:
    """The order does not depend on the order of the members, which equal specs may write differently."""
    web = {"image": "x", "depends_on": ["db", "cache"]}
    members = {"web": web, "db": IMAGE, "cache": IMAGE}
    turned = dict(reversed(members.items()))
    assert start_order(spec(services=members).services) == start_order(spec(services=turned).services)
    assert start_order(spec(services=members).services)[-1] == "web"


def test_command_text_is_split_into_words() -> None:
    assert words("run 'a b' c") == ["run", "a b", "c"]
    assert words(("run", "a b")) == ["run", "a b"]


@pytest.mark.parametrize(
    ("members", "problem"),
    [
        ({"services": {"../x": IMAGE}}, "services"),
        ({"services": {"X": IMAGE}}, "services"),
        ({"services": {".x": IMAGE}}, "services"),
        ({"services": {"main": IMAGE}}, "cannot be named"),
        ({"services": {"localhost": IMAGE}}, "cannot be named"),
        ({"services": {f"s{n}": IMAGE for n in range(17)}}, "at most 16"),
        ({"services": {"a": {"image": "x", "privileged": True}}}, "privileged"),
        ({"services": {"a": {"image": "x", "user": "a b"}}}, "user"),
        ({"services": {"a": {"image": "x", "environment": {"A B": "c"}}}}, "environment"),
        ({"services": {"a": {"image": "x", "depends_on": ["b"]}}}, "not a service"),
        ({"services": {"a": {"image": "x", "depends_on": ["a"]}}}, "circle"),
        ({"services": {"a": {"image": "x", "command": "echo 'a"}}}, "quotation"),
        ({"services": {"a": {"image": "x", "healthcheck": ["true"]}}}, "neither CMD"),
        ({"services": {"a": IMAGE}, "volumes": {"v": {"a": "/x"}}}, "fewer than two"),
        ({"services": {"a": IMAGE}, "volumes": {"v": {"a": "/x", "b": "/y"}}}, "not a service"),
        ({"services": {"a": IMAGE}, "volumes": {"v": {"a": "/x/../../y", "main": "/y"}}}, "'..'"),
        ({"services": {"a": IMAGE}, "volumes": {"v": {"a": "/", "main": "/y"}}}, "volumes"),
        ({"services": {"a": IMAGE}, "volumes": {"v": {"a": "/x\n/etc", "main": "/y"}}}, "volumes"),
        (
            {"services": {"a": IMAGE}, "volumes": {"v": {"a": "/x", "main": "/y"}, "w": {"main": "/y", "a": "/z"}}},
            "two",
        ),
    ],
)
def test_wrong_services_are_refused(members: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        spec(**members)


def test_example_is_a_spec() -> None:
    example = Path(__file__).parents[2] / "examples" / "services.json"
    assert start_order(EnvironmentSpec.model_validate_json(example.read_bytes()).services) == ["cache", "web"]


def test_services_run_beside_an_image_only() -> None:
    with pytest.raises(ValidationError, match="beside an image"):
        EnvironmentSpec.model_validate({"services": {"a": IMAGE}})


def test_specs_that_keep_the_head_of_outputs_keep_their_root() -> None:
    assert "output_keep" not in spec().root()["limits"]
    assert spec(limits={"output_keep": "ends"}).root()["limits"]["output_keep"] == "ends"


def test_specs_without_services_keep_their_root() -> None:
    assert not {"services", "volumes"} & spec().root().keys()
    assert spec(services={"a": IMAGE}).root()["services"]["a"]["image"] == "x"
