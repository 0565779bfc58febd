"""Errors of the storage room."""


class StoreError(RuntimeError):
    """The store could not be read or written: the disk is full, or the file is not ours. Nothing was recorded."""


class DamagedError(StoreError):
    """What the store holds is not what was written: its digest differs. It must not be used."""
