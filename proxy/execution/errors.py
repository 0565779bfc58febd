"""Errors of execution: a state that cannot be rebuilt, a rollout that is gone."""


class StateLostError(RuntimeError):
    """A node's state cannot be rebuilt: its replay reaches another one, and no snapshot is left."""


class RolloutGoneError(RuntimeError):
    """The rollout was finished, or the state it stood at was forgotten, while its call waited."""


class NothingHappened(RuntimeError):  # noqa: N818 - it is an answer
    """The call found nothing to tell and changed nothing, so nothing was recorded."""
