"""The call that a piece of code works for: which ingress it came through, and what the answer depends on."""

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass, field

from proxy.cluster.protocol import Position


@dataclass(slots=True, eq=False)
class Origin:
    """One call at the owner of its task.

    Attributes:
        ingress: Number of the ingress that the call came through.
        is_current: Returns whether the way that the call came by is still the latest one of its ingress.
        confirm: Returns whether an agent still waits for the call at its ingress.
        positions: Where rollouts are after this call, by number; None for a rollout that has ended.
        is_accepted: Whether this member, as the ingress, has kept where the call leads. Its answer must be passed on.
        pending: Completed when the lines that this call has written are in the log.
        is_stale: Whether the call was not admitted because a newer way of its ingress has replaced the one it came by.
    """

    ingress: int
    is_current: Callable[[], bool]
    confirm: Callable[[], Awaitable[bool]]
    positions: dict[int, Position | None] = field(default_factory=dict)
    is_accepted: bool = False
    pending: list[asyncio.Future[None]] = field(default_factory=list)
    is_stale: bool = False


ORIGIN: ContextVar[Origin | None] = ContextVar("forkpoint_cluster_origin", default=None)
"""The call that the current task works for. None: a call of an own agent that is answered without an await."""
