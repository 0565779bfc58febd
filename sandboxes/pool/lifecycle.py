"""The states of a live sandbox, written down (pure)."""

from enum import Enum


class SandboxState(Enum):
    """What is going on with a sandbox. A closed one is nowhere listed."""

    STARTING = "starting"
    LEASED = "leased"
    FREEZING = "freezing"
    IDLE = "idle"
    CLOSED = "closed"


class LifecycleEvent(Enum):
    """What may happen to one."""

    STARTED = "started"
    LEASE = "lease"
    RELEASE = "release"
    FREEZE = "freeze"
    FROZEN = "frozen"
    CLOSE = "close"


NEXT: dict[tuple[SandboxState, LifecycleEvent], SandboxState] = {
    # Whoever asked for a sandbox has it first.
    (SandboxState.STARTING, LifecycleEvent.STARTED): SandboxState.LEASED,
    (SandboxState.LEASED, LifecycleEvent.RELEASE): SandboxState.IDLE,
    (SandboxState.IDLE, LifecycleEvent.LEASE): SandboxState.LEASED,
    # A snapshot needs still files, so nobody runs in a sandbox that freezes; who wants it waits some milliseconds.
    (SandboxState.LEASED, LifecycleEvent.FREEZE): SandboxState.FREEZING,
    (SandboxState.FREEZING, LifecycleEvent.FROZEN): SandboxState.IDLE,
    (SandboxState.STARTING, LifecycleEvent.CLOSE): SandboxState.CLOSED,
    (SandboxState.LEASED, LifecycleEvent.CLOSE): SandboxState.CLOSED,
    (SandboxState.FREEZING, LifecycleEvent.CLOSE): SandboxState.CLOSED,
    (SandboxState.IDLE, LifecycleEvent.CLOSE): SandboxState.CLOSED,
}


def after(state: SandboxState, event: LifecycleEvent) -> SandboxState:
    """Return the state that event leads to.

    Raises:
        ValueError: the table has no such step.
    """
    try:
        return NEXT[state, event]
    except KeyError:
        raise ValueError(f"a sandbox that is {state.value} cannot {event.value}") from None
