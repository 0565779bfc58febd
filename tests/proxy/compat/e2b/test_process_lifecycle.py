"""The transition table of E2B processes."""

from proxy.compat.e2b.process_lifecycle import NEXT, ProcessChange, ProcessState
from sandboxes.state_table import next_state
from tests.reachable_states import reachable


def test_every_state_is_reachable() -> None:
    """Every state is reached from NOT_STARTED by some sequence of changes."""
    assert reachable(NEXT, ProcessState.NOT_STARTED) == set(ProcessState)


def test_retry_is_possible_in_every_state() -> None:
    """A client may lose its connection at any time and send its start again."""
    assert {next_state(NEXT, state, ProcessChange.RETRY) for state in ProcessState} == {ProcessState.ADOPTED}


def test_only_fresh_start_is_followed() -> None:
    """Output is sent while the call runs only to the first stream; an adopted run waits for its record."""
    sources = {source for (source, _), target in NEXT.items() if target is ProcessState.FOLLOWED}
    assert sources == {ProcessState.NOT_STARTED}


def test_ended_process_stays_ended() -> None:
    """After its end a process can only be asked for again."""
    assert {change for source, change in NEXT if source is ProcessState.ENDED} == {ProcessChange.RETRY}
