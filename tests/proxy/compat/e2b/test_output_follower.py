"""E2B: when background processes are polled."""

import asyncio
from typing import Any, cast

import pytest

from proxy.compat.e2b.event_stream import EventStream, StreamForm
from proxy.compat.e2b.output_follower import (
    MAX_BUSY_POLL_S,
    MAX_POLL_S,
    UNATTENDED_POLL_S,
    FollowedProcess,
    FollowedRollout,
)


async def ignore(_message: Any) -> None:
    """Accept a message of a response."""


def followed(*processes: FollowedProcess) -> FollowedRollout:
    # What is tested here does not look at the rollout.
    return FollowedRollout(cast("Any", None), dict(enumerate(processes)))


def stream(form: StreamForm = "process", *, closed: bool = False) -> EventStream:
    made = EventStream(ignore, keepalive_s=60.0, deadline_s=None, form=form)
    if closed:
        made.end()
    return made


@pytest.mark.parametrize(
    ("form", "produced", "max_pause_s"),
    [
        ("process", False, MAX_POLL_S),
        ("process", True, MAX_BUSY_POLL_S),
        ("terminal", True, MAX_POLL_S),
        ("watch", True, MAX_POLL_S),
    ],
)
def test_only_shared_busy_processes_are_polled_rarely(form: StreamForm, *, produced: bool, max_pause_s: float) -> None:
    """Polls of a busy process create nodes that other rollouts must follow; those of terminals and watches do not."""

    async def go() -> float:
        return followed(FollowedProcess([stream(form)])).max_pause_s(produced=produced)

    assert asyncio.run(go()) == max_pause_s


def test_terminal_without_client_is_kept_in_use() -> None:
    """A terminal is polled even while no client is connected; any other process is not."""

    async def go() -> tuple[bool, float, bool]:
        terminal = followed(FollowedProcess([stream(closed=True)], is_terminal=True))
        process = followed(FollowedProcess([stream(closed=True)]))
        return terminal.is_followed(), terminal.max_pause_s(produced=False), process.is_followed()

    assert asyncio.run(go()) == (True, UNATTENDED_POLL_S, False)
