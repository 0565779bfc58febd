"""The transition table of E2B processes."""

import itertools

import pytest

from proxy.compat.e2b.process_lifecycle import NEXT, ProcessChange, ProcessState, after


def test_every_state_is_reachable() -> None:
    """Every state is reached from NOT_STARTED by some sequence of changes."""
    reached, pending = {ProcessState.NOT_STARTED}, [ProcessState.NOT_STARTED]
    while pending:
        state = pending.pop()
        targets = {target for (source, _), target in NEXT.items() if source is state} - reached
        reached |= targets
        pending += targets
    assert reached == set(ProcessState)


def test_retry_is_possible_in_every_state() -> None:
    """A client may lose its connection at any time and send its start again."""
    assert {after(state, ProcessChange.RETRY) for state in ProcessState} == {ProcessState.ADOPTED}


def test_only_fresh_start_is_followed() -> None:
    """Output is sent while the call runs only to the first stream; an adopted run waits for its record."""
    sources = {source for (source, _), target in NEXT.items() if target is ProcessState.FOLLOWED}
    assert sources == {ProcessState.NOT_STARTED}


def test_ended_process_stays_ended() -> None:
    """After its end a process can only be asked for again."""
    assert {change for source, change in NEXT if source is ProcessState.ENDED} == {ProcessChange.RETRY}


@pytest.mark.parametrize(
    ("state", "change"),
    sorted(set(itertools.product(ProcessState, ProcessChange)) - NEXT.keys(), key=str),
    ids=lambda part: part.value,
)
def test_missing_transition_raises(state: ProcessState, change: ProcessChange) -> None:
    """A transition that the table lacks is an error of the program."""
    with pytest.raises(ValueError, match=f"A process that is {state.value} cannot {change.value}"):
        after(state, change)
