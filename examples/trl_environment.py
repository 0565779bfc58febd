"""An environment for TRL's `GRPOTrainer(environment_factory=ForkpointShell)` whose tool runs in Forkpoint.

Read docs/agents/openenv.md. Each row of the dataset has a `task`. FORKPOINT_URL is Forkpoint's base URL.
"""

import os
from typing import TYPE_CHECKING, Any

from forkpoint import Client

if TYPE_CHECKING:
    from forkpoint.client import Rollout


class ForkpointShell:
    """The environment of one rollout. TRL makes one for each rollout of a batch, and resets it for the next batch."""

    def __init__(self) -> None:
        self._client = Client(os.environ.get("FORKPOINT_URL"))
        self._rollout: Rollout | None = None

    def reset(self, task: str, **_: Any) -> None:
        """Begin a rollout of the row's task."""
        if self._rollout is not None:
            self._rollout.finish()
        self._rollout = self._client.task(task).rollout()

    def bash(self, command: str) -> str:
        """Run a command in the task's shell.

        Args:
            command: The command for bash.
        """
        assert self._rollout is not None, "reset comes first"
        return self._rollout.exec(command).output
