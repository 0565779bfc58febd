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
        in_log: Whether the log must have the steps of this call, because no answer to it carries where they lead: it is
            a stream, or it was answered and goes on in the background.
        is_over: Whether the call was answered, or its stream has ended.
        is_stale: Whether the call was not admitted because a newer way of its ingress has replaced the one it came by.
    """

    ingress: int
    is_current: Callable[[], bool]
    confirm: Callable[[], Awaitable[bool]]
    positions: dict[int, Position | None] = field(default_factory=dict)
    is_accepted: bool = False
    pending: list[asyncio.Future[None]] = field(default_factory=list)
    in_log: bool = False
    is_over: bool = False
    is_stale: bool = False

    def end(self) -> None:
        """Note that nothing more is sent for this call."""
        self.in_log = self.is_over = True


ORIGIN: ContextVar[Origin | None] = ContextVar("forkpoint_cluster_origin", default=None)
"""The call that the current task works for. None: a call of an own agent that is answered without an await."""
