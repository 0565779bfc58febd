"""A table of states knows the next state, and refuses what it does not contain."""

from enum import Enum

import pytest

from sandboxes.state_table import StateTable, next_state


class Door(Enum):
    OPEN = "open"
    SHUT = "shut"


class Push(Enum):
    CLOSE = "close"


TABLE: StateTable[Door, Push] = {(Door.OPEN, Push.CLOSE): Door.SHUT}


def test_event_leads_to_the_next_state() -> None:
    assert next_state(TABLE, Door.OPEN, Push.CLOSE) is Door.SHUT


def test_missing_transition_raises() -> None:
    """A transition that the table lacks is an error of the program."""
    with pytest.raises(ValueError, match=r"Door\.SHUT has no transition for CLOSE"):
        next_state(TABLE, Door.SHUT, Push.CLOSE)
