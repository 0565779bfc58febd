"""The states of a live sandbox and the events that change them, as a table (pure).

```
starting --started--> leased --release--> idle --lease--> leased
                        |                  ^
                        +--freeze--> freezing --frozen
any of them --close--> closed
```
"""

from enum import Enum


class SandboxState(Enum):
    """What happens with a sandbox at the moment. A closed sandbox is in no list."""

    STARTING = "starting"
    LEASED = "leased"
    FREEZING = "freezing"
    IDLE = "idle"
    CLOSED = "closed"


class LifecycleEvent(Enum):
    """What may happen to a sandbox."""

    STARTED = "started"
    LEASE = "lease"
    RELEASE = "release"
    FREEZE = "freeze"
    FROZEN = "frozen"
    CLOSE = "close"


NEXT: dict[tuple[SandboxState, LifecycleEvent], SandboxState] = {
    # The caller that started a sandbox has the first lease on it.
    (SandboxState.STARTING, LifecycleEvent.STARTED): SandboxState.LEASED,
    (SandboxState.LEASED, LifecycleEvent.RELEASE): SandboxState.IDLE,
    (SandboxState.IDLE, LifecycleEvent.LEASE): SandboxState.LEASED,
    # A snapshot needs files that do not change, so a freezing sandbox cannot be leased. Callers wait milliseconds.
    (SandboxState.LEASED, LifecycleEvent.FREEZE): SandboxState.FREEZING,
    (SandboxState.FREEZING, LifecycleEvent.FROZEN): SandboxState.IDLE,
    (SandboxState.STARTING, LifecycleEvent.CLOSE): SandboxState.CLOSED,
    (SandboxState.LEASED, LifecycleEvent.CLOSE): SandboxState.CLOSED,
    (SandboxState.FREEZING, LifecycleEvent.CLOSE): SandboxState.CLOSED,
    (SandboxState.IDLE, LifecycleEvent.CLOSE): SandboxState.CLOSED,
}
"""The state after an event. Pairs that are missing cannot happen."""


def after(state: SandboxState, event: LifecycleEvent) -> SandboxState:
    """Return the state that follows an event.

    Raises:
        ValueError: The table has no such step.
    """
    try:
        return NEXT[state, event]
    except KeyError:
        raise ValueError(f"a sandbox that is {state.value} cannot {event.value}") from None
