"""The states of a sandbox, as the table has them."""

from sandboxes.pool.lifecycle import NEXT, LifecycleEvent, SandboxState
from sandboxes.state_table import next_state
from tests.reachable_states import reachable


def test_every_state_is_reached_from_starting() -> None:
    assert reachable(NEXT, SandboxState.STARTING) == set(SandboxState)


def test_every_state_can_be_closed() -> None:
    for state in set(SandboxState) - {SandboxState.CLOSED}:
        assert next_state(NEXT, state, LifecycleEvent.CLOSE) is SandboxState.CLOSED


def test_closed_state_has_no_successor() -> None:
    assert reachable(NEXT, SandboxState.CLOSED) == {SandboxState.CLOSED}


def test_leased_sandbox_cannot_be_leased() -> None:
    leases = {
        source
        for (source, event), target in NEXT.items()
        if target is SandboxState.LEASED and event is LifecycleEvent.LEASE
    }
    assert leases == {SandboxState.IDLE}
