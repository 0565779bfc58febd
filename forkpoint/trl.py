"""An environment for TRL: `GRPOTrainer(..., environment_factory=ForkpointShell)`. Its tool runs in Forkpoint.

Each row of the dataset has a `task`, the name of a Forkpoint task. FORKPOINT_URL is the proxy's URL. This module does
not import TRL.
"""

import os
from typing import Any

from forkpoint.client import Client, Rollout


class ForkpointShell:
    """The environment of one rollout. TRL makes one for each rollout of a batch, and resets it for the next batch."""

    def __init__(self) -> None:
        """Make the environment; `reset` begins its first rollout."""
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
