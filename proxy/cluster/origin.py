"""The call that a piece of code works for: which ingress it came through, and under which number."""

from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass

from proxy.cluster.protocol import StepId


@dataclass(slots=True, eq=False)
class Origin:
    """One call at the owner of its task."""

    ingress: int  # Number of the ingress that the call came through.
    boot: int
    number: int
    oldest: int  # Number of the oldest call that the ingress still waits for.
    is_again: bool  # Whether the agent itself makes it again, after it was told to.
    # Returns whether the way that the call came by is still the latest one of its ingress.
    is_current: Callable[[], bool]
    confirm: Callable[[], Awaitable[bool]]  # Returns whether an agent still waits for the call at its ingress.
    steps: int = 0  # How many steps it has taken.
    # Whether the call was answered, or its stream has ended. What goes on in the background is no late copy.
    is_over: bool = False

    @property
    def call(self) -> StepId:
        """Its next step."""
        return StepId(self.ingress, self.boot, self.number, self.steps)


ORIGIN: ContextVar[Origin | None] = ContextVar("forkpoint_cluster_origin", default=None)
"""The call that the current task works for. None: this member calls for itself."""
