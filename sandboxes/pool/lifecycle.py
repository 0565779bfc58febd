"""The states of a live sandbox and the events that change them, as a table (pure).

```
starting --started--> leased --release--> idle --lease--> leased
                        |                  ^
                        +--freeze--> freezing --frozen
any of them --close--> closed
```
"""

from enum import Enum

from sandboxes.state_table import StateTable


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


NEXT: StateTable[SandboxState, LifecycleEvent] = {
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
"""The state after an event."""
