"""The transition table of Docker's containers, and the states of exec instances."""

import itertools

import pytest

from proxy.compat.docker.containers import NEXT, Container, ContainerChange, ContainerState, Exec, ExecState
from proxy.compat.docker.requests import container_spec, exec_spec


def container(state: ContainerState = ContainerState.CREATED) -> Container:
    return Container("id", "name", "task", "", "rollout", container_spec({"Image": "x"}, {}), 0.0, state=state)


def test_every_state_is_reachable() -> None:
    """Every state is reached from CREATED by some sequence of changes."""
    reached, pending = {ContainerState.CREATED}, [ContainerState.CREATED]
    while pending:
        state = pending.pop()
        targets = {target for (source, _), target in NEXT.items() if source is state} - reached
        reached |= targets
        pending += targets
    assert reached == set(ContainerState)


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


@pytest.mark.parametrize(
    ("state", "change"),
    sorted(set(itertools.product(ContainerState, ContainerChange)) - NEXT.keys(), key=str),
    ids=lambda part: part.value,
)
def test_missing_transition_raises(state: ContainerState, change: ContainerChange) -> None:
    """A transition that the table lacks is an error of the program."""
    with pytest.raises(ValueError, match=f"A container that is {state.value} cannot {change.value}"):
        container(state).change(change)


def test_detached_exec_stays_running() -> None:
    """The end of a detached instance is not observed, so it has no exit code."""
    instance = Exec("id", container(), exec_spec({"Cmd": ["ls"]}, ""))
    instance.exit(None)
    assert (instance.state, instance.exit_code) == (ExecState.RUNNING, None)
    instance.exit(3)
    assert (instance.state, instance.exit_code) == (ExecState.EXITED, 3)
