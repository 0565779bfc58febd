"""The transition table of Docker's containers, and the states of exec instances."""

import pytest

from proxy.compat.docker.containers import NEXT, Container, ContainerChange, ContainerState, Exec, ExecState
from proxy.compat.docker.requests import container_spec, exec_spec
from tests.reachable_states import reachable


def container(state: ContainerState = ContainerState.CREATED) -> Container:
    return Container("id", "name", "task", "", "rollout", container_spec({"Image": "x"}, {}), 0.0, state=state)


def test_every_state_is_reachable() -> None:
    """Every state is reached from CREATED by some sequence of changes."""
    assert reachable(NEXT, ContainerState.CREATED) == set(ContainerState)


def test_exited_container_can_start_again() -> None:
    """`docker start` restarts a container that has exited."""
    restarted = container(ContainerState.EXITED)
    restarted.change(ContainerChange.START)
    assert restarted.is_running


def test_removed_container_stays_removed() -> None:
    """No change leads out of REMOVED."""
    assert {target for (source, _), target in NEXT.items() if source is ContainerState.REMOVED} == {
        ContainerState.REMOVED
    }


def test_created_container_cannot_exit() -> None:
    """A transition that the table lacks is an error of the program."""
    with pytest.raises(ValueError, match=r"ContainerState\.CREATED has no transition for EXIT"):
        container().change(ContainerChange.EXIT)


def test_detached_exec_stays_running() -> None:
    """The end of a detached instance is not observed, so it has no exit code."""
    instance = Exec("id", container(), exec_spec({"Cmd": ["ls"]}, ""))
    instance.exit(None)
    assert (instance.state, instance.exit_code) == (ExecState.RUNNING, None)
    instance.exit(3)
    assert (instance.state, instance.exit_code) == (ExecState.EXITED, 3)
