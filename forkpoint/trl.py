"""An environment for TRL: `GRPOTrainer(..., environment_factory=ForkpointShell)`. Its tool runs in Forkpoint.

Each row of the dataset has a `task`, the name of a Forkpoint task. FORKPOINT_URL is the proxy's URL, and FORKPOINT_RUN
the label `run` of the rollouts. This module does not import TRL.
"""

import functools
import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from forkpoint.client import Client, Rollout
from forkpoint.errors import ForkpointError

Reward = Callable[..., Sequence[float | None]]
"""A reward function of TRL: one value for each environment of the batch; None leaves it to other functions."""


class ForkpointShell:
    """The environment of one rollout. TRL makes one for each rollout of a batch, and resets it for the next batch."""

    def __init__(self) -> None:
        """Make the environment; `reset` begins its first rollout."""
        run = os.environ.get("FORKPOINT_RUN")
        self._client = Client(os.environ.get("FORKPOINT_URL"), labels={"run": run} if run else None)
        self._running: list[Rollout] = []
        # No reset follows the last batch: its rollouts are finished when the process exits.
        self._end = weakref.finalize(self, _end, self._running, self._client)

    def reset(self, task: str, **row: Any) -> None:
        """Begin a rollout of the row's task. A column `id` becomes its label `row`."""
        _finish(self._running)
        labels = {"row": str(row["id"])} if "id" in row else None
        self._running.append(self._client.task(task).rollout(labels=labels))

    def bash(self, command: str) -> str:
        """Run a command in the task's shell. Returns its output, and how it failed if it did.

        Args:
            command: The command for bash.
        """
        assert self._running, "reset comes first"
        result = self._running[0].exec(command)
        if result.timed_out:
            return f"{result.output}[timed out]\n"
        return f"{result.output}[exit code {result.exit_code}]\n" if result.exit_code else result.output


def labelled(reward: Reward) -> Reward:
    """Return a reward function that also labels the rollouts, with `reward` and with the trainer's `step`."""

    @functools.wraps(reward)
    def labelling(*, environments: Sequence[ForkpointShell], **columns: Any) -> Sequence[float | None]:
        values = reward(environments=environments, **columns)
        state = columns.get("trainer_state")
        step = {} if state is None else {"step": str(state.global_step)}
        for environment, value in zip(environments, values, strict=True):
            # No value, which another function may give, must not remove that one's.
            reward_label = {} if value is None else {"reward": value}
            for rollout in environment._running:  # noqa: SLF001 - what TRL sees of it are the model's tools
                rollout.label(**step, **reward_label)
        return values

    return labelling


def _finish(running: list[Rollout]) -> None:
    while running:
        running.pop().finish()


def _end(running: list[Rollout], client: Client) -> None:
    # The proxy may have gone before the trainer.
    with suppress(ForkpointError):
        _finish(running)
    client.close()
