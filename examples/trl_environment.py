"""An environment for TRL's `GRPOTrainer(environment_factory=ForkpointShell)` whose tool runs in Forkpoint.

Read docs/agents/openenv.md. Each row of the dataset has a `task`. FORKPOINT_URL is Forkpoint's base URL.
"""

import os
import uuid
from typing import Any

import httpx


class ForkpointShell:
    """The environment of one rollout. TRL makes one for each rollout of a batch, and resets it for the next batch."""

    def __init__(self) -> None:
        url = os.environ.get("FORKPOINT_URL", "http://127.0.0.1:8700")
        self._client = httpx.Client(base_url=url, timeout=300)
        self._base = ""

    def reset(self, task: str, **_: Any) -> None:
        """Begin a rollout of the row's task."""
        if self._base:
            self._client.delete(f"/api/v1/{self._base}")
        self._base = f"tasks/{task}/rollouts/{uuid.uuid4().hex}"

    def bash(self, command: str) -> str:
        """Run a command in the task's shell.

        Args:
            command: The command for bash.
        """
        _, task, _, rollout = self._base.split("/")
        response = self._client.post(f"/t/{task}/r/{rollout}/shell/exec", json={"command": command})
        response.raise_for_status()
        result = response.json()
        return str(result["stdout"] + result["stderr"])
