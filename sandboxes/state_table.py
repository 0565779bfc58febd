"""State machines as tables (pure)."""

from enum import Enum
from typing import TypeVar

StateT = TypeVar("StateT", bound=Enum)
EventT = TypeVar("EventT", bound=Enum)
StateTable = dict[tuple[StateT, EventT], StateT]
"""The next state for each pair of a state and an event. A pair that is missing is impossible."""


def next_state(table: StateTable[StateT, EventT], state: StateT, event: EventT) -> StateT:
    """Return the state that follows an event; one that is impossible here raises ValueError."""
    following = table.get((state, event))
    if following is None:
        raise ValueError(f"{type(state).__name__}.{state.name} has no transition for {event.name}.")
    return following
