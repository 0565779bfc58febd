"""The states of a sandbox, as the table has them."""

import itertools

import pytest

from sandboxes.pool.lifecycle import NEXT, LifecycleEvent, SandboxState, after


def reachable(state: SandboxState) -> set[SandboxState]:
    found, ahead = {state}, [state]
    while ahead:
        here = ahead.pop()
        for (source, _), target in NEXT.items():
            if source is here and target not in found:
                found.add(target)
                ahead.append(target)
    return found


def test_every_state_is_reached_from_starting() -> None:
    assert reachable(SandboxState.STARTING) == set(SandboxState)


def test_every_state_can_be_closed() -> None:
    for state in set(SandboxState) - {SandboxState.CLOSED}:
        assert after(state, LifecycleEvent.CLOSE) is SandboxState.CLOSED


def test_closed_state_has_no_successor() -> None:
    assert reachable(SandboxState.CLOSED) == {SandboxState.CLOSED}


def test_leased_sandbox_cannot_be_leased() -> None:
    leases = {
        source
        for (source, event), target in NEXT.items()
        if target is SandboxState.LEASED and event is LifecycleEvent.LEASE
    }
    assert leases == {SandboxState.IDLE}


@pytest.mark.parametrize(
    ("state", "event"),
    sorted(set(itertools.product(SandboxState, LifecycleEvent)) - NEXT.keys(), key=str),
    ids=lambda part: part.value,
)
def test_missing_step_raises(state: SandboxState, event: LifecycleEvent) -> None:
    with pytest.raises(ValueError, match=f"a sandbox that is {state.value} cannot {event.value}"):
        after(state, event)
