"""What a container and an exec instance are, and the states of a container as a table (pure).

```
CREATED ──start──▶ RUNNING ──exit──▶ EXITED ──start──▶ RUNNING
any state but REMOVED ──remove──▶ REMOVED
```
A container is a rollout. It needs no process to be RUNNING: a main command that only waits is never executed.
"""

from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Any

from proxy.compat.docker.requests import ContainerSpec, ExecSpec
from sandboxes.listener import Headers
from sandboxes.state_table import StateTable, next_state


class ContainerState(StrEnum):
    """The state of a container. The values are Docker's, and are stored."""

    CREATED = "created"
    """The rollout exists, and nothing has run in it."""
    RUNNING = "running"
    """Execs are accepted."""
    EXITED = "exited"
    """The main command has ended, or the container was stopped. Its files stay."""
    REMOVED = "removed"
    """The rollout is finished. The container is not listed any more."""


class ContainerChange(Enum):
    """What can happen to a container."""

    START = "start"
    EXIT = "exit"
    REMOVE = "remove"


NEXT: StateTable[ContainerState, ContainerChange] = {
    (ContainerState.CREATED, ContainerChange.START): ContainerState.RUNNING,
    (ContainerState.EXITED, ContainerChange.START): ContainerState.RUNNING,
    (ContainerState.RUNNING, ContainerChange.EXIT): ContainerState.EXITED,
    (ContainerState.CREATED, ContainerChange.REMOVE): ContainerState.REMOVED,
    # A rollout may be finished through another protocol while its container runs.
    (ContainerState.RUNNING, ContainerChange.REMOVE): ContainerState.REMOVED,
    (ContainerState.EXITED, ContainerChange.REMOVE): ContainerState.REMOVED,
    # Two requests may notice at the same time that the rollout is finished.
    (ContainerState.REMOVED, ContainerChange.REMOVE): ContainerState.REMOVED,
}
"""The state after each change."""


class ExecState(Enum):
    """The state of an exec instance, which runs at most once: each state follows the one before it."""

    CREATED = "created"
    RUNNING = "running"
    """Started. A detached instance stays in this state, because its end is not observed."""
    EXITED = "exited"


@dataclass(slots=True, eq=False)
class Container:
    """A container as its clients see it."""

    id: str  # 64 hexadecimal digits.
    name: str  # Chosen by the client, or made from the ID.
    task: str  # From the URL.
    owner: str  # The rollout in the URL that created the container; empty if the URL had none. Only this URL shows it.
    rollout: str  # The one that the container is, or belongs to; empty while its project is planned.
    spec: ContainerSpec  # The content of the create request.
    created_at: float  # All times are seconds since 1970.
    state: ContainerState = ContainerState.CREATED
    exit_code: int = 0  # Of the main command; meaningful once EXITED.
    started_at: float = 0.0  # 0 before the first start.
    finished_at: float = 0.0  # 0 before the first exit.
    execs: dict[str, "Exec"] = field(default_factory=dict)  # The latest exec instances by ID.
    project: str = ""  # Empty for a container by itself.
    service: str = ""  # The side service of the sandbox that it is; empty for the main container.
    lost: str = ""  # Why its state is gone, so that it has ended; empty while it can be had.

    @property
    def is_planned(self) -> bool:
        """Whether it belongs to a project that has made no call yet, and so has no rollout."""
        return not self.rollout

    @property
    def networks(self) -> dict[str, Any]:
        """What the client said about each network of the container, by the network's name or ID."""
        settings: dict[str, Any] = self.spec.body.get("NetworkingConfig") or {}
        return settings.get("EndpointsConfig") or {}

    @property
    def is_running(self) -> bool:
        """Whether the container is in the state RUNNING."""
        return self.state is ContainerState.RUNNING

    def change(self, change: ContainerChange) -> None:
        """Move to the next state. Raises ValueError if the table has no such transition."""
        self.state = next_state(NEXT, self.state, change)


@dataclass(frozen=True, slots=True)
class ShownContainers:
    """Which containers a client is shown: those created below its URL; with a rollout's token, that rollout's alone."""

    task: str
    owner: str  # The rollout in the URL.
    alone: bool = False

    def includes(self, container: Container) -> bool:
        """Return whether a container is shown; a planned one becomes the URL's rollout."""
        here = (container.task, container.owner) == (self.task, self.owner)
        return here and (not self.alone or container.rollout in ("", self.owner))


@dataclass(slots=True, eq=False)
class Exec:
    """An exec instance."""

    id: str  # 64 hexadecimal digits.
    container: Container
    spec: ExecSpec
    detach_keys: str = ""  # The client's key sequence, which is only shown back.
    state: ExecState = ExecState.CREATED
    exit_code: int | None = None  # None until it has exited, and for detached instances.
    marks: Headers = ()  # The header with the marks of its call.

    @property
    def is_running(self) -> bool:
        """Whether the instance is in the state RUNNING."""
        return self.state is ExecState.RUNNING

    def exit(self, code: int | None, marks: Headers = ()) -> None:
        """Note how the instance ended; None leaves it running in the background."""
        self.exit_code, self.marks = code, marks
        self.state = ExecState.RUNNING if code is None else ExecState.EXITED
