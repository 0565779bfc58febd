"""Errors of the storage room."""


class StoreError(RuntimeError):
    """The store could not be read or written: the disk is full, or the file is not ours. Nothing was recorded."""


class NotWholeError(StoreError):
    """A tree could not be read back to its end, so what it has of the store says nothing of the rest."""

    def __init__(self) -> None:
        super().__init__("the recorded calls of this task could not be read back. Send the call again.")


class DamagedError(StoreError):
    """What the store holds is not what was written: its digest differs. It must not be used."""
