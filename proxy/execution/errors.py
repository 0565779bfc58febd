"""Errors of execution: a state that cannot be rebuilt, a rollout that is gone."""


class StateLostError(RuntimeError):
    """A node's state cannot be rebuilt: its replay reaches a different state, and no snapshot of it exists."""


class RolloutGoneError(RuntimeError):
    """The rollout ended, or its node was forgotten, while its call waited."""
