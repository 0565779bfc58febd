"""The call that a proxy suggests is one that it can answer."""

import shlex

import pytest

from proxy.first_call import SPECS, first_call
from sandboxes.plugins import DRIVERS, installed
from sandboxes.spec import EnvironmentSpec

URL = "http://127.0.0.1:8700"


def suggested(*drivers: str, default: str = "local", needs_token: bool = False) -> str:
    return first_call(URL, default, drivers, needs_token=needs_token)


def test_shells_by_default_are_called_at_once() -> None:
    assert suggested("sqlite", "local").startswith(f"try: curl -s {URL}/t/demo/r/1/shell/exec -d ")


@pytest.mark.parametrize("driver", [name for name in SPECS if name != "local"])
def test_other_drivers_are_suggested_with_a_valid_spec(driver: str) -> None:
    """Also where `local` is there, but the default is another one: a task without a spec would not be a shell."""
    (*_, body) = shlex.split(suggested(driver, "local", default=driver))
    assert EnvironmentSpec.model_validate_json(body).driver == driver
    assert "shell/exec" not in suggested(driver)


def test_each_driver_of_ours_that_can_be_alone_has_a_suggestion() -> None:
    """The `client` driver's tasks are described by what clients report."""
    assert set(SPECS) == set(installed(DRIVERS)) - {"client"}
    assert suggested("client") == f"describe a task: PUT {URL}/api/v1/tasks/demo, see {URL}/docs"


def test_token_is_part_of_the_suggestion() -> None:
    for drivers in (("local",), ("sqlite",)):
        assert '-H "x-forkpoint-token: $FORKPOINT_TOKEN"' in suggested(*drivers, needs_token=True)
