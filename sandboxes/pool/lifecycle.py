"""The states of a live sandbox, written down (pure)."""

from enum import Enum


class State(Enum):
    """What is going on with a sandbox. A closed one is nowhere listed."""

    STARTING = "starting"
    LEASED = "leased"
    FREEZING = "freezing"
    IDLE = "idle"
    CLOSED = "closed"


class Event(Enum):
    """What may happen to one."""

    STARTED = "started"
    LEASE = "lease"
    RELEASE = "release"
    FREEZE = "freeze"
    FROZEN = "frozen"
    CLOSE = "close"


NEXT: dict[tuple[State, Event], State] = {
    # Whoever asked for a sandbox has it first.
    (State.STARTING, Event.STARTED): State.LEASED,
    (State.LEASED, Event.RELEASE): State.IDLE,
    (State.IDLE, Event.LEASE): State.LEASED,
    # A snapshot needs still files, so nobody runs in a sandbox that freezes; who wants it waits some milliseconds.
    (State.LEASED, Event.FREEZE): State.FREEZING,
    (State.FREEZING, Event.FROZEN): State.IDLE,
    (State.STARTING, Event.CLOSE): State.CLOSED,
    (State.LEASED, Event.CLOSE): State.CLOSED,
    (State.FREEZING, Event.CLOSE): State.CLOSED,
    (State.IDLE, Event.CLOSE): State.CLOSED,
}


def after(state: State, event: Event) -> State:
    """Return the state that event leads to.

    Raises:
        ValueError: the table has no such step.
    """
    try:
        return NEXT[state, event]
    except KeyError:
        raise ValueError(f"a sandbox that is {state.value} cannot {event.value}") from None
