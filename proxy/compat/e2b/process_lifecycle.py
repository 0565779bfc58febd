"""The states of an E2B process as its clients see it, as a table (pure).

```
NOT_STARTED ──start──▶ FOLLOWED ──detach──▶ DETACHED ──end──▶ ENDED
any state ──retry──▶ ADOPTED ──detach──▶ DETACHED
any state but ENDED ──end──▶ ENDED
```

The state decides where a stream's output comes from. In FOLLOWED the running call sends it piece by piece. In ADOPTED
the recorded result is sent once the call has ended. In DETACHED `OutputFollower` polls for it.
"""

from enum import Enum

from sandboxes.state_table import StateTable


class ProcessState(Enum):
    """Where a process stands between the request that starts it and its end."""

    NOT_STARTED = "not started"
    """The call waits for its turn, for a sandbox, or for another rollout's execution of the same call."""
    FOLLOWED = "followed"
    """The process runs, and its output reaches the client's stream as it is produced."""
    ADOPTED = "adopted"
    """The client lost its stream and sent the start again. The new stream gets the whole result when it is recorded."""
    DETACHED = "detached"
    """The start is recorded and the process continues in the background. Its further output is polled."""
    ENDED = "ended"
    """The process has exited, was killed, or could not be started."""


class ProcessChange(Enum):
    """What can happen to a process or to its client."""

    START = "start"
    """The sandbox has started the process."""
    RETRY = "retry"
    """The client sent the same start again after it had lost its stream."""
    DETACH = "detach"
    """A result was recorded while the process still runs."""
    END = "end"
    """A recorded result contains the end of the process."""


NEXT: StateTable[ProcessState, ProcessChange] = {
    (ProcessState.NOT_STARTED, ProcessChange.START): ProcessState.FOLLOWED,
    (ProcessState.NOT_STARTED, ProcessChange.RETRY): ProcessState.ADOPTED,
    # A rollout that waited for another rollout's execution sees only the record: no START reaches it.
    (ProcessState.NOT_STARTED, ProcessChange.DETACH): ProcessState.DETACHED,
    (ProcessState.NOT_STARTED, ProcessChange.END): ProcessState.ENDED,
    (ProcessState.FOLLOWED, ProcessChange.RETRY): ProcessState.ADOPTED,
    (ProcessState.FOLLOWED, ProcessChange.DETACH): ProcessState.DETACHED,
    (ProcessState.FOLLOWED, ProcessChange.END): ProcessState.ENDED,
    # The first stream is gone, so output that arrives now is not sent before it is recorded.
    (ProcessState.ADOPTED, ProcessChange.START): ProcessState.ADOPTED,
    (ProcessState.ADOPTED, ProcessChange.RETRY): ProcessState.ADOPTED,
    (ProcessState.ADOPTED, ProcessChange.DETACH): ProcessState.DETACHED,
    (ProcessState.ADOPTED, ProcessChange.END): ProcessState.ENDED,
    # The start is recorded: a retry is answered with that record and runs nothing.
    (ProcessState.DETACHED, ProcessChange.RETRY): ProcessState.ADOPTED,
    (ProcessState.ENDED, ProcessChange.RETRY): ProcessState.ADOPTED,
    # A poll returned output, and the process still runs.
    (ProcessState.DETACHED, ProcessChange.DETACH): ProcessState.DETACHED,
    (ProcessState.DETACHED, ProcessChange.END): ProcessState.ENDED,
}
"""The state after each change."""
