"""What a table of states can reach."""

from sandboxes.state_table import EventT, StateT, StateTable


def reachable(table: StateTable[StateT, EventT], start: StateT) -> set[StateT]:
    """Return the states that some sequence of events leads to from a state, and that state."""
    reached, pending = {start}, [start]
    while pending:
        state = pending.pop()
        targets = {target for (source, _), target in table.items() if source is state} - reached
        reached |= targets
        pending += targets
    return reached
