"""An environment for TRL's `GRPOTrainer(environment_factory=ForkpointShell)` whose tool runs in Forkpoint.

Read docs/agents/openenv.md. Each row of the dataset has a `task`; FORKPOINT_URL says where Forkpoint listens.
"""

import os
import uuid
from typing import Any

import httpx


class ForkpointShell:
    """TRL makes one for each rollout of a batch, and resets it for the next."""

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
            command: What bash is to run.
        """
        _, task, _, rollout = self._base.split("/")
        answer = self._client.post(f"/t/{task}/r/{rollout}/shell/exec", json={"command": command})
        answer.raise_for_status()
        told = answer.json()
        return str(told["stdout"] + told["stderr"])
